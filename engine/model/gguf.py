"""GGUF files into Hugging Face folders: dequantized to bf16 once, so that every later start reads safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

from engine.paths import partial_prefix

RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors and tokenizers, in exceptions of their own, tell what the system refused them."""


def convert_gguf(gguf: Path, out: Path, on_progress: Callable[[str], None]) -> None:
    """Writes `out`: weights as bf16 safetensors, config.json, tokenizer and chat template.

    `out` appears whole or not at all; when another process made it meanwhile, that one is kept.

    Args:
        on_progress: told what is being done now.

    Raises:
        ValueError: the file is damaged, or of an architecture transformers cannot read.
        OSError: the disk is full, for one.
    """
    disable_progress_bar()  # the caller shows how it goes
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix(out.name, os.getpid()), dir=out.parent))
    try:
        _convert(gguf, partial, on_progress)
        _publish(partial, out)
    except Exception as error:
        found = RUST_OS_ERROR.search(str(error))
        if found is None or isinstance(error, OSError):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(out.parent)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, out: Path, on_progress: Callable[[str], None]) -> None:
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": gguf.parent,
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    on_progress(f"reading the tokenizer of {gguf.name}")
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    on_progress(f"dequantizing {gguf.name}")
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=dequantize)
    on_progress("writing safetensors")
    model.save_pretrained(out)
    _drop_quantization(out / "config.json")


def _drop_quantization(config_file: Path) -> None:
    """What was written is plain bf16, whatever the file it came from."""
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)
    config_file.write_text(json.dumps(config, indent=2))


def _publish(partial: Path, out: Path) -> None:
    partial.chmod(0o755)
    try:
        os.replace(partial, out)
    except OSError:
        if not (out / "config.json").is_file():
            raise
