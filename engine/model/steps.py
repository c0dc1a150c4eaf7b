"""Computes a step: a captured one where it fits, else kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

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

Masks = Callable[[Sequence[str]], TokenMasks | None]


class Forward(Protocol):
    """What of a `Decoder` a step needs."""

    def forward(self, batch: BatchInput, arena: Arena, backend: Any) -> Tensor: ...


class Steps:
    """From gathered rows to tokens.

    Args:
        graphs: None: every step is launched kernel by kernel.
    """

    def __init__(
        self,
        decoder: Forward,
        arena: Arena,
        backend: Backend,
        sampler: SlotSampler,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._decoder = decoder
        self._arena = arena
        self._backend = backend
        self._sampler = sampler
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, batch: HostBatch, masks: Masks | None = None) -> Sample | None:
        """Begins a step; on a GPU nobody waits for it. None where no row is sampled from.

        Args:
            masks: says what grammars allow the rows that are sampled from, asked while a GPU computes their logits; no
                captured step has a place for it.
        """
        if self._graphs is not None and masks is None and self._graphs.fits(batch):
            return self._graphs.launch(batch)
        rows = batch.to_device(self._sampler.last_tokens)
        logits = self._decoder.forward(rows, self._arena, self._backend)
        if not batch.sample_ids:
            return None
        return self._sampler.start(logits, batch.sample_ids, masks(batch.sample_ids) if masks else None)


def taped(decoder: Decoder, backend: Backend) -> Forward:
    """The decoder, with tapes where its steps can be recorded."""
    if backend.name == "torch" or not find_spec("numba"):
        return decoder
    from engine.model.taped import TapedDecoder, can_tape  # few platforms have no numba

    return TapedDecoder(decoder) if can_tape(decoder, backend) else decoder


def plan_graphs(
    config: EngineConfig,
    spec: ModelSpec,
    shape: PageShape,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    max_model_len: int,
) -> GraphPlan | None:
    """None where every step is launched kernel by kernel: on a CPU, or because the configuration says so."""
    if not config.graphs or device.type != "cuda":
        return None
    # Imported here: a machine without CUDA may have no triton.
    from engine.model.graph_plan import make_plan

    return make_plan(config, spec, shape, dtype, backend, max_model_len)
