"""Converts GGUF files to Hugging Face folders, dequantized to bf16 once: every later start reads safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils
from transformers.utils.logging import disable_progress_bar

from engine.process.files import filling, partial_prefix, remove_abandoned

RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""Finds the OS error number in messages of safetensors and tokenizers, whose exceptions are of their own types."""


TOKENIZER_SHARE, TENSORS_SHARE = 0.5, 0.95
"""Fractions of the total time that have passed once the tokenizer, and then all tensors, have been converted."""

OnProgress = Callable[[str, float], object]
"""Called with the current activity and the fraction of the conversion that is done, from 0 to 1."""


def convert_gguf(file: Path, out: Path, on_progress: OnProgress) -> None:
    """Writes the folder `out`: weights as bf16 safetensors, config.json, tokenizer and chat template. `out` appears
    whole or not at all. If another process has created it meanwhile, that folder is kept. Removes the folders beside
    `out` that processes left unfinished when they ended.

    Args:
        on_progress: called with the current activity and the fraction of all work that is done, from 0 to 1.

    Raises:
        ValueError: the file is damaged, or of an architecture transformers cannot read.
        OSError: the system refuses an operation, for example because the disk is full.
    """
    disable_progress_bar()  # the caller shows the progress
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out.parent)
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix(out.name, os.getpid()), dir=out.parent))
    try:
        with filling(partial), _read_once(on_progress):
            _convert(file, partial, on_progress)
            _publish(partial, out)
    except Exception as error:
        found = RUST_OS_ERROR.search(str(error))
        if found is None or isinstance(error, OSError):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(out.parent)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class QuickReader(gguf.GGUFReader):
    """A `gguf.GGUFReader` whose `data` is a plain array, not a `numpy.memmap`. With 49,000 tokens and 48,000 merges,
    half of the time it takes to read the metadata is spent on slices of a memmap, each of which is a memmap again."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _read_once(on_progress: OnProgress) -> Iterator[None]:
    """Make transformers, while the block runs, read a file's metadata once instead of three times (for tokenizer,
    configuration and tensors), and build the table of tensor names once instead of once for each module of the model:
    converting SmolLM2 takes 7 s instead of 17 s. Calls of `on_progress`, one per tensor, replace its progress bar."""

    def counted(tensors: list[Any], desc: str = "") -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            share = TOKENIZER_SHARE + (TENSORS_SHARE - TOKENIZER_SHARE) * number / len(tensors)
            on_progress(f"dequantizing tensor {number + 1} of {len(tensors)}", share)
            yield tensor

    with (
        _replaced(gguf, "GGUFReader", cache(QuickReader)),
        _replaced(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        _replaced(modeling_gguf_pytorch_utils, "tqdm", counted),
    ):
        yield


def _convert(file: Path, out: Path, on_progress: OnProgress) -> None:
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    on_progress(f"reading the tokenizer of {file.name}", 0.0)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    on_progress(f"dequantizing {file.name}", TOKENIZER_SHARE)
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=dequantize)
    on_progress("writing safetensors", TENSORS_SHARE)
    model.save_pretrained(out)
    _drop_quantization(out / "config.json")


def _drop_quantization(config_file: Path) -> None:
    """Remove `quantization_config` from the configuration file, because the written weights are plain bf16."""
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
