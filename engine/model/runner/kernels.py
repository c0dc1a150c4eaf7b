"""Loads the kernels of an engine's device."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.model.memory.allocation import Progress, pick_device, pick_dtype
from engine.model.spec.config import ModelSpec
from lora_kernels.backend import Backend
from lora_kernels.select import select_backend


def load_cpu_kernels(config: EngineConfig, on_progress: Progress) -> None:
    """Compile the kernels of a CPU, or load them from their cache, before the model is known. Does nothing for a GPU,
    whose kernels depend on the model's head size."""
    device = pick_device(config.device)
    if device.type == "cpu":
        dtype = pick_dtype(config.dtype, device)
        select_backend(device, dtype, lambda done, total: on_progress("compiling kernels", done, total))


def load_kernels(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, on_progress: Progress
) -> Backend:
    """Load the kernels for a model. Raises ValueError if the machine has no kernels for its GPU, or the model cannot
    have the configured KV (`require_kv`)."""
    require_kv(config, spec)
    return select_backend(
        device,
        dtype,
        lambda done, total: on_progress("compiling kernels", done, total),
        spec.head_dim,
        Path(config.state_dir) if config.state_dir else None,
        config.kv_dtype == "fp8",
        sums=config.tensor_parallel > 1,
        experts=spec.experts is not None,
    )


def require_kv(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ValueError if FP8 KV is configured, and the model rotates only a part of each head."""
    if config.kv_dtype == "fp8" and spec.rotates_parts:
        raise ValueError(f"engine.kv_dtype fp8 does not work with {spec.model_type}, which rotates a part of each head")
