"""Computes steps up to their logits: by replaying a captured step if one fits, otherwise kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import structlog
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.model.batch.rows import BatchInput, HostBatch
from engine.model.decode.decoder import Decoder, StepOutput
from engine.model.decode.pipeline import Pipeline
from engine.model.memory.arena import Arena, PageShape
from lora_kernels.backend import Backend

if TYPE_CHECKING:
    from engine.model.steps.graph_plan import GraphPlan
    from engine.model.steps.graphs import Rung, StepGraphs
    from lora_kernels.cpu.numba_backend import NumbaBackend

log = structlog.get_logger("graphs")

Forward = Callable[[BatchInput], StepOutput]
"""Computes a step, like `Decoder.run`."""


class Steps:
    """Computes steps up to their logits, by replaying a captured step of `graphs` where one fits, else by launching
    every kernel. `last_tokens` is int64 [max_seqs], on the device."""

    def __init__(self, forward: Forward, last_tokens: Tensor, graphs: StepGraphs | None = None) -> None:
        self._forward = forward
        self._last_tokens = last_tokens
        self._graphs = graphs

    @torch.inference_mode()
    def compute(self, batch: HostBatch, rung: Rung | None) -> StepOutput:
        """Compute a step. `rung` is the captured step that `find` returned for it, which is replayed; None means that
        every kernel is launched. The logits are in the order of `batch.sample_ids`. On a GPU the host does not wait."""
        if self._graphs is not None and rung is not None:
            return self._graphs.launch(batch, rung)
        return self._forward(batch.to_device(self._last_tokens))

    def find(self, batch: HostBatch) -> Rung | None:
        """Return the captured step that a step can be replayed by. None means that it has to be launched kernel by
        kernel."""
        return self._graphs.find(batch) if self._graphs is not None else None


def forward_over(decoder: Decoder, arena: Arena, backend: Backend) -> Forward:
    """Return the decoder's forward pass over the arena and backend. With the numba backend it plays tapes if the
    decoder can be recorded."""
    if backend.name.startswith("numba") and decoder.ranks.size == 1:  # a tape has no collective operations
        from engine.model.steps.tapes import (  # its import compiles kernels, as its backend's does
            TapedDecoder,
            can_tape,
        )

        if can_tape(decoder):
            return TapedDecoder(decoder, arena, cast("NumbaBackend", backend)).run
    return partial(decoder.run, arena=arena, backend=backend)


def make_steps(
    decoder: Decoder, arena: Arena, backend: Backend, last_tokens: Tensor, graphs: StepGraphs | None
) -> Steps | Pipeline:
    """Return what computes a rank's steps: a `Pipeline` if the model is split into several stages, else `Steps`."""
    if stage := decoder.ranks.stage:
        return Pipeline(decoder, arena, backend, last_tokens, stage)
    return Steps(forward_over(decoder, arena, backend), last_tokens, graphs)


def plan_graphs(
    config: EngineConfig,
    decoder: Decoder,
    shape: PageShape,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    max_model_len: int,
) -> GraphPlan | None:
    """Plan the CUDA graphs of steps. None means that kernels are launched one by one: on a CPU, in stages, if so
    configured, or if the host waits for experts' routing. Raises TypeError if a GPU's backend is not Triton."""
    if device.type != "cuda":
        return None
    # Imported here: a machine without CUDA may have no triton.
    from engine.model.steps.graph_plan import make_plan, may_capture

    if not may_capture(config):
        return None
    if decoder.waits_for_routing:
        log.warning("steps are not captured", reason="the host waits for the routing of quantised experts")
        return None
    return make_plan(config, decoder.spec, shape, dtype, backend, max_model_len)
