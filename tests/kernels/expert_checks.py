"""What the kernels of experts must satisfy in every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lora_kernels import reference
from lora_kernels.backend import Backend
from lora_kernels.layout import LoraTable, ProjectionGroup, pack_adapter, plan_layout
from lora_kernels.routing import Routing, RowAdapters
from lora_kernels.segments import Int32Array

EXPERTS, TOP_K, LAYERS, FIRST, HIDDEN, INNER = 7, 3, 2, 3, 40, 24
GATE_UP, DOWN = (
    ProjectionGroup("gate_up", (0, 1), HIDDEN, (INNER, INNER)),
    ProjectionGroup("down", (2,), INNER, (HIDDEN,)),
)
SLOTS = np.array([1, -1, 0, 2, 1, 1, 0, -1, 1, 1, 1, 2], dtype=np.int32)
"""Adapter slot of each row. Slot 2 has an adapter that changes no expert."""


def experts_of(routing: Routing) -> Tensor:
    """The expert of each entry."""
    return torch.repeat_interleave(torch.arange(len(routing.starts) - 1), routing.starts.diff().cpu())


def _routed(backend: Backend, normalised: bool, order: Tensor | None = None) -> tuple[Tensor, Routing]:
    logits = torch.randn(len(SLOTS), EXPERTS, generator=torch.Generator().manual_seed(3)) * 2
    logits[:, 4] = -30.0  # an expert without entries
    return logits, backend.experts.route(logits, TOP_K, normalised=normalised, order=order)


def each_row_has_its_likeliest_experts(backend: Backend) -> None:
    for normalised in (False, True):
        logits, routing = _routed(backend, normalised)
        probabilities, chosen = logits.softmax(1).topk(TOP_K)
        places = routing.places.long()
        assert torch.equal(experts_of(routing)[places], chosen)
        assert torch.equal(routing.rows[places], torch.arange(len(logits))[:, None].expand_as(places).int())
        weights = probabilities / probabilities.sum(1, keepdim=True) if normalised else probabilities
        torch.testing.assert_close(routing.weights, weights)
        assert int(routing.starts[-1]) == len(routing.rows) == logits.numel() // EXPERTS * TOP_K


def an_experts_entries_follow_an_order_of_rows(backend: Backend) -> None:
    order = torch.from_numpy(np.argsort(SLOTS, kind="stable"))
    _, routing = _routed(backend, True, order)
    _, usual = _routed(backend, True)
    for first, last in zip(routing.starts, routing.starts[1:], strict=False):
        rows, ascending = routing.rows[first:last].tolist(), usual.rows[first:last].tolist()
        assert rows == [row for row in order.tolist() if row in ascending]
    assert torch.equal(routing.weights, usual.weights)


def rows_of_nan_harm_no_other(backend: Backend) -> None:
    """Each row has different experts, whatever its logits, also where it has all of them."""
    for top_k in (TOP_K, EXPERTS):
        logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(4))
        usual = backend.experts.route(logits.clone(), top_k, normalised=True)
        logits[1], logits[3, 2] = torch.nan, torch.nan
        routing = backend.experts.route(logits, top_k, normalised=True)
        places, sound = routing.places.long(), torch.tensor([0, 2, 4])
        chosen, expected = experts_of(routing)[places], experts_of(usual)[usual.places.long()]
        assert [len(set(row)) for row in chosen.tolist()] == [top_k] * len(logits)
        assert torch.equal(routing.rows[places], torch.arange(len(logits))[:, None].expand_as(places).int())
        assert torch.equal(chosen[sound], expected[sound])
        assert torch.equal(routing.weights[sound], usual.weights[sound])


def entries_have_their_rows(backend: Backend) -> None:
    _, routing = _routed(backend, True)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(len(SLOTS), HIDDEN).to(dtype)
        assert torch.equal(backend.experts.gather(x, routing), x[routing.rows.long()])


def rows_are_weighted_sums_of_their_entries(dtype: torch.dtype, backend: Backend) -> None:
    _, routing = _routed(backend, True)
    entries = torch.randn(len(routing.rows), HIDDEN).to(dtype)
    weights = routing.weights.to(dtype).float()
    expected = (entries.float()[routing.places.long()] * weights[:, :, None]).sum(1).to(dtype)
    torch.testing.assert_close(backend.experts.combine(entries, routing), expected)


def entries_have_their_adapters_deltas(backend: Backend) -> None:
    arena, table = arena_of_adapters([(5, 0), (20, 3), (0, 0)])
    adapters = row_adapters(SLOTS, 20)
    _, routing = _routed(backend, True, adapters.order)
    slots, experts = SLOTS[routing.rows.numpy()], experts_of(routing).numpy()
    for layer in range(LAYERS):
        prepared = backend.experts.prepare_lora(arena, table, adapters, routing, layer, FIRST, HIDDEN)
        for group, first in ((GATE_UP, 0), (DOWN, 2)):
            x = torch.randn(len(slots), group.in_features)
            out = torch.randn(len(slots), sum(group.out_features))
            expected = out.clone()
            for entry, (slot, expert) in enumerate(zip(slots.tolist(), experts.tolist(), strict=True)):
                targets = tuple(FIRST + 3 * expert + first + number for number in range(len(group.targets)))
                one = ProjectionGroup("one", targets, group.in_features, group.out_features)
                expected[entry] += reference.lora_delta(x[entry : entry + 1], [slot], arena, table, layer, one)[0]
            backend.add_lora(out, x, prepared, 0, group)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def adapters_of_no_expert_prepare_nothing(backend: Backend) -> None:
    arena, table = arena_of_adapters([(0, 0)] * 3)
    adapters = row_adapters(SLOTS, 0)
    _, routing = _routed(backend, True, adapters.order)
    prepared = backend.experts.prepare_lora(arena, table, adapters, routing, 0, FIRST, HIDDEN)
    out = torch.zeros(len(routing.rows), HIDDEN)
    if prepared is not None:
        backend.add_lora(out, torch.randn(len(out), INNER), prepared, 0, DOWN)
    assert not out.any()


def row_adapters(slots: Int32Array, max_rank: int) -> RowAdapters:
    order = torch.from_numpy(np.argsort(slots, kind="stable"))
    return RowAdapters(torch.from_numpy(slots), order, max_rank, int(np.bincount(slots[slots >= 0]).max()))


def arena_of_adapters(ranks: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> tuple[Tensor, LoraTable]:
    """An arena and a table with adapters that have the first rank on experts of even number, the second on others, and
    another rank on linears before the experts'."""
    widths = np.asarray(
        [(8, 8)] * FIRST + [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)] * EXPERTS, dtype=np.int32
    )
    table, generator = LoraTable(len(ranks), LAYERS, len(widths), 1024, torch.device("cpu")), torch.Generator()
    pages = [torch.zeros(1, 1024, dtype=dtype)]
    for slot, (even, odd) in enumerate(ranks):
        own = np.zeros((LAYERS, len(widths)), dtype=np.int32)
        own[:, :FIRST] = 2
        own[:, FIRST:] = np.repeat([even, odd] * EXPERTS, 3)[: 3 * EXPERTS]
        layout = plan_layout(own, widths, 1024)
        blocks = {
            (int(layer), int(target)): (
                torch.randn(int(own[layer, target]), int(widths[target, 0]), generator=generator.manual_seed(slot)) / 6,
                torch.randn(int(widths[target, 1]), int(own[layer, target]), generator=generator) * (1 + layer) / 3,
            )
            for layer, target in np.argwhere(own > 0)
        }
        first = sum(map(len, pages))
        pages.append(pack_adapter(layout, blocks, 1024, dtype))
        table.set(slot, layout, tuple(range(first, first + layout.num_pages)))
    return torch.cat(pages).view(-1), table


EXPERT_CHECKS: dict[str, Callable[[Backend], None]] = {
    "weighted sums": partial(rows_are_weighted_sums_of_their_entries, torch.float32),
    "weighted sums in bf16": partial(rows_are_weighted_sums_of_their_entries, torch.bfloat16),
    **{
        check.__name__: check
        for check in (
            each_row_has_its_likeliest_experts,
            an_experts_entries_follow_an_order_of_rows,
            rows_of_nan_harm_no_other,
            entries_have_their_rows,
            entries_have_their_adapters_deltas,
            adapters_of_no_expert_prepare_nothing,
        )
    },
}
