"""The dialects in which models write tool calls, by name, and the choice of the one that a model uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from gateway.text.tools.deepseek import DeepSeek
from gateway.text.tools.dialect import Dialect
from gateway.text.tools.harmony import Harmony
from gateway.text.tools.hermes import Hermes
from gateway.text.tools.llama3 import Llama3
from gateway.text.tools.mistral import Mistral
from gateway.text.tools.pythonic import Pythonic
from gateway.text.tools.qwen3_coder import Qwen3Coder

ToolParserName = Literal[
    "auto", "harmony", "hermes", "llama3", "mistral", "qwen3_coder", "pythonic", "deepseek", "none"
]

DIALECTS: Mapping[str, type[Dialect]] = MappingProxyType(
    {
        "harmony": Harmony,
        "qwen3_coder": Qwen3Coder,
        "hermes": Hermes,
        "mistral": Mistral,
        "deepseek": DeepSeek,
        "pythonic": Pythonic,
        "llama3": Llama3,
    }
)
"""Dialects by the name of the setting, in order of precedence: `auto` takes the first one that the template shows."""


def choose_dialect(name: ToolParserName, template: str) -> Dialect | None:
    """Return the dialect that the setting `name` asks for; `auto` detects it from the model's chat template. None means
    that tool calls are not parsed: the template has no tools or an unknown dialect, or `name` is `none`."""
    if name == "none" or "tools" not in template:
        return None
    if name == "auto":
        return next((dialect(template) for dialect in DIALECTS.values() if dialect.is_in(template)), None)
    return DIALECTS[name](template)
