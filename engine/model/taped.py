"""Decode-only steps on a CPU: recorded once for every number of rows, then played as one call (numba_tape.py).

What CUDA graphs are to a GPU (graphs.py), but for padding: a tape is made by the first step of its size, which is
computed as ever. docs/kernels-cpu.md has the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.model.arena import Arena
from engine.model.batch import BatchInput
from engine.model.decoder import Decoder, Step
from engine.model.lora import prepare_lora
from lora_kernels.backend import Backend
from lora_kernels.numba_backend import NumbaBackend
from lora_kernels.numba_gemm import PackedLinear
from lora_kernels.numba_tape import Tape, Workspace

MAX_TAPES = 128
"""A hundred kilobytes each."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A tape, and where it begins and ends. `x`: the embedded rows; `step`: the one it was recorded with."""

    tape: Tape
    x: Tensor
    step: Step
    logits: Tensor

    def replay(self, x: Tensor, step: Step, backend: NumbaBackend) -> Tensor:
        """The logits, until the next step is computed."""
        self.x.copy_(x)
        self.step.angles.cos.copy_(step.angles.cos)
        self.step.angles.sin.copy_(step.angles.sin)
        self.step.attention.kv_slots.copy_(step.attention.kv_slots)
        backend.renew(self.tape, step.attention, step.lora.prepared)
        self.tape.play()
        return self.logits


class TapedDecoder:
    """A `Decoder` that plays the steps it can. Logits of such a step last until the next one is computed."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._workspace = Workspace()
        self._tapes: dict[tuple[int, bool], Recorded] = {}

    def forward(self, batch: BatchInput, arena: Arena, backend: NumbaBackend) -> Tensor:
        """See `Decoder.forward`."""
        lora = prepare_lora(backend, arena.flat, arena.table, batch.segments)
        if not _is_decoding(batch) or lora.scales is not None:
            return self._decoder.forward(batch, arena, backend, lora)
        x, step = self._decoder.embedded(batch), self._decoder.step(batch, arena, backend, lora)
        key = len(x), lora.prepared is not None
        if key in self._tapes:
            return self._tapes[key].replay(x, step, backend)
        if len(self._tapes) == MAX_TAPES:
            self._tapes.pop(next(iter(self._tapes)))
        self._tapes[key] = recorded = self._record(x, step)
        return recorded.logits

    def _record(self, x: Tensor, step: Step) -> Recorded:
        tape = Tape(self._workspace)
        with tape.recording():
            logits = self._decoder.compute(x, step, None)
        return Recorded(tape, x, step, self._workspace.let_go(logits))


def can_tape(decoder: Decoder, backend: Backend) -> bool:
    """Whether all that a step does is kernels: linears of our own, and no norms of heads, which are torch's."""
    layers = decoder.layers
    linears = [decoder.head, *(part for one in layers for part in (one.qkv, one.o, one.gate_up, one.down))]
    is_ours = isinstance(backend, NumbaBackend) and all(isinstance(linear, PackedLinear) for linear in linears)
    return is_ours and all(layer.head_norms is None for layer in layers)


def _is_decoding(batch: BatchInput) -> bool:
    """Whether every row is a request's newest token, and is sampled from."""
    return batch.attention.num_decodes == len(batch.sample_ids) == len(batch.token_ids)
