"""Reads the tokenizer of a model folder without transformers, whose import takes 0.8 s of a processor and 40 MiB, where
the folder says that `tokenizer.json` is all of it.

It says so by the class TokenizersBackend in `tokenizer_config.json`, as transformers 5 saves tokenizers that have no
class of their own, among them those of GGUF files. The classes of other tokenizers change what is in `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

PLAIN_CLASS = "TokenizersBackend"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of `tokenizer_config.json` that name a special token, in transformers' order."""
UNDERSTOOD = frozenset(
    (
        *NAMES,
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "extra_special_tokens",
        "is_local",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    )
)
"""Keys of `tokenizer_config.json` that are read here or change nothing. Any other could change the tokens."""
OTHER_FILES = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
"""Files and folders of older tokenizers, and of models with several templates, which only transformers reads here."""


@dataclass(slots=True)
class PlainTokenizer:
    """A tokenizer with the attributes of transformers' tokenizers that the gateway uses, by the same names."""

    backend_tokenizer: Tokenizer
    special_tokens_map: dict[str, str]
    """The texts of named special tokens, by the names that templates read, such as `bos_token`."""
    extra_special_tokens: tuple[str, ...]
    chat_template: str | None

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens)))

    @property
    def all_special_ids(self) -> list[int]:
        ids = map(self.backend_tokenizer.token_to_id, self.all_special_tokens)
        return [token_id for token_id in ids if token_id is not None]


def read_plain(folder: Path) -> PlainTokenizer | None:
    """Read the tokenizer of a model folder. None means that the folder does not say that `tokenizer.json` is all of it,
    so that transformers must read it. Raises ValueError if a file is damaged, OSError if it cannot be read."""
    file, settings = folder / "tokenizer.json", _settings(folder)
    if settings is None or not file.is_file() or any((folder / name).exists() for name in OTHER_FILES):
        return None
    template_file = folder / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else settings.get("chat_template")
    named = {name: _text(settings[name]) for name in NAMES if settings.get(name) is not None}
    extra = tuple(map(_text, settings.get("extra_special_tokens") or ()))
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{file} cannot be read: {error}") from error
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if not (template is None or isinstance(template, str)) or not special.issuperset((*named.values(), *extra)):
        return None
    return PlainTokenizer(backend, named, extra, template)


def _settings(folder: Path) -> Mapping[str, Any] | None:
    """Return `tokenizer_config.json` if it is of the plain class and all of its keys are understood, else None."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    settings = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or not isinstance(settings.get("extra_special_tokens") or [], list):
        return None
    return settings if settings.get("tokenizer_class") == PLAIN_CLASS and settings.keys() <= UNDERSTOOD else None


def _text(token: Any) -> str:
    """Return the text of a token in `tokenizer_config.json`, which is a string or an object with its flags."""
    return str(token.get("content") if isinstance(token, Mapping) else token)
