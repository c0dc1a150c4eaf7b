"""Makes Hugging Face folders of GGUF files: tokenizer, configuration, and a link to the file, which has the weights."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from engine.model.gguf_config import read_config
from engine.process.files import appearing
from engine.process.model_source import GGUF_NAME, is_broken

RUST_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""Finds the OS error number in messages of safetensors and tokenizers, whose exceptions are of their own types."""


OnProgress = Callable[[str, float], object]
"""Called with the current activity and the fraction of the work that is done, from 0 to 1."""


def prepare_gguf(file: Path, out: Path, on_progress: OnProgress) -> None:
    """Makes the model folder `out` for a GGUF file: config.json, tokenizer and chat template, and a link to `file`,
    which must stay where it is. The folder appears when it is complete (see `appearing`).

    Args:
        on_progress: called with the current activity and the fraction of all work that is done, from 0 to 1.

    Raises:
        ValueError: the file is damaged, or has metadata that the engine does not support.
        OSError: the system refuses an operation, for example because the disk is full.
    """
    disable_progress_bar()  # the caller shows the progress
    if is_broken(out / GGUF_NAME):  # the file was moved since the folder was made
        shutil.rmtree(out)
    try:
        with appearing(out) as folder, read_once():
            _write(file, folder, on_progress)
    except Exception as error:
        found = RUST_OS_ERROR.search(str(error))
        if found is None or isinstance(error, OSError):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(out.parent)) from error


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
def read_once() -> Iterator[None]:
    """Make transformers, while the block runs, read a file's metadata once instead of once for the tokenizer and once
    for the configuration, which takes seconds."""
    with _replaced(gguf, "GGUFReader", cache(QuickReader)):
        yield


def _write(file: Path, out: Path, on_progress: OnProgress) -> None:
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    config = read_config(file)  # before the tokenizer, which takes seconds: a file may be refused
    on_progress(f"reading the tokenizer of {file.name}", 0.0)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / GGUF_NAME).symlink_to(file.absolute())  # a link's own target may have another name than a part's
