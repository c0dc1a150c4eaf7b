"""Section A: FlashInfer, if it is installed, against softmaxes in fp32 at the 8B shape, as an engine would call it:
launched, and captured once with plans that are renewed before each replay. KV that no sequence owns is NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import torch
from flashinfer_facts import VERSION, find_differences
from torch import Tensor

from benchmarks.gpu.exact import bounded, exact_attention, relative_error
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.kernels_attention import Chunks
from benchmarks.gpu.shapes import AttentionLoad, attention_load, model_dtype, model_spec, with_layers
from engine.model.steps.graphs import CudaRecorder, LaunchRecorder
from lora_kernels.attention_choice import installed_flashinfer
from lora_kernels.gpu.flashinfer_attention import FlashInferAttention

Check = Callable[[], float]
"""Returns a relative error. Raises AssertionError if it is too large."""
LEAST_S = 2.0
TABLE = "FlashInfer at the 8B shape"
PADDING = 2
"""Sequences that the captured steps have room for besides those of the load."""


def run(journal: Journal) -> None:
    if installed_flashinfer() is None:
        journal.note("left out: flashinfer is not installed")
        return
    device = torch.device(journal.device)
    journal.note(f"flashinfer {installed_flashinfer()}, where {VERSION} was read")
    with journal.case("FlashInfer's interface", LEAST_S):
        assert not (found := find_differences(import_module("flashinfer"))), "; ".join(found)
    for name, check in flashinfer_checks(journal.tiny, device, CudaRecorder(device)):
        with journal.case(f"FlashInfer, {name}", LEAST_S):
            journal.row(TABLE, name, **{"relative error": check()})


def flashinfer_checks(tiny: bool, device: torch.device, recorder: LaunchRecorder) -> Iterator[tuple[str, Check]]:
    decodes: Chunks = ((1, 40), (1, 3), (1, 17)) if tiny else ((1, 2048), (1, 17), (1, 8000), (1, 300))
    mixed: Chunks = ((1, 40), (1, 3), (5, 9)) if tiny else ((1, 2048), (1, 8000), (512, 2048), (77, 77), (3, 4099))
    spec = with_layers(model_spec(tiny), 1)
    for kind, chunks in (("decodes", decodes), ("prompts beside decodes", mixed)):
        load = attention_load(spec, chunks, 1, model_dtype(tiny), device)
        for window in (None, 6 if tiny else 1000):
            yield f"{kind}, window {window}", partial(check_launched, load, window)
            yield (
                f"{kind}, bounded scores, window {window}",
                partial(check_launched, bounded(load, sinks=False), window),
            )
            yield f"{kind}, replayed, window {window}", partial(check_replays, load, window, recorder)


def check_launched(load: AttentionLoad, window: int | None) -> float:
    result = FlashInferAttention()(load.query, load.kv[0], load.batch, load.scores, window)
    return relative_error(result, exact_attention(load, window), load.query.dtype)


def check_replays(load: AttentionLoad, window: int | None, recorder: LaunchRecorder) -> float:
    """Capture a step of two kinds of layers with room for more sequences than the load has, and replay it for the load,
    for a part of it, and for the load again. Returns the largest relative error."""
    attention, has_prompts = FlashInferAttention(), load.batch.max_query > 1
    rows, (_, heads, head_dim) = len(load.query) + PADDING, load.query.shape
    seqs = len(load.chunks) + PADDING
    attention.reserve(seqs, heads, load.kv[0], rows, load.batch.max_context)
    plans = attention.capture_plans(rows, seqs, has_prompts)
    assert plans is not None, "every class of steps is FlashInfer's here"
    most = rows if has_prompts else 1
    batch = replace(load.batch, plans=plans, num_decodes=seqs, max_query=most)
    query = torch.zeros(rows, heads, head_dim, dtype=load.query.dtype, device=load.query.device)
    out = {size: torch.zeros_like(query) for size in (window, 3)}

    def launch() -> None:
        for size, held in out.items():
            held.copy_(attention(query, load.kv[0], replace(batch), load.scores, size))

    replay, errors = recorder.record(launch), []
    for part in (load, without_first(load), load):
        starts, contexts = np.array(part.batch.host_query_starts), np.array(part.batch.host_context_lens)
        plans.renew(starts, contexts, part.batch.block_tables.cpu().numpy())
        query[: len(part.query)] = part.query
        replay()
        errors += [error_of(held[: len(part.query)], part, size) for size, held in out.items()]
    return max(errors)


def error_of(result: Tensor, load: AttentionLoad, window: int | None) -> float:
    return relative_error(result, exact_attention(load, window), load.query.dtype)


def without_first(load: AttentionLoad) -> AttentionLoad:
    """Return the load without its first sequence, which has one row."""
    starts = tuple(start - 1 for start in load.batch.host_query_starts[1:])
    batch = replace(
        load.batch,
        query_starts=load.batch.query_starts[1:] - 1,
        context_lens=load.batch.context_lens[1:],
        block_tables=load.batch.block_tables[1:],
        num_decodes=load.batch.num_decodes - 1,
        host_query_starts=starts,
        host_context_lens=load.batch.host_context_lens[1:],
    )
    return replace(load, query=load.query[1:], batch=batch, chunks=load.chunks[1:])
