"""Reads the vocabulary of a GGUF file. Unknown keys that would change token ids are refused. Sources: docs/gguf.md of
ggml for the keys; `llama_vocab` of llama.cpp for what holds where a key is absent."""

from __future__ import annotations

import os
from pathlib import Path

from engine.model.gguf.header import Header, read_header
from engine.model.tokenizers.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from engine.model.tokenizers.vocabulary import BYTE_PAIRS, GEMMA, PIECES, Kind, Vocabulary, with_control

TOKENS, KINDS, SCORES, MERGES = (f"tokenizer.ggml.{key}" for key in ("tokens", "token_type", "scores", "merges"))
MODEL, PRE, TEMPLATE = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template"
SUPPRESSED, CHARSMAP = "tokenizer.ggml.suppress_tokens", "tokenizer.ggml.precompiled_charsmap"
SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
    "sep": "seperator",
    "mask": "mask",
    "cls": "cls",
}
"""How keys name the special tokens of transformers."""
PIECE_DEFAULTS = {"bos": 1, "eos": 2, "unk": 0}
"""Special tokens of a vocabulary of pieces that does not name them."""
TURNS = ("eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle")
UNDERSTOOD = frozenset(
    (
        *(TOKENS, KINDS, SCORES, MERGES, MODEL, PRE, TEMPLATE, SUPPRESSED, CHARSMAP, "tokenizer.chat_templates"),
        *(f"tokenizer.ggml.{key}_token_id" for key in (*SPECIAL.values(), *TURNS)),
        *(f"tokenizer.ggml.add_{key}" for key in ("bos_token", "eos_token", "sep_token", "space_prefix")),
        *("tokenizer.ggml.token_type_count", "tokenizer.ggml.remove_extra_whitespaces"),
        *("tokenizer.huggingface.json", "tokenizer.rwkv.world"),
    )
)
"""Keys that are read, or that llama.cpp does not read for tokenizers of these kinds."""


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary of a GGUF file. Raises ValueError, which names the file and the key, if the file is damaged
    or its tokenizer is of a kind, or has a setting, that is not understood."""
    with path.open("rb") as file:
        header = read_header(file, os.fstat(file.fileno()).st_size, path.name, (TOKENS, KINDS, SCORES, MERGES))
    try:
        return _Reader(header).vocabulary()
    except ValueError as error:
        raise ValueError(f"{path.name} {error}") from error


class _Reader:
    """Reads a vocabulary from a header. Methods raise ValueError, to whose message the caller adds the file's name."""

    def __init__(self, header: Header) -> None:
        self._values, self._arrays = header.values, header.arrays

    def vocabulary(self) -> Vocabulary:
        model = self._model()
        self._check_keys()
        tokens = self._tokens()
        pre = self._pre(model)
        special = self._special(model, len(tokens))
        vocabulary = Vocabulary(
            model,
            tokens,
            with_control(tokens, self._numbers(KINDS, len(tokens), Kind.NORMAL)),
            self._numbers(SCORES, len(tokens), 0.0),
            self._merges(model),
            pre,
            special,
            adds_bos=self._flag("add_bos_token", model == PIECES or pre.adds_bos) or model == GEMMA,
            adds_eos=self._flag("add_eos_token", False),
            adds_space=model == PIECES and self._flag("add_space_prefix", True),
            strips=any(name in str(self._values.get("general.name", "")).lower() for name in ("phi-3", "phi3")),
            templates=self._templates(),
        )
        for added, name in ((vocabulary.adds_bos, "bos"), (vocabulary.adds_eos, "eos")):
            if added and name not in special:
                raise ValueError(f"adds {name.upper()} to prompts, and has no tokenizer.ggml.{name}_token_id")
        return vocabulary

    def _model(self) -> str:
        model = self._values.get(MODEL)
        if model not in (BYTE_PAIRS, PIECES, GEMMA):
            raise ValueError(
                f"has {MODEL} = {model!r}, and GGUF files' tokenizers are read of {BYTE_PAIRS}, {PIECES} and {GEMMA}; "
                "use the model's Hugging Face folder"
            )
        return str(model)

    def _check_keys(self) -> None:
        for key, value in self._values.items():
            if not key.startswith("tokenizer.") or key.startswith(f"{TEMPLATE}.") or key in UNDERSTOOD:
                continue
            raise ValueError(f"has the metadata {key} = {value}, which is not supported")
        if self._values.get(SUPPRESSED, ()) != ():
            raise ValueError(f"has the metadata {SUPPRESSED}, which is not supported")

    def _tokens(self) -> list[str]:
        found = self._arrays.get(TOKENS)
        if not found:
            raise ValueError(f"has no {TOKENS}")
        tokens = [str(text) or f"[EMPTY_{token_id}]" for token_id, text in enumerate(found)]
        if len(ids := dict(zip(tokens, range(len(tokens)), strict=True))) < len(tokens):
            twice = next(text for token_id, text in enumerate(tokens) if ids[text] != token_id)
            raise ValueError(f"has the token {twice[:80]!r} twice in {TOKENS}")
        return tokens

    def _numbers(self, key: str, count: int, default: float) -> list[float]:
        """Return an array of numbers, one for each of `count` tokens; `default` for all if the file has none."""
        if key not in self._values:
            return [default] * count
        found = self._arrays.get(key, ())
        if len(found) < count or not all(isinstance(one, int | float) for one in found):
            raise ValueError(f"has {len(found)} values in {key}, and {count} tokens")
        return [float(one) for one in found[:count]]

    def _merges(self, model: str) -> list[str]:
        if model == PIECES:
            return []
        if MERGES not in self._arrays:
            raise ValueError(f"has no {MERGES}")
        return [str(merge) for merge in self._arrays[MERGES]]

    def _pre(self, model: str) -> PreTokenizer:
        """Return the pre-tokenizer. A vocabulary of pieces has none, whatever name the file has for it."""
        name = {GEMMA: GEMMA, PIECES: DEFAULT}.get(model, self._values.get(PRE, DEFAULT))
        if name not in PRE_TOKENIZERS:
            raise ValueError(
                f"has {PRE} = {name!r}, which is not known; use the model's Hugging Face folder, or set the name of a "
                f"pre-tokenizer that is known: {', '.join(PRE_TOKENIZERS)}"
            )
        return PRE_TOKENIZERS[str(name)]

    def _special(self, model: str, count: int) -> dict[str, int]:
        """Return the ids of the special tokens of a vocabulary of `count` tokens."""
        defaults = PIECE_DEFAULTS if model == PIECES else {}
        found = {name: token_id for name, token_id in defaults.items() if token_id < count}
        for name, word in SPECIAL.items():
            token_id = self._values.get(key := f"tokenizer.ggml.{word}_token_id")
            if token_id is None:
                continue
            if not isinstance(token_id, int) or not 0 <= token_id < count:
                raise ValueError(f"has {key} = {token_id}, and {count} tokens")
            found[name] = token_id
        return found

    def _flag(self, key: str, default: bool) -> bool:
        return bool(self._values.get(f"tokenizer.ggml.{key}", default))

    def _templates(self) -> dict[str, str]:
        """Return the chat templates. A template for requests with tools also serves the others where it is alone."""
        named = {
            key.removeprefix(f"{TEMPLATE}."): value
            for key, value in self._values.items()
            if key.startswith(f"{TEMPLATE}.") and isinstance(value, str)
        }
        plain = self._values.get(TEMPLATE) or named.get("tool_use")
        return named | ({"default": plain} if isinstance(plain, str) else {})
