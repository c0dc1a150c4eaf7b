"""Small tokenizers in the formats of SentencePiece and of Mistral, texts, and the token ids that their own libraries
give (`other_token_ids.json`). `python -m tests.model.tokenizer_files`, where sentencepiece (0.2.3) and mistral-common
(1.13.1) are installed, writes these ids again."""

import base64
import json
import struct
import tempfile
from itertools import pairwise
from pathlib import Path

IDS = Path(__file__).with_name("other_token_ids.json")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BPE = {"model_type": 2}
KEEPS_SPACES = {"remove_extra_whitespaces": False}
FIELDS = {
    "model_type": 3,
    "treat_whitespace_as_suffix": 24,
    "byte_fallback": 35,
    "bos_piece": 46,
    "eos_piece": 47,
    "precompiled_charsmap": 2,
    "add_dummy_prefix": 3,
    "remove_extra_whitespaces": 4,
    "escape_whitespaces": 5,
}
"""Numbers of the fields of SentencePiece's trainer_spec and normalizer_spec."""
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
LETTERS = [
    (letter, NORMAL) for letter in "\u2581etaoinshrdlucmfwygpbvkHTD019.,!?:=(){}[]<>/\"'\u00e9\u65e5\u672c\u8a9e"
]
MERGED = [
    (text, NORMAL)
    for text in (
        *("\u2581\u2581", "\u2581\u2581\u2581", "\u2581\u2581\u2581\u2581", "in", "\u2581t", "he", "\u2581the", "er"),
        *("\u2581a", "an", "on", "re", "\u2581re", "ll", "\u2581H", "\u2581he", "\u2581He", "\u2581Hello", "ello"),
        *("lo", "or", "ld", "\u2581w", "\u2581wor", "\u2581world", "aa", "aaa", "aaaa", "..", "...", "....", "00"),
        *("\u65e5\u672c", "\u672c\u8a9e", "de", "\u2581de", "ef", "\u2581def", "()", "():", "[]", "\u00e9t", "t\u00e9"),
    )
]
MARKS = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
GEMMA = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
SYMBOLS = [
    (text, USER_DEFINED) for text in ("\n", "\n\n", "\u2581\u2581\u2581", "[REF]", "[REF_1]", "</div>", "\u2581def()")
]
OTHERS = [(text, kind) for text, kind in MERGED if text not in dict(SYMBOLS)]
MODELS = {
    "llama": ([*MARKS, *BYTES, *MERGED, *LETTERS], BPE | {"byte_fallback": True}, KEEPS_SPACES),
    "gemma": (
        [*GEMMA, *SYMBOLS, *BYTES, *OTHERS, *LETTERS],
        BPE | {"byte_fallback": True, "bos_piece": "<bos>", "eos_piece": "<eos>"},
        KEEPS_SPACES | {"add_dummy_prefix": False},
    ),
    "symbols": ([*MARKS, *SYMBOLS, *BYTES, *OTHERS, *LETTERS], BPE | {"byte_fallback": True}, KEEPS_SPACES),
    "unused": (
        [*MARKS, ("\n", USER_DEFINED), ("qz", UNUSED), *BYTES, *MERGED, *LETTERS],
        BPE | {"byte_fallback": True},
        KEEPS_SPACES,
    ),
    "drops": ([*MARKS, *MERGED, *LETTERS], BPE, {}),
}
"""Pieces with their kinds, trainer_spec and normalizer_spec."""
WORDS = (
    *("the", " the", "Hello world", "a", "\u65e5\u672c\u8a9e", "\u00e9t\u00e9", "don't", "3.14", "1000", "2010-09-10"),
    *(
        "aaaaaaa",
        "......",
        "    ",
        "\n",
        "\n\n\n",
        "\t",
        "def():",
        "[]",
        "{}",
        "<div></div>",
        "\U0001f600",
        "\u2581",
        "</p>",
    ),
    *(
        "[REF] here [REF_1]",
        "  then  all",
        "e\u0301",
        "\uff11",
        "\u00a0",
        "HeLLo",
        "x = y",
        "wor ld ",
        "<s> or </s>",
        "<0x41>",
    ),
)
TEXTS = [
    "",
    "Hello",
    "\nHello\n",
    "qz",
    "\nqz\n",
    *WORDS,
    *(
        one + between + other
        for one, other in pairwise((*WORDS, *WORDS[::3]))
        for between in ("", " ", "\n", "  ", "!")
    ),
]
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPECIAL = 24


def write_model(path, pieces, trainer=BPE, normalizer=KEEPS_SPACES, scores=None):
    """Write a `tokenizer.model`. Scores fall from piece to piece unless they are given."""
    scores = [-float(rank) for rank in range(len(pieces))] if scores is None else scores
    content = b"".join(
        _field(1, _field(1, text) + b"\x15" + struct.pack("<f", score) + _field(3, kind))
        for (text, kind), score in zip(pieces, scores, strict=True)
    )
    for number, settings in ((2, trainer), (3, normalizer)):
        content += _field(number, b"".join(_field(FIELDS[name], value) for name, value in settings.items()))
    path.write_bytes(content)
    return path


def _field(number, value):
    """Return a field of a message of protobuf: a whole number, a text, or bytes."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    value = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value):
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def tekken(**changes):
    """Return a `tekken.json`."""
    texts = (text.replace("\u2581", " ").encode() for text, _ in MERGED)
    words = [*(bytes([byte]) for byte in range(256)), *sorted(texts, key=len), b" whole", b"\xe6\x97"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode(errors="replace")}
        for rank, word in enumerate(words)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(words) - 1 + TEKKEN_SPECIAL,
        "default_num_special_tokens": TEKKEN_SPECIAL,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab} | changes


def _true_ids(name, folder):
    if name == "tekken":
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        file = folder / "tekken.json"
        file.write_text(json.dumps(tekken()))
        tokenizer = Tekkenizer.from_file(file)
        return [tokenizer.encode(text, bos=False, eos=False) for text in TEXTS]
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(write_model(folder / "tokenizer.model", *MODELS[name]))).encode(TEXTS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: _true_ids(name, Path(scratch)) for name in (*MODELS, "tekken")}
    lines = (f'"{name}":{json.dumps(ids, separators=(",", ":"))}' for name, ids in found.items())
    IDS.write_text("{" + ",\n".join(lines) + "}\n")
