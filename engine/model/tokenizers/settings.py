"""What a Hugging Face folder says of its tokenizer beside the vocabulary: added tokens, special tokens, whether prompts
begin with BOS, and the chat template. transformers' tokenizers in Python read the same files, with the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from engine.model.tokenizers.vocabulary import MOST_TOKENS, Kind, Vocabulary
from engine.process.model_source import TOKENIZER_SETTINGS
from engine.process.small_files import read_small

NAMES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
FLAGS = ("lstrip", "rstrip", "single_word")
"""Flags of added tokens that are kept. `normalized` is not: transformers' tokenizers in Python look for added tokens
in the text as it is."""
FURTHER = ("additional_special_tokens", "extra_special_tokens")
"""Settings that list special tokens without a name."""
MOST_BYTES = 32 << 20
"""Maximum size of a file of settings."""
Found = TypeVar("Found")
Template = str | list[dict[str, str]] | None
"""A chat template, or several with their names."""


class Added(msgspec.Struct):
    """An added token. Its fields are those of transformers' `AddedToken`."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    special: bool | None = False
    """None means that the folder does not say it, and that a control token of the tokenizer's file stays one."""


class _Config(msgspec.Struct):
    """The fields of tokenizer_config.json that are read."""

    added_tokens_decoder: dict[int, Added] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    chat_template: Template = None


class TokenizerSettings(NamedTuple):
    """What the files of a folder say."""

    config: _Config
    added: Mapping[int, Added]
    """Added tokens by their ids."""
    named: Mapping[str, str]
    """Texts of special tokens by transformers' names without `_token`, if they are named."""
    further: frozenset[str]
    """Texts of special tokens that have no name."""
    ids: Mapping[str, int]
    """Ids of special tokens in config.json, by their names."""


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the settings of a folder's tokenizer. Raises ValueError, which names the file, if one is damaged."""
    config_file = folder / TOKENIZER_SETTINGS[0]
    config, values = _decoded(config_file, _Config), _decoded(config_file, dict[str, Any])
    added = config.added_tokens_decoder
    if added is None:
        added, named = _older_settings(folder)
        values |= named
    ids = {name: _first(_decoded(folder / "config.json", dict[str, Any]).get(f"{name}_token_id")) for name in NAMES}
    texts = {name: next(_texts(values.get(f"{name}_token")), "") for name in NAMES}
    return TokenizerSettings(
        config,
        added,
        {name: text for name, text in texts.items() if text},
        frozenset(text for key in FURTHER for text in _texts(values.get(key))),
        {name: token_id for name, token_id in ids.items() if token_id is not None},
    )


def _older_settings(folder: Path) -> tuple[dict[int, Added], dict[str, Any]]:
    """Return the added tokens by their ids, and the special tokens, of the files that count only in folders whose
    tokenizer_config.json has no `added_tokens_decoder`."""
    named_file, added_file = (folder / name for name in TOKENIZER_SETTINGS[1:])
    added = _decoded(added_file, dict[str, int])
    return {token_id: Added(text, special=None) for text, token_id in added.items()}, _decoded(
        named_file, dict[str, Any]
    )


def with_settings(vocabulary: Vocabulary, settings: TokenizerSettings) -> Vocabulary:
    """Return a vocabulary with the added and special tokens of a folder. Raises ValueError if they do not fit it."""
    config = settings.config
    tokens, kinds = _with_added(vocabulary, settings.added)
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    special = dict(_special(vocabulary, settings, ids))
    for token_id in (*special.values(), *(ids[text] for text in settings.further if text in ids)):
        kinds[token_id] = Kind.UNKNOWN if kinds[token_id] == Kind.UNKNOWN else Kind.CONTROL
    merged = (id_ for id_ in settings.added if _is_merged(vocabulary, id_, tokens[id_]))
    flagged = {token_id: token for token_id, token in settings.added.items() if not _is_symbol(vocabulary, token_id)}
    return vocabulary._replace(
        tokens=tokens,
        kinds=kinds,
        scores=[*vocabulary.scores, *[0.0] * (len(tokens) - len(vocabulary.tokens))],
        special=special,
        adds_bos="bos" in special and _or(config.add_bos_token, True),
        adds_eos="eos" in special and _or(config.add_eos_token, False),
        adds_space=vocabulary.adds_space and _or(config.add_prefix_space, True),
        adds_space_once=not _or(config.legacy, True),
        merged=frozenset(merged),
        flags={token.content: {flag: getattr(token, flag) for flag in FLAGS} for token in flagged.values()},
    )


def _with_added(vocabulary: Vocabulary, added: Mapping[int, Added]) -> tuple[list[str], list[int]]:
    """Return the tokens and their kinds with the added ones; those that fill a gap between ids have names of theirs."""
    count = max((len(vocabulary.tokens), *(token_id + 1 for token_id in added)))
    if count > MOST_TOKENS or min(added, default=0) < 0:
        raise ValueError(f"has added tokens with ids that are not between 0 and {MOST_TOKENS:,}")
    fill = range(len(vocabulary.tokens), count)
    tokens = [*vocabulary.tokens, *(f"[EMPTY_{token_id}]" for token_id in fill)]
    kinds = [*vocabulary.kinds, *(Kind.UNUSED for _ in fill)]
    for token_id, token in added.items():
        tokens[token_id] = token.content
        kinds[token_id] = _kind(kinds[token_id], token)
    if "" in tokens or len(set(tokens)) < len(tokens):
        raise ValueError("has an added token that is empty, or that its vocabulary has with another id")
    return tokens, kinds


def _kind(kind: int, token: Added) -> int:
    """Return the kind of an added token that has one in the tokenizer's file."""
    if kind == Kind.UNKNOWN or (kind == Kind.CONTROL and token.special is None):
        return kind
    return Kind.CONTROL if token.special else Kind.USER_DEFINED


def _special(vocabulary: Vocabulary, settings: TokenizerSettings, ids: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the named special tokens: by their names, else by the ids of config.json where these are control tokens,
    else as the tokenizer's file has them."""
    for name in NAMES:
        text, token_id = settings.named.get(name), settings.ids.get(name, -1)
        if text and text in ids:
            yield name, ids[text]
        elif text and name in ("bos", "eos"):
            raise ValueError(f"names the token {text[:80]!r} ({name}_token), which its tokenizer lacks")
        elif text is None and 0 <= token_id < len(vocabulary.kinds) and vocabulary.kinds[token_id] == Kind.CONTROL:
            yield name, token_id
        elif text is None and name in vocabulary.special:
            yield name, vocabulary.special[name]


def _is_symbol(vocabulary: Vocabulary, token_id: int) -> bool:
    """Return whether the tokenizer's own file has a token that it finds before it merges."""
    return token_id < len(vocabulary.kinds) and vocabulary.kinds[token_id] == Kind.USER_DEFINED


def _is_merged(vocabulary: Vocabulary, token_id: int, text: str) -> bool:
    """Return whether the tokenizer's own file makes a token of others, also where the folder adds it with this text."""
    known = token_id < len(vocabulary.kinds) and vocabulary.kinds[token_id] in (Kind.NORMAL, Kind.UNUSED)
    return known and vocabulary.tokens[token_id] == text


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of one or several special tokens, each given as a text or as an object with its flags."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield from _texts(value["content"])
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _first(value: Any) -> int | None:
    """Return an id of config.json, of several the first."""
    found = value[0] if isinstance(value, list) and value else value
    return found if isinstance(found, int) else None


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _decoded(file: Path, kind: type[Found]) -> Found:
    """Return the content of a JSON file; without the file, that of an empty object."""
    try:
        return msgspec.json.decode(read_small(file, MOST_BYTES) if file.is_file() else b"{}", type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read ({error}): fetch it again") from error
