"""Makes the tokenizer of a GGUF file for the library tokenizers, so that it gives the token ids of llama.cpp.

Source: llama.cpp's `llama_vocab`. It looks for special tokens first, and encodes what lies between them: by merges that
the file lists, or by those that the scores of its pieces imply, of which the best comes first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.model.gguf_vocabulary import PIECES, Kind, Vocabulary, read_vocabulary
from engine.process.model_source import CHATS_BEGIN_WITH_BOS

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""Stands for a space in tokens that are text."""
UNSTRIPPED = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Special tokens of Phi-3 behind which white space stays. Behind others the library drops all white space, as the
tokenizer of Phi-3 does, and llama.cpp that of ASCII."""

Merge = tuple[str, str]


def write_tokenizer(path: Path, out: Path) -> None:
    """Write the tokenizer and the chat templates of a GGUF file into the folder `out`, as transformers reads them.
    Raises ValueError, which names the file and the key, as `read_vocabulary` does."""
    vocabulary = read_vocabulary(path)
    try:
        tokenizer = build_tokenizer(vocabulary)
    except ValueError as error:
        raise ValueError(f"{path.name} {error}") from error
    (out / "tokenizer.json").write_text(tokenizer.to_str())
    (out / "tokenizer_config.json").write_text(json.dumps(_settings(vocabulary), indent=2))


def _settings(vocabulary: Vocabulary) -> dict[str, object]:
    """Return the contents of tokenizer_config.json."""
    named = {f"{name}_token": vocabulary.tokens[token_id] for name, token_id in vocabulary.special.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        CHATS_BEGIN_WITH_BOS: vocabulary.adds_bos,
        **named,
        **({"chat_template": _templates(vocabulary.templates)} if vocabulary.templates else {}),
    }


def _templates(templates: Mapping[str, str]) -> object:
    """Return chat templates as transformers reads them: one, or a list of named ones."""
    if list(templates) == ["default"]:
        return templates["default"]
    return [{"name": name, "template": text} for name, text in templates.items()]


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary. Raises ValueError if a merge is of tokens that the vocabulary lacks."""
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
    tokenizer.add_tokens([_added_token(text, kind, vocabulary.strips) for text, kind in _added(vocabulary)])
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
    """Yield the merges that scores imply: any two pieces become the one that they spell, the highest score first."""
    scores = vocabulary.scores
    for token_id in sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id)):
        text = vocabulary.tokens[token_id]
        for cut in range(1, len(text)):
            if (left := text[:cut]) in ids and (right := text[cut:]) in ids:
                yield left, right


def _unknown(vocabulary: Vocabulary) -> str | None:
    token_id = vocabulary.special.get("unk")
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
    spaces = normalizers.Replace(" ", SPACE)
    prefix = [normalizers.Prepend(SPACE)] if vocabulary.adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    if vocabulary.model != PIECES:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in vocabulary.pre.patterns]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.adds_space else []
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)


def _frame(vocabulary: Vocabulary) -> processors.TemplateProcessing:
    """Return what puts BOS before a prompt and EOS behind it, where the file says so."""
    bos = [vocabulary.tokens[vocabulary.special["bos"]]] if vocabulary.adds_bos else []
    eos = [vocabulary.tokens[vocabulary.special["eos"]]] if vocabulary.adds_eos else []
    special = [(text, vocabulary.tokens.index(text)) for text in dict.fromkeys((*bos, *eos))]
    return processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=special)


def _added(vocabulary: Vocabulary) -> Iterator[tuple[str, int]]:
    """Yield the tokens that are found before a text is encoded, with their kinds."""
    for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED):
            yield text, kind


def _added_token(text: str, kind: int, strips: bool) -> AddedToken:
    is_special = kind != Kind.USER_DEFINED
    rstrip = strips and text not in UNSTRIPPED
    return AddedToken(text, special=is_special, normalized=False, rstrip=rstrip)
