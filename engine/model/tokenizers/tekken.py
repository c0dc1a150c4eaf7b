"""Reads Mistral's files of tokenizers (`tekken.json`): tiktoken's byte pairs behind a number of special tokens.

Source: `Tekkenizer` of mistral-common, for the fields, and the special tokens of files that list none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tokenizers import Regex

from engine.model.tokenizers.pretokenizers import PreTokenizer
from engine.model.tokenizers.vocabulary import BYTE_PAIRS, MOST_CHARACTERS, MOST_TOKENS, Kind, Vocabulary, check_merged
from engine.process.small_files import read_small

MOST_BYTES = 64 << 20
"""Maximum size of a file: three times the largest of today's."""
SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The first special tokens of a file that lists none."""
NAMED = {"unk": "<unk>", "bos": "<s>", "eos": "</s>", "pad": "<pad>"}


class _Word(msgspec.Struct):
    rank: int
    token_bytes: bytes


class _Special(msgspec.Struct):
    rank: int
    token_str: str
    is_control: bool = True


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Word]
    special_tokens: list[_Special] | None = None


def read_tekken(path: Path) -> Vocabulary:
    """Read the vocabulary of a file. Raises ValueError, which names the file, if it is damaged."""
    try:
        return _vocabulary(msgspec.json.decode(read_small(path, MOST_BYTES), type=_File))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no tokenizer of Mistral's format ({error}): fetch it again") from error


def _vocabulary(file: _File) -> Vocabulary:
    special = _special_tokens(file)
    words = _words(file, file.config.default_vocab_size - len(special))
    tokens = [*(token.token_str for token in special), *map(_spelled, words)]
    if len(set(tokens)) < len(tokens):
        raise ValueError("a token is there twice")
    kinds = [Kind.CONTROL if token.is_control else Kind.USER_DEFINED for token in special]
    named = {name: tokens.index(text) for name, text in NAMED.items() if text in tokens[: len(special)]}
    return Vocabulary(
        BYTE_PAIRS,
        tokens,
        [*kinds, *[Kind.NORMAL] * len(words)],
        scores=(),
        merges=list(_merges(words)),
        pre=_pre_tokenizer(file.config.pattern),
        special=named,
        adds_bos="bos" in named,
        adds_eos=False,
        adds_space=False,
        strips=False,
    )


def _pre_tokenizer(pattern: str) -> PreTokenizer:
    try:
        Regex(pattern)
    except Exception as error:  # the library raises no other
        raise ValueError(f"the pattern is no regular expression: {error}") from error
    return PreTokenizer((pattern,), ignores_merges=True)


def _special_tokens(file: _File) -> list[_Special]:
    """Return the special tokens, with those that fill their number."""
    count = file.config.default_num_special_tokens
    listed = file.special_tokens
    if listed is None:
        listed = [_Special(rank, text) for rank, text in enumerate(SPECIAL[:count])]
    if [token.rank for token in listed] != list(range(len(listed))) or not len(listed) <= count <= MOST_TOKENS:
        raise ValueError(f"{len(listed)} special tokens are listed, not all in order, or more than {count}")
    return [*listed, *(_Special(rank, f"<SPECIAL_{rank}>") for rank in range(len(listed), count))]


def _words(file: _File, count: int) -> list[bytes]:
    """Return the bytes of the first `count` tokens that are not special, all single bytes first."""
    words = [word.token_bytes for word in file.vocab[: max(0, count)]]
    if len(words) != count or any(word.rank != rank for rank, word in enumerate(file.vocab[:count])):
        raise ValueError(f"{len(file.vocab)} tokens are listed, not all in order, or fewer than {count}")
    if {*words[:256]} != {bytes([byte]) for byte in range(256)} or b"" in words:
        raise ValueError("the tokens do not begin with the 256 bytes")
    if max(map(len, words)) > MOST_CHARACTERS:
        raise ValueError(f"a token has more than {MOST_CHARACTERS} bytes")
    check_merged(words)
    return words


def _merges(words: Sequence[bytes]) -> Iterator[str]:
    """Yield the merges that tiktoken makes: any two tokens become the one that they spell, the first listed first."""
    known = set(words)
    for word in words:
        for cut in range(1, len(word)):
            if word[:cut] in known and word[cut:] in known:
                yield f"{_spelled(word[:cut])} {_spelled(word[cut:])}"


def _spelled(word: bytes) -> str:
    return word.decode("latin-1").translate(_ALPHABET)


def _alphabet() -> dict[int, str]:
    """Return the characters that stand for bytes in byte-level vocabularies: themselves where they can be printed,
    others in order from 256 on."""
    others = [byte for byte in range(256) if not (0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD))]
    return {byte: chr(256 + place) for place, byte in enumerate(others)}


_ALPHABET = _alphabet()
