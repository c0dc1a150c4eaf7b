"""Records decode-only steps on a CPU, for every number of rows with and without adapters, and plays each as one call,
as CUDA graphs do on a GPU (steps/graphs.py). docs/kernels-cpu.md has the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.model.batch.rows import BatchInput
from engine.model.decode.decoder import Decoder, Step, StepOutput
from engine.model.layers.feed_forward import Experts
from engine.model.layers.lora import LoraOfExperts, prepare_lora
from engine.model.memory.arena import Arena
from engine.model.spec.rope import Angles
from lora_kernels.cpu.numba_backend import NumbaBackend
from lora_kernels.cpu.numba_dense import DenseLinear
from lora_kernels.cpu.numba_gemm import PackedLinear
from lora_kernels.cpu.numba_grouped import PackedExperts
from lora_kernels.cpu.numba_tape import Tape, Workspace, record
from lora_kernels.cpu.quantized_linear import QuantizedLinear
from lora_kernels.grouped import GroupedLinear
from lora_kernels.linear import Linear

MAX_TAPES = 256
"""Maximum number of tapes, of 110 KB each for 30 layers. The least recently played tapes are dropped first."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recording of a decode-only step on a CPU: its tape, its inputs (embedded rows, angles, KV slots, and what
    LoRA on experts is prepared from), and its outputs: the head's, and in `x` the residual stream."""

    tape: Tape
    x: Tensor
    angles: tuple[Angles, ...]
    kv_slots: Tensor
    of_experts: LoraOfExperts | None
    outputs: Tensor

    def replay(self, x: Tensor, step: Step, backend: NumbaBackend) -> None:
        self.x.copy_(x)
        for recorded, angles in zip(self.angles, step.angles, strict=True):
            recorded.cos.copy_(angles.cos)
            recorded.sin.copy_(angles.sin)
        self.kv_slots.copy_(step.attention.kv_slots)
        if self.of_experts is not None and step.lora.of_experts is not None:
            self.of_experts.adapters.slots.copy_(step.lora.of_experts.adapters.slots)
            self.of_experts.adapters.order.copy_(step.lora.of_experts.adapters.order)
        backend.renew(self.tape, step.attention, step.lora.prepared)
        self.tape.play()


class TapedDecoder:
    """A `Decoder` on a CPU that plays recorded decode-only steps, for one arena and one backend, whose addresses are in
    the tapes."""

    def __init__(self, decoder: Decoder, arena: Arena, backend: NumbaBackend) -> None:
        self._decoder = decoder
        self._arena = arena
        self._backend = backend
        self._workspace = Workspace()
        self._tapes: dict[tuple[int, bool, bool, int], Recorded] = {}

    def run(self, batch: BatchInput) -> StepOutput:
        """Compute a step like `Decoder.run`; its output is valid until the next call. Decode-only steps without DoRA or
        trained tokens are played from tapes, or recorded for their number of rows."""
        arena, backend = self._arena, self._backend
        lora = prepare_lora(backend, arena.flat, arena.table, batch.segments, len(batch.token_ids))
        if batch.sample_rows is not None or lora.scales is not None or arena.table.replaces_tokens(batch.segments):
            return self._decoder.run(batch, arena, backend, lora)
        step = self._decoder.step(batch, arena, backend, lora)
        x = self._decoder.embedded(batch, step)
        threads = torch.get_num_threads()  # for each of which experts' LoRA has memory on the tape
        key = len(x), lora.prepared is not None, lora.of_experts is not None, threads
        recorded = self._tapes.pop(key, None)
        if recorded is not None:
            self._tapes[key] = recorded
            recorded.replay(x, step, backend)
        else:
            if len(self._tapes) == MAX_TAPES:
                del self._tapes[next(iter(self._tapes))]
            self._tapes[key] = recorded = self._record(x, step)
        return StepOutput(self._decoder.head.finish(recorded.outputs), recorded.x)

    def _record(self, x: Tensor, step: Step) -> Recorded:
        tape, outputs = record(partial(self._decoder.outputs, x, step, None), self._workspace)
        outputs = self._workspace.let_go(outputs)
        return Recorded(tape, x, step.angles, step.attention.kv_slots, step.lora.of_experts, outputs)


def can_tape(decoder: Decoder) -> bool:
    """Return whether decode-only steps can be recorded, because they run only kernels of this project: all linears are
    packed, none reorders its inputs, and no layer has a shared MLP beside experts. torch would do the latter two."""
    linears: list[Linear | GroupedLinear] = [decoder.head.linear]
    for layer in decoder.layers:
        feed_forward = layer.feed_forward
        if isinstance(feed_forward, Experts) and feed_forward.shared is not None:
            return False
        linears += [layer.qkv, layer.o, *feed_forward.linears]
    return all(map(_is_packed, linears))


def _is_packed(linear: Linear | GroupedLinear) -> bool:
    if isinstance(linear, QuantizedLinear):
        return not linear.reorders
    return isinstance(linear, PackedLinear | DenseLinear | PackedExperts)
