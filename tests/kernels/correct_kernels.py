"""Section A: checks LoRA and attention kernels at the 8B shape in bf16, on the device, against products and softmaxes
in fp32, and pointwise kernels against torch's.

KV that no sequence owns is NaN. LoRA and attention give a row the same bits whatever the other rows in its batch are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.exact import bounded, exact_attention, exact_delta, relative_error
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.ours import our_backend
from benchmarks.gpu.shapes import (
    AdapterBank,
    AttentionLoad,
    attention_load,
    make_bank,
    model_dtype,
    model_spec,
    row_adapter_slots,
    with_layers,
)
from lora_kernels.backend import Backend
from lora_kernels.layout import ProjectionGroup
from lora_kernels.pointwise import BoundedSwiglu, Pointwise, TorchPointwise
from lora_kernels.segments import plan_segments

LEAST_S = 2.0
Check = Callable[[], float | None]
"""Returns a relative error, or None if bits were compared. Raises AssertionError if the check fails."""


def run(journal: Journal) -> None:
    for name, check in big_checks(journal.tiny, torch.device(journal.device)):
        with journal.case(name, LEAST_S):
            found = check()
            journal.row("8B shape", name, **{"relative error": found})


def big_checks(tiny: bool, device: torch.device) -> Iterator[tuple[str, Check]]:
    """Yield (name, check) at the 8B shape, or in toy size if `tiny`: of accuracy, and of batch-invariant bits."""
    spec, dtype = with_layers(model_spec(tiny), 1), model_dtype(tiny)
    lengths = (1, 2, 3) if tiny else (1, 1, 2, 5, 16, 17, 40, 130)
    ranks = (1, 3, 17) if tiny else (8, 64, 16, 1, 33, 128, 256, 8)
    bank = make_bank(spec, ranks, dtype, device)
    for group in bank.groups:
        yield f"lora {group.name}", partial(check_lora, bank, group, lengths)
    yield "lora bits of a row", partial(check_lora_bits, bank, lengths)
    chunks = [(1, 40), (5, 9)] if tiny else [(1, 2048), (1, 17), (1, 8000), (512, 2048), (77, 77), (3, 4099)]
    load = attention_load(spec, chunks, 1, dtype, device)
    for window in (None, 6 if tiny else 1000):
        yield f"attention, window {window}", partial(check_attention, load, window)
        yield f"attention, bounded scores and sinks, window {window}", partial(check_attention, bounded(load), window)
    decodes = [(1, 40), (1, 3)] if tiny else [(1, 2048), (1, 17), (1, 8000), (1, 300)]
    yield "attention bits of a row", partial(check_attention_bits, attention_load(spec, decodes, 1, dtype, device))
    for name, check in pointwise_checks(our_backend(device).pointwise, 7 if tiny else 1000, device, dtype):
        yield f"pointwise {name}", check


def check_lora(bank: AdapterBank, group: ProjectionGroup, lengths: Sequence[int]) -> float:
    """Return the relative error of a group's LoRA deltas, added to outputs of the same magnitude, so that errors of
    both are visible. `lengths[i]` rows use adapter i. Raises AssertionError if it is too large."""
    out, x = lora_inputs(bank, group, sum(lengths))
    delta = exact_delta(bank, group, lengths, x)
    out *= float(delta.std())
    result = add_lora(our_backend(bank.arena.device), bank, group, lengths, out, x)
    return relative_error(result, out.float() + delta, out.dtype)


def check_lora_bits(bank: AdapterBank, lengths: Sequence[int]) -> None:
    """Check that the first half of the adapters gives rows the same gate_up bits with and without the other rows."""
    group, alone = bank.groups[2], lengths[: len(lengths) // 2]
    out, x = lora_inputs(bank, group, sum(lengths))
    together = add_lora(our_backend(bank.arena.device), bank, group, lengths, out, x)[: sum(alone)]
    apart = add_lora(our_backend(bank.arena.device), bank, group, alone, out[: sum(alone)], x[: sum(alone)])
    assert torch.equal(together, apart), f"{int((together != apart).sum())} numbers differ"


def lora_inputs(bank: AdapterBank, group: ProjectionGroup, rows: int) -> tuple[Tensor, Tensor]:
    """Return random (base output, x) with `rows` rows in the bank's dtype, always the same ones."""
    generator = torch.Generator(bank.arena.device).manual_seed(0)
    like: dict[str, Any] = {"generator": generator, "device": bank.arena.device}
    out = torch.randn(rows, sum(group.out_features), **like).to(bank.arena.dtype)
    return out, torch.randn(rows, group.in_features, **like).to(bank.arena.dtype)


def add_lora(
    backend: Backend, bank: AdapterBank, group: ProjectionGroup, lengths: Sequence[int], out: Tensor, x: Tensor
) -> Tensor:
    """Return `out`, unchanged itself, plus the first layer's LoRA delta; `lengths[i]` rows use adapter i."""
    prepared, result = (
        backend.prepare_lora(bank.arena, bank.table, plan_segments(row_adapter_slots(lengths))),
        out.clone(),
    )
    backend.add_lora(result, x, prepared, 0, group)
    return result


def check_attention(load: AttentionLoad, window: int | None) -> float:
    result = our_backend(load.query.device).attention(load.query, load.kv[0], load.batch, load.scores, window)
    return relative_error(result, exact_attention(load, window), load.query.dtype)


def check_attention_bits(load: AttentionLoad) -> None:
    """Check that every sequence (of one query row) has the same bits when computed alone over the same pages."""
    together = our_backend(load.query.device).attention(load.query, load.kv[0], load.batch, load.scores)
    for sequence, (_, context) in enumerate(load.chunks):
        own = slice(sequence, sequence + 1)
        batch = replace(
            load.batch,
            query_starts=load.batch.query_starts[:2],
            context_lens=load.batch.context_lens[own],
            block_tables=load.batch.block_tables[own],
            kv_slots=load.batch.kv_slots[own],
            num_decodes=1,
            max_context=context,
            host_query_starts=(0, 1),
            host_context_lens=(context,),
        )
        alone = our_backend(load.query.device).attention(load.query[own], load.kv[0], batch, load.scores)
        assert torch.equal(alone, together[own]), f"context {context}: not the same bits alone"


def pointwise_checks(
    ours: Pointwise, rows: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Check]]:
    """Yield (name, check) of kernels against torch's operations. Both sides round where Hugging Face's models do."""
    torchs = TorchPointwise()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def add_norm() -> float:
        x, delta, weight = draw(rows, 4096), draw(rows, 4096), draw(4096)
        mine, theirs = x.clone(), x.clone()
        results = [side.add_norm(at, delta, weight, 1e-5) for side, at in ((ours, mine), (torchs, theirs))]
        assert torch.equal(mine, theirs), "the sums differ"
        return relative_error(results[0], results[1].float(), dtype)

    def rotate() -> float:
        x, angle = draw(rows, 40, 128), torch.rand(rows, 1, 128, device=device)
        mine, theirs = x.clone(), x.clone()
        ours.rotate(mine, angle.cos(), angle.sin())
        torchs.rotate(theirs, angle.cos(), angle.sin())
        return relative_error(mine, theirs.float(), dtype)

    def swiglu() -> float:
        x = draw(rows, 2048)
        return relative_error(ours.swiglu(x), torchs.swiglu(x).float(), dtype)

    def geglu() -> float:
        x = draw(rows, 2048)
        return relative_error(ours.geglu(x), torchs.geglu(x).float(), dtype)

    def bounded_swiglu() -> float:
        x, bounds = draw(rows, 2048) * 8, BoundedSwiglu(7.0, 1.702)
        return relative_error(ours.bounded_swiglu(x, bounds), torchs.bounded_swiglu(x, bounds).float(), dtype)

    return iter((check.__name__, check) for check in (add_norm, rotate, swiglu, geglu, bounded_swiglu))
