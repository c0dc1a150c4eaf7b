"""Chooses the device and the dtype in which a model is computed."""

from __future__ import annotations

import torch


def pick_device(name: str) -> torch.device:
    """Return the device that `engine.device` names; auto means CUDA where there is a device, else the CPU.

    Raises:
        ValueError: `name` is cuda, and torch finds no CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device is cuda, but torch sees no CUDA device")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that `engine.dtype` names; auto means bfloat16 where the device multiplies in it, and float32
    elsewhere."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if device.type == "cuda" or native else torch.float32
