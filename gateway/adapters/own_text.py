"""Compares the chat template and the added tokens in an adapter's folder with those of its base model, which are used:
operators should know where an adapter was trained with others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from engine.process.adapter_files import ADDED_TOKENS_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE
from engine.process.small_files import read_small

TOKENIZER_FILE = "tokenizer.json"
MOST_TOKENIZER_BYTES = 64 << 20
"""Maximum size of a tokenizer.json that is read: twice the largest of today's models."""
ADDED_TOKENS = re.compile(rb'"added_tokens"\s*:\s*')
MOST_ADDED_BYTES = 1 << 20
"""Maximum size of the list of added tokens in a tokenizer.json that is decoded."""
MOST_NAMED = 5
"""Maximum number of tokens that a warning names."""
Told = TypeVar("Told")
Comparison = Callable[[Path, str], tuple[str, ...]]
"""Returns what operators should know of the other files in an adapter's folder, given the template that renders chats
of the adapter: empty for the base model's. It may block."""


class _Token(Struct):
    content: str


class _Config(Struct):
    """The fields of tokenizer_config.json that are compared."""

    chat_template: str | list[dict[str, str]] | None = None
    added_tokens_decoder: dict[str, _Token] = {}


class _Model(Struct):
    vocab: Any = None


class _Tokenizer(Struct):
    """The vocabulary in tokenizer.json."""

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
    listed = (*_added_tokens(folder / TOKENIZER_FILE), *config.added_tokens_decoder.values())
    further = _decoded(folder / ADDED_TOKENS_FILE, dict[str, int]) or {}
    tokens = frozenset(token.content for token in listed) | further.keys()
    return OwnText(_template_in(folder) or _default_of(config.chat_template), tokens)


def comparison_with(base: Path, template: Path | None) -> Comparison:
    """Return a function that compares an adapter's folder with that of its base model, whose chat template is
    `template` if given, and returns a warning for each difference. It blocks."""

    @cache
    def theirs() -> OwnText:
        return read_own_text(base)

    @cache
    def vocabulary() -> frozenset[str] | None:
        return _vocabulary(base / TOKENIZER_FILE)

    def compare(folder: Path, rendered_with: str) -> tuple[str, ...]:
        text = read_own_text(folder)
        if text == OwnText():
            return ()
        wanted = rendered_with or (_text_of(template) if template else theirs().template)
        added = text.tokens - theirs().tokens
        known = vocabulary() if added else None
        missing = sorted(added - known) if known is not None else []
        return (*_template_warning(text.template, wanted), *_token_warning(missing))

    return compare


def _template_warning(template: str, base: str) -> tuple[str, ...]:
    if not template or not base or template.strip() == base.strip():
        return ()
    return (
        "its folder has another chat template than the one that renders its chats: load it with the chat_template "
        "auto, which takes the folder's, or send rendered prompts as completions",
    )


def _token_warning(missing: list[str]) -> tuple[str, ...]:
    """Return a warning of added tokens that the base model's tokenizer does not have, not even as ordinary ones."""
    if not missing:
        return ()
    named = ", ".join(repr(token[:40]) for token in missing[:MOST_NAMED])
    return (
        f"its folder adds {len(missing)} tokens that the base model's tokenizer lacks ({named}), which are read as "
        "ordinary text: serve a base model with the adapter's tokenizer and an embedding that was resized for it",
    )


def _vocabulary(file: Path) -> frozenset[str] | None:
    """Return the ordinary tokens in a tokenizer.json. None means that the file is missing or lists them otherwise."""
    tokenizer = _decoded(file, _Tokenizer, MOST_TOKENIZER_BYTES)
    vocabulary = tokenizer.model.vocab if tokenizer else None
    return frozenset(vocabulary) if isinstance(vocabulary, Mapping) else None


def _added_tokens(file: Path) -> list[_Token]:
    """Return the added tokens in a tokenizer.json; none if it is missing or damaged. Only their list is decoded,
    because decoding a large vocabulary holds the interpreter's lock, and with it all streams, for a tenth of a
    second."""
    try:
        content = read_small(file, MOST_TOKENIZER_BYTES)
        if (match := ADDED_TOKENS.search(content)) is None:
            return []
        listed = content[match.end() : match.end() + MOST_ADDED_BYTES].decode(errors="replace")
        return msgspec.convert(json.JSONDecoder().raw_decode(listed)[0], list[_Token])
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return []


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
