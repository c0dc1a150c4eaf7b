"""What the kernels of experts on a GPU must satisfy, as functions run under the interpreter, or on a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from backend_checks import assert_error_within_twice
from expert_checks import (
    EXPERTS,
    FIRST,
    HIDDEN,
    LAYERS,
    arena_of_adapters,
    experts_of,
    row_adapters,
    rows_are_weighted_sums_of_their_entries,
)
from interpreter_numbers import tensor_cores
from torch import Tensor

from lora_kernels.gpu import triton_experts
from lora_kernels.gpu.grouped_linear import DeviceExperts
from lora_kernels.gpu.grouped_tuning import GroupedTile, GroupedTuning
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
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
    biases = torch.randn(case.experts, features, generator=generator).to(case.dtype) if case.normalised else None
    exact, plain = torch.empty(len(x), features), torch.empty(len(x), features, dtype=case.dtype)
    added = 0.0 if biases is None else biases[experts_of(routing)]
    for expert, (start, stop) in enumerate(pairwise(routing.starts.tolist())):
        exact[start:stop] = x[start:stop].float() @ weight[expert].float().T
        plain[start:stop] = x[start:stop] @ weight[expert].T
    with tensor_cores():
        out = DeviceExperts(weight, case.experts, biases=biases)(x, routing.starts, LOW)
    if case.dtype == FP32:
        torch.testing.assert_close(out, exact + added, rtol=1e-4, atol=1e-4)
    else:
        assert_error_within_twice(out, plain + added, exact + added)


def an_entry_has_the_same_bits_among_any_others() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((2, 24, 96), (40, 96)))
    linears = DeviceExperts(weight, 2)
    with tensor_cores():
        among = linears(x, torch.tensor([0, 3, 40], dtype=torch.int32), LOW)
        assert LOW.tile(40, 2) is LOW.many and LOW.tile(9, 2) is LOW.few
        alone = linears(x[20:29], torch.tensor([0, 0, 9], dtype=torch.int32), LOW)
    assert torch.equal(among[20:29], alone)


def tiles_cover_the_entries_of_adapters(long_from: int) -> None:
    """Most entries are of one expert, in several blocks; adapters have up to 110 rows, or none that change experts."""
    generator = torch.Generator().manual_seed(4)
    slots = np.repeat(np.array([0, 1, 2, -1], dtype=np.int32), [110, 45, 10, 35])
    slots = slots[torch.randperm(len(slots), generator=generator).numpy()]
    arena, table = arena_of_adapters([(5, 0), (20, 33), (0, 0)])
    adapters, tuning = row_adapters(slots, 33), LoraTuning(long_from=long_from)
    logits = torch.randn(len(slots), EXPERTS, generator=generator)
    logits[:, 2] += 50.0
    experts = TritonBackend(tuning).experts
    routing = experts.route(logits, 2, normalised=True, order=adapters.order)
    lora = experts.prepare_lora(arena, table, adapters, routing, 1, FIRST, HIDDEN)
    virtual = (slots[routing.rows] * LAYERS + 1) * (len(table.host_ranks[0, 0]) // 3) + 1 + experts_of(routing).numpy()
    assert torch.equal(lora.rows, torch.arange(len(virtual)).int())
    ranks = np.where(slots[routing.rows] < 0, 0, lora.table.max_ranks[virtual])
    covered = np.zeros((len(virtual), 33), dtype=int)
    pairs = (lora.lists.rows, lora.lists.shrink, tuning.tile_rows, 16), (
        lora.lists.long_rows, lora.lists.long_shrink, tuning.long_rows, tuning.long_ranks,
    )  # fmt: skip
    for rows, shrink, most, each in pairs:
        assert int(rows.count) <= rows.programs and int(shrink.count) <= shrink.programs if rows.programs else True
        tiles = rows.tiles[: int(rows.count)].tolist() if rows.programs else []
        expected = []
        for slot, first, count, _ in tiles:
            assert 0 < count <= most and (virtual[first : first + count] == slot).all()
            is_long = np.count_nonzero(virtual == slot) >= long_from
            assert is_long == (most == tuning.long_rows)
            covered[first : first + count, : ranks[first]] += 1
            expected += [[slot, first, count, rank] for rank in range(0, ranks[first], each)]
        assert sorted(shrink.tiles[: len(expected)].tolist()) == sorted(expected)
    assert (covered == (np.arange(33) < ranks[:, None])).all()
    assert bool(lora.lists.long_rows.programs) == (long_from <= 110)


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
    **{f"experts' tiles, long from {rows}": partial(tiles_cover_the_entries_of_adapters, rows) for rows in (32, 128)},
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
