"""Small GGUF files with a tokenizer and no weights, whose token ids llama.cpp gave for `gguf_token_ids.json`."""

from functools import cache
from itertools import pairwise

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
WORDS = (
    "I'm you'LL THEY'RE it'd  don't: HTTPServer \u00c9t\u00e9 \u00dcBER na\u00efve \u041f\u0440\u0438\u0412\u0415T "
    "1234567 x12 \u0664\u0665\u0666\u0667 \uff11\uff12 \u00bd 3.14\n\n\n  def f(x):\t\treturn x**2 # //\r\n/* ok */"
    "   \n "
)
MARKS = (
    "\u65e5\u672c\u8a9e\u30c6\u30ad\u3001\u3053\u308c\u306f\u3002\ud55c\uad6d\uc5b4\u3000\uff21\uff01 cafe\u0301 "
    "\u0939\u093f\u0928\u094d\u0926\u0940 \U0001f600\U0001f680 $+<=>^~|`%& \u2026\u201cok\u201d  \u00a0\u2003x "
    "($9,999.99)!\n?\n\x0b(a|b) end   "
)
"""Texts whose words every pre-tokenizer cuts in its own way."""
EXTRA = ["<|begin|>", "<|im_end|>", "<|tool|>", "\n\n\n\n", "<|begin|>x"]
EXTRA_KINDS = [CONTROL, NORMAL, CONTROL, USER_DEFINED, USER_DEFINED]
"""Tokens beside those of bytes. `<|im_end|>` is a control token by its text."""
BEGIN = 0
DROPPED = "\u010b"
"""Stands for the vertical tab."""
WHOLE = "\u0120zq"
SPECIALS = " zq zq<|im_end|>\n\n\n\n\n<|begin|>x<|begin|><|tool|> y"
SPACE = "\u2581"
PIECES = [
    *("\u2581hello", "\u2581world", "\u2581Hello", "\u2581hell", "\u2581hel", "\u2581he", "llo", "ll", "wor", "ld"),
    *("\u2581world\n", "t\u00e9", "\u00e9t\u00e9", "\u2581\u2581", "\u2581x", "\u4f60\u597d", "lo", "el", "He"),
    *("or", "wo", "\u2581w", "\u2581h", "\u2581H", "s>", "</", *"\u2581helowrdH\u00e9tsx\u4f60\u597d<>/"),
]
STRIPPED = "<s> x</s> \n x<tool> x<|endoftext|> x</s>"
PIECE_TEXT = "Hello  world\n<s>\u00e9t\u00e9</s> hello   x\u4f60\u597d \U0001f600<tool>he<tool> llo world"
GEMMA_TEXT = "hello hello  world\n\n\nworld \u00e9t\u00e9 \U0001f680hello\n"


def write(path, model, tokens, kinds, *, name="tiny", scores=None, merges=None, **values):
    """Write a file of architecture llama with this vocabulary. `values` are further keys of the tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for add, found in ((writer.add_token_scores, scores), (writer.add_token_merges, merges)):
        if found is not None:
            add(found)
    for key, value in values.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"tokenizer.{key}" if key.startswith("chat_") else f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def alphabet():
    """Return the characters that stand for bytes in byte-level vocabularies, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def learned(texts, barred):
    """Return merges of each two neighbours in texts (lists of symbols), and of what these make, until each text is one
    token: so the ids of a text show where its pre-tokenizer cuts it. Symbols of `barred` are in no merge."""
    merges = []
    while pairs := sorted({pair for text in texts for pair in pairwise(text) if not barred & {*"".join(pair)}}):
        merges += pairs
        for pair in pairs:
            texts = [_merged(text, pair) for text in texts]
    return merges


@cache
def _byte_merges():
    return learned([[alphabet()[byte] for byte in text.encode()] for text in (WORDS, MARKS)], {DROPPED})


def _merged(text, pair):
    found = []
    for symbol in text:
        if found and (found[-1], symbol) == pair:
            found[-1] += symbol
        else:
            found.append(symbol)
    return found


def write_byte_pairs(path, pre="", **values):
    """Write a byte-level vocabulary whose merges spell WORDS and MARKS, with the word WHOLE, which no merge makes. The
    vertical tab has no token."""
    merges = _byte_merges()
    letters = sorted({*alphabet()} - {DROPPED})
    tokens = [*EXTRA, *letters, WHOLE, *dict.fromkeys(left + right for left, right in merges)]
    kinds = [*EXTRA_KINDS, *[NORMAL] * (len(tokens) - len(EXTRA))]
    named = {"pre": pre} if pre else {}
    merged = [f"{left} {right}" for left, right in merges]
    return write(path, "gpt2", tokens, kinds, merges=merged, **{"bos_token_id": BEGIN, **named, **values})


def write_pieces(path, **values):
    """Write a vocabulary of pieces, as Llama 2 has, in which merges follow from scores."""
    pieces = {piece: -float(rank) for rank, piece in enumerate(PIECES)}
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        "<tool>",
        "  ",
        "<|endoftext|>",
    ]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED, USER_DEFINED, CONTROL]
    scores = [0.0] * 259 + [*pieces.values()] + [0.0] * 3
    return write(path, "llama", tokens, kinds, scores=scores, **values)


def write_gemma(path, **values):
    """Write a vocabulary as Gemma 4 has: merges of text, with bytes for what has no token."""
    merges = learned([list(GEMMA_TEXT.replace(" ", SPACE))], {"\n", "\U0001f680"})
    merged = dict.fromkeys(left + right for left, right in merges)
    letters = sorted(set(GEMMA_TEXT.replace(" ", SPACE)) - {"\U0001f680"})
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_response>", "</s>", *bytes_, *letters, *merged]
    kinds = [*[CONTROL] * 3, UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(letters) + len(merged))]
    merged_texts = [f"{left} {right}" for left, right in merges]
    return write(path, "gemma4", tokens, kinds, merges=merged_texts, bos_token_id=2, eos_token_id=1, **values)
