"""Loads the kernels of an engine's device."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from engine.config import EngineConfig
from engine.model.memory.allocation import Progress, pick_device, pick_dtype
from engine.model.spec.config import ModelSpec
from lora_kernels.attention_choice import AttentionChoice, AttentionWish
from lora_kernels.backend import Backend
from lora_kernels.select import select_backend

log = structlog.get_logger("engine")


def load_cpu_kernels(config: EngineConfig, on_progress: Progress) -> None:
    """Compile the kernels of a CPU, or load them from their cache, before the model is known. A model that is
    loaded later in this process then finds them compiled. Does nothing for a GPU, whose kernels depend on the model's
    head size."""
    device = pick_device(config.device)
    if device.type == "cpu":
        dtype = pick_dtype(config.dtype, device)
        select_backend(device, dtype, lambda done, total: on_progress("compiling kernels", done, total))


def load_kernels(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, on_progress: Progress
) -> Backend:
    """Load the kernels for a model and log what computes attention on a GPU. Raises ValueError if the configuration
    asks for kernels that this machine does not have."""
    return select_backend(
        device,
        dtype,
        lambda done, total: on_progress("compiling kernels", done, total),
        spec.head_dim,
        Path(config.state_dir) if config.state_dir else None,
        attention_wish(config, spec),
        _log_attention,
        sums=config.tensor_parallel > 1,
        experts=spec.experts is not None,
    )


def attention_wish(config: EngineConfig, spec: ModelSpec) -> AttentionWish:
    """Returns what the configuration and the model ask of attention kernels, for the choice of kernels. Raises
    ValueError if FP8 KV is configured, and the model rotates only a part of each head."""
    if config.kv_dtype == "fp8" and spec.rotates_parts:
        raise ValueError(f"engine.kv_dtype fp8 does not work with {spec.model_type}, which rotates a part of each head")
    windows = frozenset(spec.windows)
    return AttentionWish(config.attention, config.kv_dtype == "fp8", windows, spec.attention_cap, spec.sinks)


def _log_attention(choice: AttentionChoice) -> None:
    log.info("attention", kernels=choice.name, reason=choice.reason)
