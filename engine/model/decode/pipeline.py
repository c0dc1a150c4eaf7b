"""Computes steps with the other stages of a pipeline. The first stage embeds rows and gets them back for the final norm
and the head. Micro-batches of a step let stages work at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.model.batch.rows import BatchInput, HostBatch
from engine.model.decode.decoder import Decoder, StepOutput
from engine.model.layers.lora import prepare_lora
from engine.model.memory.arena import Arena
from engine.model.ranks.collectives import Stage
from engine.sizing import micro_batches
from lora_kernels.backend import Backend
from lora_kernels.pinned import upload
from lora_kernels.segments import plan_segments
from lora_kernels.tokens import TrainedTokens, prepare_tokens

WEIGHT_ROWS = {"cpu": 25, "cuda": 256}
"""Rows that a device computes in the time in which it reads the weights: measured on two CPU cores, and for GPUs an
assumption, the ratio of an H100's arithmetic to its bandwidth."""


class Pipeline:
    """Computes this rank's stage of each step of a model that is split into pipeline stages, in place of `Steps` and
    kernel by kernel.

    Args:
        decoder: this rank's part of the model.
        last_tokens: as for `Steps`.
        stage: the rank's stage.
    """

    def __init__(self, decoder: Decoder, arena: Arena, backend: Backend, last_tokens: Tensor, stage: Stage) -> None:
        self._decoder = decoder
        self._arena = arena
        self._backend = backend
        self._last_tokens = last_tokens
        self._stage = stage
        self._hidden_size = decoder.spec.hidden_size

    def find(self, batch: HostBatch) -> None:
        """Return None, because no step is captured where a model is split into pipeline stages."""

    @torch.inference_mode()
    def compute(self, batch: HostBatch, rung: object) -> StepOutput | None:
        """Compute this stage's part of a step, which all ranks of all stages compute at the same time. Return its
        output in the first stage, and None in the others."""
        rows = self._arena.pages.new_empty(batch.num_rows, self._hidden_size)
        cuts = cut_rows(batch, micro_batches(batch.num_rows, self._stage.count, WEIGHT_ROWS[rows.device.type]))
        parts = [rows[first:end] for first, end in pairwise(cuts)]
        for x, part in zip(parts, split_batch(batch, cuts), strict=True):
            self._pass(x, part.to_device(self._last_tokens))
        if self._stage.number:
            self._stage.after.finish()
            return None
        for x in parts:
            self._stage.before.receive(x)
        self._stage.after.finish()
        tokens = prepare_tokens(self._arena.flat, self._arena.table, batch.segments)
        return StepOutput(self._logits(rows, batch, tokens), rows, tokens)

    def _pass(self, x: Tensor, batch: BatchInput) -> None:
        """Embed or receive the rows `x` of a micro-batch, run this stage's layers over them, and send them on."""
        arena = self._arena
        lora = prepare_lora(self._backend, arena.flat, arena.table, batch.segments, len(batch.token_ids))
        step = self._decoder.step(batch, arena, self._backend, lora)
        if self._stage.number:
            self._stage.before.receive(x)
        else:
            self._decoder.embedded(batch, step, x)
        self._decoder.advance(x, step)
        self._stage.after.send(x)

    def _logits(self, rows: Tensor, batch: HostBatch, tokens: TrainedTokens | None) -> Tensor:
        if not batch.sample_ids:
            return rows.new_empty(0, self._decoder.spec.vocab_size)
        sampled = rows[upload(batch.sample_rows, rows.device)]
        return self._decoder.head.logits(sampled, self._backend, tokens, batch.sample_rows)


def cut_rows(batch: HostBatch, number: int) -> list[int]:
    """Return the rows, from 0 to all, at which a step is cut into at most `number` micro-batches of about the same
    size."""
    # A chunk is not cut after its first row, because kernels expect parts of one row before longer ones.
    cuts = np.linspace(0, batch.num_rows, number + 1).round().astype(np.int64)
    starts = batch.query_starts[np.searchsorted(batch.query_starts, cuts, "left") - 1]
    is_first = (cuts - starts == 1) & ~np.isin(cuts, batch.query_starts)
    return sorted({*np.where(is_first, starts, cuts).tolist(), 0, batch.num_rows})


def split_batch(batch: HostBatch, cuts: Sequence[int]) -> Iterator[HostBatch]:
    """Yield the micro-batches of a step: each has the rows from one of `cuts` to before the next, and samples no rows,
    because the first stage samples from the whole step."""
    slots = batch.segments.slots_of_rows(batch.num_rows)
    for first, end in pairwise(cuts):
        one = np.searchsorted(batch.query_starts, first, "right") - 1
        last = np.searchsorted(batch.query_starts, end, "left")
        seqs, rows, ends = slice(one, last), slice(first, end), batch.query_starts[one + 1 : last + 1]
        yield HostBatch(
            token_ids=batch.token_ids[rows],
            sampler_slots=batch.sampler_slots[rows],
            positions=batch.positions[rows],
            kv_slots=batch.kv_slots[rows],
            query_starts=batch.query_starts[one : last + 1].clip(first, end) - first,
            contexts=batch.contexts[seqs] - (ends - ends.clip(max=end)),
            block_tables=batch.block_tables[seqs],
            segments=plan_segments(slots[rows]),
            sample_rows=batch.sample_rows[:0],
            sample_ids=(),
        )
