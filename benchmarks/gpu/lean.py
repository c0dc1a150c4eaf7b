"""The engine on a machine that has torch, triton, numpy, safetensors and transformers, and perhaps nothing else."""

from __future__ import annotations

import hashlib
import sys
from importlib.util import find_spec
from types import ModuleType


class _Log:
    """What the engine's model asks of structlog: to say what capturing took, or that a fetch met a bug."""

    def error(self, event: str, **fields: object) -> None:
        print(event, fields, file=sys.stderr)

    info = warning = error


def do_without() -> None:
    """Call it first. numba counts as absent even where it is there: it has no part in what a GPU computes, and may not
    go with the numpy beside it."""
    sys.modules["numba"] = None  # type: ignore[assignment]
    if find_spec("structlog") is None:
        module = ModuleType("structlog")
        vars(module)["get_logger"] = lambda *_: _Log()
        sys.modules["structlog"] = module
    if find_spec("blake3") is None:  # a hash that is the same in this process is all that is asked of it here
        module = ModuleType("blake3")
        vars(module)["blake3"] = hashlib.sha256
        sys.modules["blake3"] = module
    if find_spec("llguidance") is None:
        _without_grammars()


def _without_grammars() -> None:
    """The engine's modules import llguidance; no request of the suite has a grammar."""
    matcher = type("LLMatcher", (), {"grammar_from_regex": None})
    parts: dict[str, dict[str, object]] = {
        "llguidance": {"LLMatcher": matcher, "LLParserLimits": dict, "LLTokenizer": None},
        "llguidance.gbnf_to_lark": {"any_to_lark": None},
        "llguidance.numpy": {"fill_next_token_bitmask": None},
    }
    for name, words in parts.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(words)
