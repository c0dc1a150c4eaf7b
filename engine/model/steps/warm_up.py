"""Runs steps of every kind once before an engine is ready, so that Triton compiles no kernel while requests wait. The
steps are padding: they read the null page and write no page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch

from engine.core.messages.requests import SamplingParams
from engine.model.batch.rows import HostBatch
from engine.model.decode.pipeline import Pipeline
from engine.model.layers.lora import target_names, target_widths
from engine.model.memory.allocation import Progress
from engine.model.memory.arena import Arena
from engine.model.memory.host import Blob
from engine.model.sample.slot_sampler import SlotSampler
from engine.model.spec.config import ModelSpec
from engine.model.steps.forward import Steps
from lora_kernels.layout import plan_layout
from lora_kernels.segments import plan_segments
from lora_kernels.tuning import LEAST_SEQS

log = structlog.get_logger("engine")

NAME = "warm-up"
"""Name of the adapter and the request that the steps use."""
LOGPROBS = (0, 2, 4, 8, 16, 20)
"""Numbers of likeliest tokens that each need kernels of their own, up to the most that a request may ask for."""


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The sizes of the largest steps of an engine, up to which it is warmed up: sequences, rows, and tokens of a
    context."""

    seqs: int
    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """A warm-up step: (rows, context) of each sequence, single rows first; whether all rows have the adapter; and the
    sampling parameters of the first sequence, which alone is sampled from."""

    chunks: tuple[tuple[int, int], ...]
    has_adapter: bool = False
    params: SamplingParams = GREEDY


def _sequences(limits: StepLimits) -> Iterator[PaddedStep]:
    """Yield a warm-up step for every power of two as the number of sequences, of which one has a chunk of a prompt, and
    one of the largest number, in which all decode. All rows have the adapter."""
    # One decode more may need the kernels of the next power of two, and adapters have steps launched kernel by kernel.
    seqs = LEAST_SEQS
    while True:
        count = min(seqs, limits.seqs)
        yield PaddedStep(((1, 1),) * (count - 1) + ((min(2, limits.context),) * 2,), has_adapter=True)
        if seqs >= limits.seqs:
            yield PaddedStep(((1, 1),) * limits.seqs, has_adapter=True)
            return
        seqs *= 2


def _long_contexts(limits: StepLimits) -> Iterator[PaddedStep]:
    """Yield two warm-up steps, a decode and a chunk, with contexts so long that attention splits them and merges the
    parts."""
    yield PaddedStep(((1, limits.context),))
    yield PaddedStep(((min(2, limits.rows), limits.context),))


def _many_rows_of_an_adapter(limits: StepLimits) -> Iterator[PaddedStep]:
    """Yield a warm-up step whose rows all have one adapter, with as many rows as a step may have."""
    whole, rest = divmod(limits.rows, limits.context)
    lengths = [*([rest] if rest else []), *[limits.context] * whole][: limits.seqs]
    yield PaddedStep(tuple((length, length) for length in lengths), has_adapter=True)


def _filters(_: StepLimits) -> Iterator[PaddedStep]:
    yield PaddedStep(((1, 1),), params=SamplingParams(temperature=1.0, top_k=2, top_p=0.5))


def _logprobs(_: StepLimits) -> Iterator[PaddedStep]:
    for number in LOGPROBS:
        yield PaddedStep(((1, 1),), params=SamplingParams(logprobs=number))


Kind = Callable[[StepLimits], Iterator[PaddedStep]]
KINDS: Mapping[str, Kind] = {
    "sequences": _sequences,
    "long contexts": _long_contexts,
    "many rows of an adapter": _many_rows_of_an_adapter,
    "filters": _filters,
    "log-probabilities": _logprobs,
}


def warm_up(
    spec: ModelSpec,
    steps: Steps | Pipeline,
    sampler: SlotSampler,
    arena: Arena,
    limits: StepLimits,
    progress: Progress = lambda *_: None,
    kinds: Sequence[str] = tuple(KINDS),
) -> None:
    """Compile and load the kernels of steps before requests arrive, by the warm-up steps of `kinds`, names in KINDS.
    Calls `progress` with the numbers of steps run and of all. No request may be running."""
    started = time.perf_counter()
    todo = [step for kind in kinds for step in KINDS[kind](limits)]
    adapter_slot = _load_adapter(spec, arena)
    for done, step in enumerate(todo):
        progress("warming up", done, len(todo))
        _run(steps, sampler, step, adapter_slot if step.has_adapter else -1, arena.shape.block_size)
    arena.evict_adapter(NAME)
    if arena.pages.is_cuda:
        torch.cuda.synchronize(arena.pages.device)
    progress("warming up", len(todo), len(todo))
    log.info("warmed_up", steps=len(todo), seconds=round(time.perf_counter() - started, 2))


def _load_adapter(spec: ModelSpec, arena: Arena) -> int:
    """Load an adapter for warm-up, a DoRA of zeros and of rank 1 on the first layer, into pages that no request has
    yet, and return its adapter slot."""
    ranks = np.zeros((spec.layers, len(target_names(spec))), dtype=np.int32)
    ranks[0] = 1
    layout = plan_layout(ranks, target_widths(spec), arena.shape.elements, ranks > 0, arena.table.fp8)
    blob = Blob.of(torch.zeros(layout.num_pages, arena.shape.elements, dtype=arena.pages.dtype))
    arena.load_adapter(NAME, layout, blob, tuple(range(1, 1 + layout.num_pages)))
    arena.copies.finish()
    return arena.adapter_slot(NAME)


def _run(steps: Steps | Pipeline, sampler: SlotSampler, step: PaddedStep, adapter_slot: int, block_size: int) -> None:
    sampler.add(NAME, step.params, (0,), 1)
    try:
        batch = _padding(step, adapter_slot, block_size)
        output = steps.compute(batch, steps.find(batch))
        if output is not None:  # None in stages after the first
            sampler.start(output.logits, (NAME,))
    finally:
        sampler.remove(NAME)


def _padding(step: PaddedStep, adapter_slot: int, block_size: int) -> HostBatch:
    """Return the batch of a warm-up step, whose rows read the null page and write no page, and of which the first
    sequence is sampled from."""
    lengths, contexts = (np.array(numbers, dtype=np.int64) for numbers in zip(*step.chunks, strict=True))
    rows = int(lengths.sum())
    return HostBatch(
        token_ids=np.zeros(rows, dtype=np.int32),
        sampler_slots=np.zeros(rows, dtype=np.int32),
        positions=np.concatenate([np.arange(end - count, end) for count, end in zip(lengths, contexts, strict=True)]),
        kv_slots=np.full(rows, -1, dtype=np.int64),
        query_starts=np.append(0, np.cumsum(lengths)),
        contexts=contexts,
        block_tables=np.zeros((len(contexts), -(-int(contexts.max()) // block_size)), dtype=np.int32),
        segments=plan_segments(np.full(rows, adapter_slot, dtype=np.int32)),
        sample_rows=lengths[:1] - 1,
        sample_ids=(NAME,),
    )
