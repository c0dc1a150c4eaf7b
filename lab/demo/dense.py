"""Writes a GGUF model as a Hugging Face folder in bf16, from which adapters are trained and references computed.

`python -m lab.demo.dense MODEL --data-dir FOLDER` prints the folder. The engine itself reads GGUF files as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils.logging import disable_progress_bar

from engine.model.folders.prepare import prepare_model
from engine.process.files import appearing, default_data_dir
from engine.process.model_source import GGUF_NAME


def dense_folder(model: str, data_dir: Path, console: Console) -> Path:
    """Return a folder of a model (see `prepare_model`) whose weights are safetensors: the model's own or, for a GGUF
    file, one in bf16 beside its folder, which is written once. Raises what `prepare_model` raises."""
    folder = prepare_model(model, data_dir, console)
    out = folder.with_name(f"{folder.name}-bf16")
    if (folder / GGUF_NAME).exists() and not (out / "config.json").is_file():
        console.print(f"dequantising {folder.name} to bf16, once")
        _write(folder, out)
    return out if (folder / GGUF_NAME).exists() else folder


def _write(folder: Path, out: Path) -> None:
    disable_progress_bar()
    with appearing(out) as written, _read_once():
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF_NAME, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(written)
        for file in folder.iterdir():
            if file.name not in ("config.json", GGUF_NAME):
                shutil.copy(file, written)
        _drop_quantization(written / "config.json")


class _QuickReader(gguf.GGUFReader):
    """A `gguf.GGUFReader` whose `data` is a plain array: slices of a memmap, each a memmap again, take half of the time
    to read the metadata."""

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
def _read_once() -> Iterator[None]:
    """Make transformers, while the block runs, read a file's metadata once instead of once for the configuration and
    once for the weights, which takes seconds."""
    with _replaced(gguf, "GGUFReader", cache(_QuickReader)):
        yield


def _drop_quantization(config_file: Path) -> None:
    """Remove `quantization_config` from the configuration file, because the written weights are plain bf16."""
    config = json.loads(config_file.read_text())
    config.pop("quantization_config", None)
    config_file.write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.demo.dense", description=dense_folder.__doc__)
    parser.add_argument("model")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    arguments = parser.parse_args()
    print(dense_folder(arguments.model, arguments.data_dir, Console(stderr=True)))


if __name__ == "__main__":
    main()
