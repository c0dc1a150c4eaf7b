"""Makes tokenizers of vocabularies for the library tokenizers, with the token ids of llama.cpp for GGUF, else of
SentencePiece or tiktoken. Sources: llama.cpp's `llama_vocab`; SentencePiece's `bpe_model.cc` and `normalizer.cc`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.model.tokenizers.symbol_cuts import cut_at
from engine.model.tokenizers.vocabulary import PIECES, Kind, Vocabulary, check_merged

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in tokens that are text."""
UNSTRIPPED = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Special tokens of Phi-3 behind which white space stays. Behind others the library drops all white space, as the
tokenizer of Phi-3 does, and llama.cpp that of ASCII."""

Merge = tuple[str, str]


def write_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, out: Path, **settings: object) -> None:
    """Write the tokenizer of a vocabulary into the folder `out`, as transformers reads it, with further settings of its
    tokenizer_config.json."""
    named = {f"{name}_token": vocabulary.tokens[token_id] for name, token_id in vocabulary.special.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings, **named}
    (out / "tokenizer.json").write_text(tokenizer.to_str())
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary. Raises ValueError if a merge is of tokens that the vocabulary lacks, or as
    `check_merged` and `cut_at` do."""
    ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    is_byte_level = vocabulary.model != PIECES and vocabulary.pre.is_byte_level
    tokenizer = Tokenizer(
        BPE(
            ids,
            list(piece_merges(vocabulary, ids) if vocabulary.model == PIECES else listed_merges(vocabulary, ids)),
            unk_token=None if is_byte_level else _unknown(vocabulary),
            fuse_unk=True,
            byte_fallback=not is_byte_level,
            ignore_merges=vocabulary.pre.ignores_merges,
        )
    )
    if is_byte_level:
        _cut_bytes(tokenizer, vocabulary)
    else:
        _cut_text(tokenizer, vocabulary)
    tokenizer.post_processor = _frame(vocabulary)
    tokenizer.add_tokens(list(_added(vocabulary)))
    return tokenizer


def listed_merges(vocabulary: Vocabulary, ids: dict[str, int]) -> Iterator[Merge]:
    """Yield the merges that a file lists, best first. Of equal ones the first counts."""
    seen: set[str] = set()
    for merge in vocabulary.merges:
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if merge in seen:
            continue
        seen.add(merge)
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise ValueError(f"has the merge {merge[:80]!r} of tokens that are not in its vocabulary")
        yield left, right


def piece_merges(vocabulary: Vocabulary, ids: dict[str, int]) -> Iterator[Merge]:
    """Yield the merges that scores imply: any two pieces become the one that they spell, the highest score first.
    Raises ValueError as `check_merged` does."""
    scores, kinds = vocabulary.scores, vocabulary.kinds
    if vocabulary.is_sentencepiece:
        kept = vocabulary.merged.union(id_ for id_, kind in enumerate(kinds) if kind in (Kind.NORMAL, Kind.UNUSED))
        ids = {text: token_id for text, token_id in ids.items() if token_id in kept}
    check_merged(ids)
    for token_id in sorted(ids.values(), key=lambda token_id: (-scores[token_id], token_id)):
        text = vocabulary.tokens[token_id]
        for cut in range(1, len(text)):
            if (left := text[:cut]) in ids and (right := text[cut:]) in ids:
                yield left, right


def _unknown(vocabulary: Vocabulary) -> str | None:
    """Return the token for what the vocabulary cannot spell: SentencePiece's by its kind, whatever a folder names."""
    found = vocabulary.special.get("unk")
    token_id = list(vocabulary.kinds).index(Kind.UNKNOWN) if vocabulary.is_sentencepiece else found
    return None if token_id is None else vocabulary.tokens[token_id]


def _cut_bytes(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()).difference(vocabulary.tokens))
    # Bytes that are no tokens are dropped, and what stands before and behind them is not merged.
    drop = [pre_tokenizers.Split(Regex(_any_of(missing)), "removed")] if missing else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes, *drop])
    tokenizer.decoder = decoders.ByteLevel()


def _any_of(characters: Sequence[str]) -> str:
    """Return a regular expression that matches any of these characters."""
    return "[" + "".join(rf"\x{{{ord(character):x}}}" for character in characters) + "]"


def _cut_text(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    if cuts := list(_text_cuts(tokenizer, vocabulary)):
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.normalizer = normalizers.Sequence(list(_normalized(vocabulary)))
    # If it drops spaces, SentencePiece strips one of each piece until there is text. A stream decodes from anywhere in
    # an answer, though, and would lose spaces there.
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.adds_space or vocabulary.drops_spaces else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)


def _normalized(vocabulary: Vocabulary) -> Iterator[normalizers.Normalizer]:
    if vocabulary.drops_spaces:
        # The end is tried once for each run of spaces: without that, time would grow with the square of its length.
        for pattern, text in ((" {2,}", " "), (rf"(?<![ {SPACE}])[ {SPACE}]++\z", ""), (r"\A +", "")):
            yield normalizers.Replace(Regex(pattern), text)
    if vocabulary.adds_space and not vocabulary.adds_space_once:
        yield normalizers.Prepend(SPACE)
    yield normalizers.Replace(" ", SPACE)


def _text_cuts(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Iterator[pre_tokenizers.PreTokenizer]:
    if vocabulary.adds_space and vocabulary.adds_space_once:
        # Where the text already begins with its own mark, Metaspace adds none: it adds a space, then replaces that.
        yield pre_tokenizers.Metaspace(" ", "first", split=False)
        yield pre_tokenizers.Metaspace(SPACE, "never", split=False)
    if vocabulary.model != PIECES:
        yield from (pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns)
    if symbols := _cut_symbols(vocabulary):
        yield from cut_at(symbols, tokenizer, _unknown(vocabulary))


def _symbols(vocabulary: Vocabulary) -> list[str]:
    """Return the tokens that SentencePiece finds in a normalized text before it merges what lies between them."""
    kinds = zip(vocabulary.tokens, vocabulary.kinds, strict=True) if vocabulary.is_sentencepiece else ()
    return [text for text, kind in kinds if kind == Kind.USER_DEFINED and text not in vocabulary.flags]


def _cut_symbols(vocabulary: Vocabulary) -> list[str]:
    """Return the symbols at which a text is cut; none where the library can find them as added tokens."""
    # It normalizes added tokens like texts, so a space that is put before a text would be looked for before each of
    # them.
    return _symbols(vocabulary) if vocabulary.adds_space or vocabulary.drops_spaces else []


def _frame(vocabulary: Vocabulary) -> processors.TemplateProcessing:
    """Return what puts BOS before a prompt and EOS behind it, where the file says so."""
    bos = [vocabulary.tokens[vocabulary.special["bos"]]] if vocabulary.adds_bos else []
    eos = [vocabulary.tokens[vocabulary.special["eos"]]] if vocabulary.adds_eos else []
    special = [(text, vocabulary.tokens.index(text)) for text in dict.fromkeys((*bos, *eos))]
    return processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=special)


def _added(vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """Yield the tokens that are found before a text is encoded."""
    symbols, cuts = set(_symbols(vocabulary)), _cut_symbols(vocabulary)
    for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if text in symbols:
            if not cuts:
                yield AddedToken(text, special=False, normalized=True)
        elif kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED):
            strips = vocabulary.strips and text not in UNSTRIPPED
            flags = {"rstrip": strips, **vocabulary.flags.get(text, {})}
            yield AddedToken(text, special=kind != Kind.USER_DEFINED, normalized=False, **flags)
