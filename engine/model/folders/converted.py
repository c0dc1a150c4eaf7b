"""Makes a folder with a tokenizer.json of a Hugging Face folder whose tokenizer is in another format, because grammars
and the gateway read that file. The new folder has links to everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from engine.model.tokenizers.builder import build_tokenizer, write_tokenizer
from engine.model.tokenizers.sentencepiece import read_sentencepiece
from engine.model.tokenizers.settings import Template, read_settings, with_settings
from engine.model.tokenizers.tekken import read_tekken
from engine.model.tokenizers.vocabulary import Vocabulary
from engine.process.files import appearing
from engine.process.model_source import OTHER_TOKENIZERS, TOKENIZER, TOKENIZER_SETTINGS, other_tokenizer

READERS = {"tokenizer.model": read_sentencepiece, "tekken.json": read_tekken}
"""Readers of the files of OTHER_TOKENIZERS."""
REPLACED = (TOKENIZER, *OTHER_TOKENIZERS, *TOKENIZER_SETTINGS)


def check_tokenizer(folder: Path) -> None:
    """Raise ValueError, which names the file, if the tokenizer of a Hugging Face folder is in another format and no
    tokenizer.json can be made of it."""
    file = other_tokenizer(folder)
    if file is not None:
        _tokenizer(file)


def prepare_folder(folder: Path, out: Path, on_progress: Callable[[str, float], object]) -> None:
    """Make the folder `out` of a Hugging Face folder: its tokenizer, and links to the other files. Calls `on_progress`
    with the activity and the fraction done. Raises ValueError, which names the file, or OSError."""
    file = other_tokenizer(folder)
    assert file is not None
    on_progress(f"reading {file.name}", 0.0)
    vocabulary, tokenizer, template = _tokenizer(file)
    with appearing(out) as made:
        write_tokenizer(tokenizer, vocabulary, made, **({} if template is None else {"chat_template": template}))
        for entry in folder.iterdir():
            if entry.name not in REPLACED:
                (made / entry.name).symlink_to(entry.absolute())


def _tokenizer(file: Path) -> tuple[Vocabulary, Tokenizer, Template]:
    """Return the vocabulary of a tokenizer's file with what its folder says of it, its tokenizer, and the folder's chat
    template."""
    vocabulary, settings = READERS[file.name](file), read_settings(file.parent)
    try:
        vocabulary = with_settings(vocabulary, settings)
        return vocabulary, build_tokenizer(vocabulary), settings.config.chat_template
    except ValueError as error:
        raise ValueError(f"{file.parent} {error}: fetch the model's {TOKENIZER}") from error
