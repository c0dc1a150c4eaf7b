"""Runs every backend check on the Triton backend, on the CPU. A script of its own, because Triton decides at import
whether kernels are interpreted: start it with TRITON_INTERPRET=1.

Prints one JSON object: check -> null, or the traceback of its failure.
"""

import json
import traceback
from collections.abc import Callable
from functools import partial

import torch
from attention_checks import ATTENTION_CHECKS
from backend_checks import CHECKS, run_lora
from dora_checks import DORA_CHECKS
from kernel_cases import lora_case

from lora_kernels import triton_dora
from lora_kernels.backend import Backend
from lora_kernels.triton_backend import TritonBackend


def lora_rows_keep_their_bits(backend: Backend) -> None:
    """A row's result is the same to the last bit whoever shares its batch."""
    slots = [2, 0, 1, 1, 2, 2, 2, 0, -1, 1] + [2] * 20
    case = lora_case([8, 40, 16], slots)
    group = case.shape.groups[2]
    out, x = case.inputs(group)
    together = run_lora(backend, case, out, x, 1, group)
    for row, slot in enumerate(slots[:10]):
        alone = lora_case([8, 40, 16], [slot])
        part = slice(row, row + 1)
        assert torch.equal(run_lora(backend, alone, out[part], x[part], 1, group), together[part])


def outcome(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    # The interpreter cuts bf16 off where a GPU rounds: what 16 bits cost is measured in fp16.
    checks = {name: check for name, check in CHECKS.items() if "bf16" not in name}
    checks = {**checks, "lora_rows_keep_their_bits": lora_rows_keep_their_bits}
    runs = {name: partial(check, TritonBackend()) for name, check in checks.items()}
    runs |= ATTENTION_CHECKS
    runs |= {name: partial(check, triton_dora.prepare) for name, check in DORA_CHECKS.items()}
    print(json.dumps({name: outcome(run) for name, run in runs.items()}))
