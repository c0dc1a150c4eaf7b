"""Computes steps: by replaying a captured step if one fits, otherwise kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.model.arena import Arena, PageShape
from engine.model.batch import BatchInput, HostBatch
from engine.model.decoder import Decoder
from engine.model.masks import TokenMasks
from engine.model.sampling import Sample, SlotSampler
from engine.model.spec import ModelSpec
from lora_kernels.backend import Backend

if TYPE_CHECKING:
    from engine.model.graph_plan import GraphPlan
    from engine.model.graphs import StepGraphs
    from lora_kernels.cpu.numba_backend import NumbaBackend

Masks = Callable[[Sequence[str]], TokenMasks | None]


Forward = Callable[[BatchInput], Tensor]
"""Computes the logits of a step's sampled rows, like `Decoder.forward`. They are valid until the next step is
computed."""


class Steps:
    """Computes steps, from gathered rows to tokens.

    Args:
        graphs: the captured steps. None means that `forward` launches every step.
    """

    def __init__(self, forward: Forward, sampler: SlotSampler, graphs: StepGraphs | None = None) -> None:
        self._forward = forward
        self._sampler = sampler
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, batch: HostBatch, masks: Masks | None = None) -> Sample | None:
        """Computes a step's logits, by replaying a captured step if it fits, and samples from them. On a GPU the host
        does not wait. Returns None if no row is sampled from.

        Args:
            masks: returns the tokens that grammars allow in the sampled rows. It is called while a GPU computes their
                logits.
        """
        if self._graphs is not None and self._graphs.fits(batch):
            logits = self._graphs.launch(batch)
        else:
            logits = self._forward(batch.to_device(self._sampler.last_tokens))
        if not batch.sample_ids:
            return None
        return self._sampler.start(logits, batch.sample_ids, masks(batch.sample_ids) if masks else None)


def forward_over(decoder: Decoder, arena: Arena, backend: Backend) -> Forward:
    """Returns the decoder's forward pass over the arena and backend. With the numba backend it plays tapes if the
    decoder can be recorded."""
    if backend.name.startswith("numba"):
        from engine.model.taped import TapedDecoder, can_tape  # its import compiles kernels, as its backend's does

        if can_tape(decoder):
            return TapedDecoder(decoder, arena, cast("NumbaBackend", backend)).forward
    return partial(decoder.forward, arena=arena, backend=backend)


def plan_graphs(
    config: EngineConfig,
    spec: ModelSpec,
    shape: PageShape,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    max_model_len: int,
) -> GraphPlan | None:
    """Plans the CUDA graphs of decode-only steps. None means that steps are launched kernel by kernel: on a CPU, or if
    so configured. Raises TypeError if a GPU's backend is not Triton."""
    if not config.graphs or device.type != "cuda":
        return None
    # Imported here: a machine without CUDA may have no triton.
    from engine.model.graph_plan import make_plan

    return make_plan(config, spec, shape, dtype, backend, max_model_len)
