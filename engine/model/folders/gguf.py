"""Makes Hugging Face folders of GGUF files: tokenizer, configuration, and a link to the file, which has the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.model.gguf.config import read_config
from engine.model.tokenizers.builder import build_tokenizer, write_tokenizer
from engine.model.tokenizers.gguf import read_vocabulary
from engine.process.files import appearing
from engine.process.model_source import CHATS_BEGIN_WITH_BOS, GGUF_NAME, is_broken

OnProgress = Callable[[str, float], object]
"""Called with the current activity and the fraction of the work that is done, from 0 to 1."""


def prepare_gguf(file: Path, out: Path, on_progress: OnProgress) -> None:
    """Make the model folder `out` for a GGUF file, with a link to it. Calls `on_progress` with the activity and the
    fraction done. Raises ValueError if the file is damaged or not supported, and OSError."""
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


def write_gguf_tokenizer(path: Path, out: Path) -> None:
    """Write the tokenizer and the chat templates of a GGUF file into the folder `out`, as transformers reads them.
    Raises ValueError, which names the file and the key, as `read_vocabulary` does."""
    vocabulary = read_vocabulary(path)
    settings: dict[str, object] = {CHATS_BEGIN_WITH_BOS: vocabulary.adds_bos}
    if vocabulary.templates:
        settings["chat_template"] = _templates(vocabulary.templates)
    try:
        write_tokenizer(build_tokenizer(vocabulary), vocabulary, out, **settings)
    except ValueError as error:
        raise ValueError(f"{path.name} {error}") from error


def _templates(templates: Mapping[str, str]) -> object:
    """Return chat templates as transformers reads them: one, or a list of named ones."""
    if list(templates) == ["default"]:
        return templates["default"]
    return [{"name": name, "template": text} for name, text in templates.items()]
