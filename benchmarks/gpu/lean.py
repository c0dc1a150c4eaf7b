"""Makes the engine importable on a machine with only torch, triton, numpy, safetensors and transformers."""

from __future__ import annotations

import hashlib
import sys
from importlib.util import find_spec
from types import ModuleType


class _Log:
    """Stand-in for a structlog logger, which the engine's model uses to report graph capture and failed fetches."""

    def error(self, event: str, **fields: object) -> None:
        print(event, fields, file=sys.stderr)

    info = warning = error


def do_without() -> None:
    """Replace missing packages by stand-ins in `sys.modules`. Call this before importing the engine.

    numba is hidden even if it is installed: GPU code does not need it, and it may not fit the installed numpy.
    """
    sys.modules["numba"] = None  # type: ignore[assignment]
    if find_spec("structlog") is None:
        module = ModuleType("structlog")
        vars(module)["get_logger"] = lambda *_: _Log()
        sys.modules["structlog"] = module
    if find_spec("blake3") is None:  # the suite only needs a hash that is stable within this process
        module = ModuleType("blake3")
        vars(module)["blake3"] = hashlib.sha256
        sys.modules["blake3"] = module
    if find_spec("llguidance") is None:
        _without_grammars()


def _without_grammars() -> None:
    """Replace llguidance by empty modules, which the engine can import. Section G leaves its grammars out then."""
    matcher = type("LLMatcher", (), {"grammar_from_regex": None})
    parts: dict[str, dict[str, object]] = {
        "llguidance": {"LLMatcher": matcher, "LLParserLimits": dict, "LLTokenizer": None},
        "llguidance.gbnf_to_lark": {"any_to_lark": None},
        "llguidance.numpy": {"fill_next_token_bitmask": None},
    }
    for name, words in parts.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(words)
