"""Runs checks of replayed steps. A script of its own, because Triton decides at import whether kernels are
interpreted: start it with TRITON_INTERPRET=1, the folders of the tiny model and of one with experts, and the names of
checks.

Prints one JSON object: check -> null, or the traceback of its failure, or that it was not asked for.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from unittest.mock import patch

import torch
from chunk_graph_checks import CHUNK_CHECKS
from expert_graph_checks import EXPERT_CHECKS
from graph_checks import CHECKS

from engine.model.steps import rungs
from lab.without_gpu.interpreter_speed import spare_repeated_work


def outcome(check: Callable[[], None]) -> str | None:
    try:
        with torch.inference_mode():
            check()
    except Exception:
        return traceback.format_exc()
    return None


def outcomes(checks: Mapping[str, Callable[[], None]]) -> dict[str, str | None]:
    asked = sys.argv[3:]
    return {name: outcome(check) if name in asked else "was not asked for" for name, check in checks.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    spare_repeated_work()
    found = outcomes(CHECKS)
    with patch.object(rungs, "CHUNK_RUNG", 20):
        found |= outcomes(CHUNK_CHECKS | EXPERT_CHECKS)
    print(json.dumps(found))
