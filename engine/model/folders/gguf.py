"""Makes Hugging Face folders of GGUF files: tokenizer, configuration, and a link to the file, which has the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from engine.model.folders.gguf_tokenizer import write_gguf_tokenizer
from engine.model.gguf.config import read_config
from engine.process.files import appearing
from engine.process.model_source import GGUF_NAME, is_broken

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
    if is_broken(out / GGUF_NAME):  # the file was moved since the folder was made
        shutil.rmtree(out)
    with appearing(out) as folder:
        _write(file, folder, on_progress)


def _write(file: Path, out: Path, on_progress: OnProgress) -> None:
    config = read_config(file)  # before the tokenizer, which takes seconds: a file may be refused
    on_progress(f"reading the tokenizer of {file.name}", 0.0)
    write_gguf_tokenizer(file, out)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / GGUF_NAME).symlink_to(file.absolute())  # a link's own target may have another name than a part's
