"""The torch backend against the reference."""

import numpy as np
import pytest
from backend_checks import CHECKS
from kernel_cases import lora_case

from lora_kernels.portable.torch_ops import TorchBackend
from lora_kernels.segments import plan_segments


@pytest.mark.parametrize("max_stacked_rank", [0, 128, 10_000], ids=["tiles", "default", "stacks"])
@pytest.mark.parametrize("name", CHECKS)
def test_backend(name, max_stacked_rank):
    CHECKS[name](TorchBackend(max_stacked_rank))


def test_a_stack_is_kept_while_its_adapters_stay():
    case, backend = lora_case([8, 4, 2], [0, 1, 2, 2]), TorchBackend()
    first = backend.prepare_lora(case.arena, case.table, case.plan)
    again = backend.prepare_lora(case.arena, case.table, plan_segments(np.array([1, 0, 0], dtype=np.int32)))
    assert again.stack is first.stack
    few = backend.prepare_lora(case.arena, case.table, plan_segments(np.array([2, 2], dtype=np.int32)))
    assert few.stack is not first.stack, "a stack much wider than what is in use"
