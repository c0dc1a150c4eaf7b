"""A vocabulary as files of several formats have it: tokens with kinds and scores, merges, special tokens and chat
templates. Source: llama.cpp's `llama_vocab`, for tokens that are control tokens in any file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from engine.model.tokenizers.pretokenizers import PreTokenizer

BYTE_PAIRS, PIECES, GEMMA = "gpt2", "llama", "gemma4"
"""How tokens are found, as GGUF files call it: by listed merges, by merges that follow from scores (SentencePiece), and
as in Gemma 4."""
CONTROL_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<eos>"),
        *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_prefix|>", "<|prefix|>", "<|code_suffix|>", "<|suffix|>", "<|code_middle|>", "<|middle|>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
        *("<|repo_name|>", "<reponame>", "<|file_sep|>"),
    )
)
"""Tokens that files often have as plain text and that llama.cpp takes for control tokens: ends of turns and of texts,
and marks of code that is filled in."""

MOST_TOKENS = 1 << 20
"""Maximum number of tokens: four times that of today's largest vocabularies."""
MOST_CHARACTERS = 1024
"""Maximum length of a token in characters or bytes: the work of finding its merges grows with the square."""
MOST_MERGED = 64 << 20
"""Maximum sum of the squares of the lengths of a vocabulary's tokens, above which its merges could take gigabytes: each
cut of a token may be one, of its length. Vocabularies of 256,000 tokens have some 20 million."""
GEMMA_TURN = "<|tool_response>"
"""Token of vocabularies of Gemma 4, in which `</s>` is plain text."""


class Kind(IntEnum):
    """The types of tokens, with the numbers of GGUF files and of SentencePiece."""

    UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)


class Vocabulary(NamedTuple):
    """What a file says of its tokenizer."""

    model: str
    """One of BYTE_PAIRS, PIECES and GEMMA."""
    tokens: Sequence[str]
    """Texts of the tokens, in the order of their ids, as are `kinds` and `scores`."""
    kinds: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    pre: PreTokenizer
    special: Mapping[str, int]
    """Ids of special tokens, by transformers' names without `_token`."""
    adds_bos: bool
    """True means that prompts begin with BOS."""
    adds_eos: bool
    """True means that prompts end with EOS."""
    adds_space: bool
    """True means that a space is put before a text, and before what follows a special token."""
    strips: bool
    """True means that white space behind special tokens is dropped."""
    templates: Mapping[str, str] = {}
    """Chat templates by their names; `default` is the one without a name."""
    is_sentencepiece: bool = False
    """True means that SentencePiece's ids count where llama.cpp gives others: a token of USER_DEFINED is found where
    the text already has its marks for spaces, and only normal tokens are merged."""
    adds_space_once: bool = False
    """True means that a space is put only before a text."""
    drops_spaces: bool = False
    """True means that spaces at both ends are dropped, and of several in a row all but one."""
    flags: Mapping[str, Mapping[str, bool]] = {}
    """Added tokens of a model folder by their texts, with the library's flags (`lstrip` and the like) that are set."""
    merged: frozenset[int] = frozenset()
    """Ids of tokens that a model folder adds though the tokenizer's own file has them as normal ones. They are merged
    all the same where a text has them otherwise, as behind a space that is put before it."""


def check_merged(texts: Iterable[str | bytes]) -> None:
    """Raise ValueError, to whose message the caller adds the file's name, if the merges of tokens could be too many."""
    if sum(len(text) ** 2 for text in texts) > MOST_MERGED:
        raise ValueError(f"has tokens so long that their merges may have more than {MOST_MERGED:,} characters")


def with_control(tokens: Sequence[str], kinds: Sequence[float]) -> list[int]:
    """Return the kinds of the tokens, where those that have a text of CONTROL_TEXTS are control tokens."""
    found = [int(kind) for kind in kinds]
    for token_id, text in enumerate(tokens):
        if text in CONTROL_TEXTS:
            found[token_id] = Kind.CONTROL
    if GEMMA_TURN in tokens and "</s>" in tokens:
        found[tokens.index("</s>")] = Kind.NORMAL
    return found
