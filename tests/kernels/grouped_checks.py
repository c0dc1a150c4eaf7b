"""What the kernels of experts on a GPU must satisfy, as functions run under the interpreter, or on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import torch
from backend_checks import assert_error_within_twice
from expert_checks import rows_are_weighted_sums_of_their_entries
from interpreter_numbers import tensor_cores
from torch import Tensor

from lora_kernels.gpu import triton_experts
from lora_kernels.gpu.grouped_linear import DeviceExperts
from lora_kernels.gpu.grouped_tuning import GroupedTile, GroupedTuning
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.routing import Routing, TorchExperts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW = GroupedTuning(few=GroupedTile(16, 16, 32, 4, 2), many=GroupedTile(32, 32, 32, 4, 2))
"""Tiles of which small cases have several."""


class Case(NamedTuple):
    """Entries of `rows` rows, each at `top_k` of `experts`. `skew` is added to the logits of the first `top_k` experts:
    with a large one, these have all entries."""

    rows: int
    experts: int
    top_k: int
    skew: float = 0.0
    dtype: torch.dtype = FP32
    normalised: bool = True

    def logits(self) -> Tensor:
        numbers = torch.rand(self.rows, self.experts, generator=torch.Generator().manual_seed(self.rows))
        logits = numbers.argsort(1) / 8 - self.experts / 16  # no two of a row are equal in 16 bits
        logits[:, : self.top_k] += self.skew
        return logits.to(self.dtype)


CASES = {
    "1 row, 4 experts, 1 each": Case(1, 4, 1),
    "33 rows, 128 experts, 8 each": Case(33, 128, 8, dtype=BF16, normalised=False),
    "300 rows, 5 experts, 2 each": Case(300, 5, 2, dtype=BF16),
    "40 rows, 60 experts, 4 each, all on 4": Case(40, 60, 4, skew=50.0, dtype=FP16),
    "21 rows, 8 experts, 8 each": Case(21, 8, 8, normalised=False),
}
ROUTE_BLOCK = 256
"""Entries that are numbered at a time, so that larger cases have several blocks."""


def _route(case: Case, order: Tensor | None = None) -> Routing:
    with patch.object(triton_experts, "PLACE_BLOCK", ROUTE_BLOCK):
        experts = TritonBackend().experts
        return experts.route(case.logits(), case.top_k, normalised=case.normalised, order=order)


def routing_is_torchs(case: Case) -> None:
    order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(1))
    ours = _route(case, order)
    prepare = TritonBackend().prepare_lora
    theirs = TorchExperts(prepare).route(case.logits(), case.top_k, normalised=case.normalised, order=order)
    for name in ("rows", "starts", "places"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-5, atol=1e-7)


def equal_logits_choose_the_first_experts() -> None:
    routing = TritonBackend().experts.route(torch.zeros(2, 6), 3, normalised=False)
    assert routing.starts.tolist() == [0, 2, 4, 6, 6, 6, 6]
    torch.testing.assert_close(routing.weights, torch.full((2, 3), 1 / 6))


def a_sick_row_is_routed_and_harms_no_other() -> None:
    case = Case(9, 8, 2)
    logits, well = case.logits(), _route(case)
    logits[3], logits[5, 2], logits[7, 1] = float("nan"), float("-nan"), float("inf")
    sick = TritonBackend().experts.route(logits, 2, normalised=True)
    assert sorted(sick.places.flatten().tolist()) == list(range(18))
    assert sick.rows.bincount().tolist() == [2] * 9 and int(sick.starts[-1]) == 18
    healthy = [0, 1, 2, 4, 6, 8]
    assert torch.equal(sick.weights[healthy], well.weights[healthy])


def products_are_those_of_each_expert(case: Case, features: int, width: int) -> None:
    routing, generator = _route(case), torch.Generator().manual_seed(2)
    weight = (torch.randn(case.experts, features, width, generator=generator) / 8).to(case.dtype)
    x = torch.randn(len(routing.rows), width, generator=generator).to(case.dtype)
    exact, plain = torch.empty(len(x), features), torch.empty(len(x), features, dtype=case.dtype)
    for expert, (start, stop) in enumerate(pairwise(routing.starts.tolist())):
        exact[start:stop] = x[start:stop].float() @ weight[expert].float().T
        plain[start:stop] = x[start:stop] @ weight[expert].T
    with tensor_cores():
        out = DeviceExperts(weight, case.experts)(x, routing.starts, LOW)
    if case.dtype == FP32:
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    else:
        assert_error_within_twice(out, plain, exact)


def an_entry_has_the_same_bits_among_any_others() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((2, 24, 96), (40, 96)))
    linears = DeviceExperts(weight, 2)
    with tensor_cores():
        among = linears(x, torch.tensor([0, 3, 40], dtype=torch.int32), LOW)
        assert LOW.tile(40, 2) is LOW.many and LOW.tile(9, 2) is LOW.few
        alone = linears(x[20:29], torch.tensor([0, 0, 9], dtype=torch.int32), LOW)
    assert torch.equal(among[20:29], alone)


def rows_are_weighted_sums_in_bf16() -> None:
    with tensor_cores():
        rows_are_weighted_sums_of_their_entries(BF16, TritonBackend())


def no_entries_have_no_outputs() -> None:
    assert DeviceExperts(torch.ones(2, 8, 16), 2)(torch.empty(0, 16), torch.zeros(3, dtype=torch.int32)).shape == (0, 8)


GROUPED_CHECKS: dict[str, Callable[[], None]] = {
    **{f"routing: {name}": partial(routing_is_torchs, case) for name, case in CASES.items()},
    **{
        f"experts: {name}": partial(products_are_those_of_each_expert, case, *sizes)
        for (name, case), sizes in zip(CASES.items(), ((41, 64), (12, 32), (40, 64), (30, 64), (33, 33)), strict=True)
    },
    **{
        check.__name__: check
        for check in (
            equal_logits_choose_the_first_experts,
            a_sick_row_is_routed_and_harms_no_other,
            an_entry_has_the_same_bits_among_any_others,
            rows_are_weighted_sums_in_bf16,
            no_entries_have_no_outputs,
        )
    },
}
