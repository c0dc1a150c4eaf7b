"""The pre-tokenizers of GGUF files, by the names of `tokenizer.ggml.pre`, as Oniguruma's expressions that match what
llama.cpp matches. Source: `llama_vocab` and `unicode_regex_split` of llama.cpp."""

from __future__ import annotations

from typing import NamedTuple

CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = CONTRACTIONS + WORDS + r"|\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + WORDS + r"|\p{N}" + REST
QWEN35 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NO_LOWER, NO_UPPER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
"""Letters but the small or the capital ones of ASCII: llama.cpp knows no case of other letters."""
SLASH_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{NO_LOWER}*{NO_UPPER}+|[^\r\n\p{{L}}\p{{N}}]?{NO_LOWER}+{NO_UPPER}*|\p{{N}}{SLASH_REST}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{NO_LOWER}*{NO_UPPER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{NO_LOWER}+{NO_UPPER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}{SLASH_REST}"
)
DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KANA = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+"
CJK = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}&&[^\s]]+"
CASED = (
    r"\s?[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-\x{2af}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}\x{3a3}-\x{3f5}"
    r"\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}"
    r"\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}"
    r"\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}"
    r"\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}"
    r"\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}"
    r"\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}"
    r"\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}"
    r"\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}"
    r"\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}"
    r"\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)
"""Letters that have case, as DeepSeek LLM lists them."""
DEEPSEEK_MARKS = r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3001}\x{3002}]+"
BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{ff0c}\x{3001}\x{964}\x{6d4}\x{60c})]+"
END_SPACES = r"(?<!\s)\s++\z"
"""White space at the end. It is tried once for each run of it; without that, time would grow with the square of a
run's length."""
DIGITS, THREES = r"\p{N}", r"\p{N}{1,3}"
JAIS2_SPACES = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
BAILING_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
LINES = r"[^\n]+|\n+"


class PreTokenizer(NamedTuple):
    """How texts are cut into words, and what the name in the file implies beside."""

    patterns: tuple[str, ...]
    """Regular expressions. Each cuts what those before it left into its matches and what lies between them."""
    ignores_merges: bool = False
    """True means that a word that is a token of the vocabulary is that token, whatever merges say."""
    adds_bos: bool = False
    """True means that prompts begin with BOS if the file does not say whether they do."""
    is_byte_level: bool = True
    """True means that tokens are written in the byte alphabet of GPT-2, false, that they are text with a mark for each
    space, and bytes that have no token of their own are tokens such as <0x0A>."""


_GPT2 = PreTokenizer((GPT2,))
_DIGITS_GPT2 = PreTokenizer((DIGITS, GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,), ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((QWEN2,))
_DEEPSEEK3 = PreTokenizer((THREES, KANA, DEEPSEEK3))
_GPT4O = PreTokenizer((GPT4O,))
_BLOOM = PreTokenizer((BLOOM,))
_BAILING = PreTokenizer((r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])" + WORDS + r"|\p{N}" + BAILING_REST,))

DEFAULT = "default"
"""The name that a file without one counts as having."""
PRE_TOKENIZERS = {
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9]{3}")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais"), _GPT2),
    **dict.fromkeys(("trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), _DIGITS_GPT2),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
    "lfm2": _LLAMA3,
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((LLAMA3,), ignores_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"), _QWEN2),
    "grok-2": _QWEN2,
    "qwen35": PreTokenizer((QWEN35,)),
    "ufakzeka": PreTokenizer((WORDS[1:] + r"|\p{N}" + REST,)),
    "seed-coder": PreTokenizer((CONTRACTIONS + WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "tekken": PreTokenizer((TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "deepseek-llm": PreTokenizer((r"[\r\n]", CASED, DEEPSEEK_MARKS, END_SPACES, CJK, r"\p{N}+")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGITS)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9]{3}")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((BLOOM, DIGITS)),
    "jais-2": PreTokenizer(
        (CONTRACTIONS + WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + JAIS2_SPACES,)
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "exaone-moe": PreTokenizer((EXAONE_MOE,)),
    "laguna": PreTokenizer((LINES, QWEN2)),
    "minicpm5": PreTokenizer((THREES, CONTRACTIONS + WORDS + r"|\p{N}+" + REST), ignores_merges=True),
    "gemma4": PreTokenizer((LINES,), adds_bos=True, is_byte_level=False),
}
"""Pre-tokenizers by their names in files."""
