"""Section B: LoRA kernels compared with the bytes that they must move: A and B of every adapter once, rows in and out.

Each case adds all four groups of all layers as one CUDA graph, over so many sets of adapters that no cache holds them.
Its figures are per layer. The preparation once per step (segments and their upload) is timed separately and included in
`step us`, the time for all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.ours import our_backend
from benchmarks.gpu.shapes import (
    AdapterBank,
    adapter_elements,
    lora_bytes,
    make_bank,
    model_dtype,
    model_spec,
    row_adapter_slots,
    spread,
)
from benchmarks.gpu.timing import memory_bandwidth, time_calls, time_host
from engine.model.spec.config import ModelSpec
from lora_kernels.backend import Backend
from lora_kernels.segments import plan_segments

MIXED = (8, 16, 32, 64)
COLD_BYTES = 192 << 20
"""Least size in bytes of the adapters that one timed round reads; no L2 cache holds a third of it."""
LEAST_S = 4.0


@dataclass(frozen=True)
class LoraWork:
    """The rows of a step to time: `lengths[i]` rows use an adapter of rank `ranks[i]`."""

    name: str
    lengths: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.lengths)


def decode_work(rows: int, adapters: int, ranks: tuple[int, ...]) -> LoraWork:
    label = str(ranks[0]) if len(ranks) == 1 else f"{min(ranks)}-{max(ranks)}"
    name = f"{rows} rows, {adapters} adapter{'s' * (adapters > 1)}, rank {label}"
    return LoraWork(name, (rows // adapters,) * adapters, spread(ranks, adapters))


DECODES = (
    decode_work(64, 64, MIXED),
    decode_work(64, 64, (8,)),
    decode_work(64, 64, (16,)),
    decode_work(64, 64, (64,)),
    decode_work(64, 8, MIXED),
    decode_work(64, 1, (16,)),
    decode_work(16, 8, MIXED),
    decode_work(16, 1, (16,)),
    decode_work(8, 8, (16,)),
    decode_work(1, 1, (16,)),
    decode_work(1, 1, (64,)),
)
PREFILLS = (
    decode_work(2048, 1, (16,)),
    decode_work(2048, 8, MIXED),
    decode_work(2048, 64, MIXED),
    decode_work(8192, 4, (64,)),
)
TINY_DECODES, TINY_PREFILLS = (decode_work(3, 3, (2, 5)),), (decode_work(20, 2, (3,)),)


def run(journal: Journal) -> None:
    device = torch.device(journal.device)
    bandwidth = memory_bandwidth(device, journal.tiny)
    journal.row("bandwidth", "of kernels", **{"GB/s": bandwidth / 1e9})
    tables = (
        {"LoRA, decode": TINY_DECODES, "LoRA, prefill": TINY_PREFILLS}
        if journal.tiny
        else {"LoRA, decode": DECODES, "LoRA, prefill": PREFILLS}
    )
    for table, works in tables.items():
        for work in works:
            with journal.case(f"{table}: {work.name}", LEAST_S):
                journal.row(table, work.name, **measure(work, model_spec(journal.tiny), bandwidth, device))


def measure(work: LoraWork, spec: ModelSpec, bandwidth: float, device: torch.device) -> dict[str, float | str]:
    bank = cold_bank(work, spec, device)
    timing = time_calls(list(our_calls(our_backend(device), bank, work)), device)
    us = timing.us * len(bank.groups)
    adapter_slots = range(len(work.ranks))
    moved = lora_bytes(bank, adapter_slots, work.rows)
    flops = 2 * sum(rows * adapter_elements(spec, rank) for rows, rank in zip(work.lengths, work.ranks, strict=True))
    prepare_us = time_host(
        partial(prepare_anew, our_backend(device), bank, work), device, repeats=3 if device.type == "cpu" else 20
    )
    return {
        "us a layer": us,
        "MB": moved / 1e6,
        "of limit": moved / bandwidth / (us * 1e-6),
        "TFLOP/s": flops / us / 1e6,
        "prepare us": prepare_us,
        "step us": prepare_us + spec.layers * us,
        "timed by": timing.how,
    }


def cold_bank(work: LoraWork, spec: ModelSpec, device: torch.device) -> AdapterBank:
    """Return so many sets of the work's adapters that a round through all exceeds any cache; on a CPU, one set."""
    dtype = model_dtype(device.type == "cpu")
    set_bytes = spec.layers * sum(adapter_elements(spec, rank) for rank in work.ranks) * dtype.itemsize
    sets = 1 if device.type == "cpu" else ceil(COLD_BYTES / set_bytes)
    return make_bank(spec, work.ranks * sets, dtype, device)


def our_calls(backend: Backend, bank: AdapterBank, work: LoraWork) -> list[Callable[[], object]]:
    """Return the calls of `add_lora` to time: one for each group of each layer of each set of adapters in the bank."""
    calls: list[Callable[[], object]] = []
    like: dict[str, Any] = {"dtype": bank.arena.dtype, "device": bank.arena.device}
    xs = [torch.empty(work.rows, group.in_features, **like).normal_() for group in bank.groups]
    outs = [torch.empty(work.rows, sum(group.out_features), **like).normal_() for group in bank.groups]
    for first in range(0, len(bank.ranks), len(work.ranks)):
        plan = plan_segments(row_adapter_slots(work.lengths, first))
        prepared = backend.prepare_lora(bank.arena, bank.table, plan)
        for layer in range(bank.spec.layers):
            for x, out, group in zip(xs, outs, bank.groups, strict=True):
                calls.append(partial(backend.add_lora, out, x, prepared, layer, group))
    return calls


def prepare_anew(backend: Backend, bank: AdapterBank, work: LoraWork) -> None:
    """Do our preparation of a step as if all adapters were new, so that nothing of the last step's is reused."""
    bank.table.versions += 1
    backend.prepare_lora(bank.arena, bank.table, plan_segments(row_adapter_slots(work.lengths)))
