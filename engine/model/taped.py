"""Decode-only steps on a CPU: recorded once for every number of rows, then played as one call (numba_tape.py).

What CUDA graphs are to a GPU (graphs.py), but for padding: a tape is made by the first step of its size, which is
computed as ever. docs/kernels-cpu.md has the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from engine.model.arena import Arena
from engine.model.batch import BatchInput
from engine.model.decoder import Decoder, Step
from engine.model.lora import prepare_lora
from engine.model.rope import Angles
from lora_kernels.numba_backend import NumbaBackend
from lora_kernels.numba_gemm import PackedLinear
from lora_kernels.numba_tape import Tape, Workspace, record

MAX_TAPES = 256
"""110 KB each for 30 layers. Those that were not played for the longest time go first."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tape, what it begins from (embedded rows, angles, where K and V go), and where it ends."""

    tape: Tape
    x: Tensor
    angles: Angles
    kv_slots: Tensor
    logits: Tensor

    def replay(self, x: Tensor, step: Step, backend: NumbaBackend) -> Tensor:
        self.x.copy_(x)
        self.angles.cos.copy_(step.angles.cos)
        self.angles.sin.copy_(step.angles.sin)
        self.kv_slots.copy_(step.attention.kv_slots)
        backend.renew(self.tape, step.attention, step.lora.prepared)
        self.tape.play()
        return self.logits


class TapedDecoder:
    """A `Decoder` that plays the steps it can, over one arena and one backend: a tape knows their addresses."""

    def __init__(self, decoder: Decoder, arena: Arena, backend: NumbaBackend) -> None:
        self._decoder = decoder
        self._arena = arena
        self._backend = backend
        self._workspace = Workspace()
        self._tapes: dict[tuple[int, bool], Recorded] = {}

    def forward(self, batch: BatchInput) -> Tensor:
        """See `Forward`."""
        arena, backend = self._arena, self._backend
        lora = prepare_lora(backend, arena.flat, arena.table, batch.segments)
        if batch.sample_rows is not None or lora.scales is not None:
            return self._decoder.forward(batch, arena, backend, lora)
        x, step = self._decoder.embedded(batch), self._decoder.step(batch, arena, backend, lora)
        key = len(x), lora.prepared is not None
        recorded = self._tapes.pop(key, None)
        if recorded is not None:
            self._tapes[key] = recorded
            return recorded.replay(x, step, backend)
        if len(self._tapes) == MAX_TAPES:
            del self._tapes[next(iter(self._tapes))]
        self._tapes[key] = recorded = self._record(x, step)
        return recorded.logits

    def _record(self, x: Tensor, step: Step) -> Recorded:
        tape, logits = record(partial(self._decoder.compute, x, step, None), self._workspace)
        return Recorded(tape, x, step.angles, step.attention.kv_slots, self._workspace.let_go(logits))


def can_tape(decoder: Decoder) -> bool:
    """Whether all that a step does is kernels: linears of our own, and no norms of heads, which are torch's."""
    layers = decoder.layers
    linears = [decoder.head, *(part for one in layers for part in (one.qkv, one.o, one.gate_up, one.down))]
    return all(isinstance(linear, PackedLinear) for linear in linears) and all(one.head_norms is None for one in layers)
