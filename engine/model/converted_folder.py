"""Makes a folder with a tokenizer.json of a Hugging Face folder whose tokenizer is in another format, because grammars
and the gateway read that file. The new folder has links to everything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.model.sentencepiece_file import read_sentencepiece
from engine.model.tekken_file import read_tekken
from engine.model.tokenizer_builder import write_tokenizer
from engine.model.tokenizer_settings import read_settings, with_settings
from engine.model.vocabulary import Vocabulary
from engine.process.files import appearing
from engine.process.model_source import OTHER_TOKENIZERS, TOKENIZER, TOKENIZER_SETTINGS, other_tokenizer

READERS: dict[str, Callable[[Path], Vocabulary]] = dict(
    zip(OTHER_TOKENIZERS, (read_sentencepiece, read_tekken), strict=True)
)
"""Readers of tokenizers in other formats, by the names of their files."""


def prepare_folder(folder: Path, out: Path, on_progress: Callable[[str, float], object]) -> None:
    """Make the folder `out` of a Hugging Face folder: its tokenizer, and links to the other files, which must stay
    where they are. The folder appears when it is complete (see `appearing`).

    Args:
        on_progress: called with the current activity and the fraction of all work that is done, from 0 to 1.

    Raises:
        ValueError: a file is damaged, or the tokenizer is of a kind that is not read; the message names the file.
        OSError: the system refuses an operation, for example because the disk is full.
    """
    file = other_tokenizer(folder)
    assert file is not None
    on_progress(f"reading {file.name}", 0.0)
    vocabulary, settings = READERS[file.name](file), read_settings(folder)
    with appearing(out) as made:
        try:
            template = {} if settings.config.chat_template is None else {"chat_template": settings.config.chat_template}
            write_tokenizer(with_settings(vocabulary, settings), made, **template)
        except ValueError as error:
            raise ValueError(f"{folder} {error}: fetch the model's {TOKENIZER}") from error
        for entry in folder.iterdir():
            if entry.name not in (*OTHER_TOKENIZERS, *TOKENIZER_SETTINGS):
                (made / entry.name).symlink_to(entry.absolute())
