"""Writes the tokenizer of a GGUF file as a Hugging Face folder has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.model.tokenizers.builder import build_tokenizer, write_tokenizer
from engine.model.tokenizers.gguf import read_vocabulary
from engine.process.model_source import CHATS_BEGIN_WITH_BOS


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
