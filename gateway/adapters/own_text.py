"""Compares the chat template and the added tokens that lie in an adapter's folder with those of its base model.

Trainers save their tokenizer beside an adapter. Chats and prompts are always encoded by the base model's, so that an
operator should know where the adapter was trained with another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from engine.process.adapter_files import ADDED_TOKENS_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from engine.process.small_files import read_small

TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENIZER_BYTES = 64 << 20
"""Maximum size of a tokenizer.json that is read: twice the largest of today's models."""
MOST_NAMED = 5
"""Maximum number of tokens that a warning names."""
Told = TypeVar("Told")


class _Token(Struct):
    content: str


class _Config(Struct):
    """The fields of tokenizer_config.json that are compared."""

    chat_template: str | list[dict[str, str]] | None = None
    added_tokens_decoder: dict[str, _Token] = {}


class _Model(Struct):
    vocab: Any = None


class _Tokenizer(Struct):
    """The fields of tokenizer.json that are compared."""

    added_tokens: list[_Token] = []
    model: _Model = msgspec.field(default_factory=_Model)


@dataclass(frozen=True, slots=True)
class OwnText:
    """The chat template, empty if there is none, and the added tokens in a folder."""

    template: str = ""
    tokens: frozenset[str] = field(default_factory=frozenset)


def read_own_text(folder: Path) -> OwnText:
    """Return the chat template and the added tokens in the folder of an adapter or a model. Files that are missing or
    damaged count as empty. Blocks."""
    config = _decoded(folder / TOKENIZER_CONFIG_FILE, _Config) or _Config()
    tokenizer = _decoded(folder / TOKENIZER_FILE, _Tokenizer, MOST_TOKENIZER_BYTES) or _Tokenizer()
    listed = (*tokenizer.added_tokens, *config.added_tokens_decoder.values())
    further = _decoded(folder / ADDED_TOKENS_FILE, dict[str, int]) or {}
    tokens = frozenset(token.content for token in listed) | further.keys()
    return OwnText(_template_in(folder) or _default_of(config.chat_template), tokens)


def comparison_with(base: Path, template: Path | None) -> Callable[[Path], tuple[str, ...]]:
    """Return a function that compares an adapter's folder with the folder of its base model, whose chat template is in
    the file `template` if that is given, and returns a warning for each difference. It blocks."""

    def compare(folder: Path) -> tuple[str, ...]:
        own = read_own_text(folder)
        if own == OwnText():
            return ()
        theirs = read_own_text(base)
        wanted = _text_of(template) if template else theirs.template
        return (*_template_warning(own.template, wanted), *_token_warning(own.tokens - theirs.tokens, base))

    return compare


def _template_warning(own: str, base: str) -> tuple[str, ...]:
    if not own or not base or own.strip() == base.strip():
        return ()
    return (
        "its folder has another chat template than the base model, whose template renders all chats: set the base "
        "model's chat_template to that of the adapter if all of its adapters have it, or send rendered prompts as "
        "completions",
    )


def _token_warning(tokens: frozenset[str], base: Path) -> tuple[str, ...]:
    """Return a warning of added tokens that the tokenizer in the folder `base` does not have; none if it has all of
    them as ordinary ones, or has no tokenizer.json."""
    known = _decoded(base / TOKENIZER_FILE, _Tokenizer, MOST_TOKENIZER_BYTES) if tokens else None
    vocabulary = known.model.vocab if known else None
    missing = sorted(tokens - vocabulary.keys()) if isinstance(vocabulary, Mapping) else []
    if not missing:
        return ()
    named = ", ".join(repr(token[:40]) for token in missing[:MOST_NAMED])
    return (
        f"its folder adds {len(missing)} tokens that the base model's tokenizer lacks ({named}), which are read as "
        "ordinary text: serve a base model with the adapter's tokenizer and an embedding that was resized for it",
    )


def _template_in(folder: Path) -> str:
    return _text_of(folder / TEMPLATE_FILE)


def _text_of(file: Path) -> str:
    try:
        return read_small(file).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def _default_of(template: str | list[dict[str, str]] | None) -> str:
    """Return the default one of the chat templates in tokenizer_config.json, which may have several by name."""
    if isinstance(template, list):
        return next((entry.get("template", "") for entry in template if entry.get("name") == "default"), "")
    return template or ""


def _decoded(file: Path, kind: type[Told], most: int | None = None) -> Told | None:
    try:
        content = read_small(file) if most is None else read_small(file, most)
        return msgspec.json.decode(content, type=kind)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return None
