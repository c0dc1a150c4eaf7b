"""Writes LoRA adapters as llama.cpp's GGUF files, as its converter makes them of PEFT's folders."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from engine.model.gguf.names import gguf_name

KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
VALUES = {"general.type": "adapter", "adapter.type": "lora"}

Tensors = dict[str, np.ndarray]


def ggml_rows(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return rows of q or k in the order of llama.cpp's converter: the two halves of each head interleaved."""
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def gguf_tensors(folder: Path, head_dim: int) -> Tensors:
    """Return the tensors of PEFT's folder by their names in GGUF files of Llamas, in fp32."""
    found = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        parts = KEY.fullmatch(key)
        turned = parts["side"] == "B" and re.search(r"[qk]_proj", parts["module"])
        rows = ggml_rows(tensor, head_dim) if turned else tensor
        found[f"{gguf_name(parts['module'] + '.weight')}.lora_{parts['side'].lower()}"] = rows.float().numpy()
    return found


def write_tensors(
    file: Path,
    tensors: Mapping[str, np.ndarray],
    alpha: float,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    arch: str = "llama",
    values: Mapping[str, str | list[int]] = VALUES,
) -> Path:
    """Write tensors to a GGUF file in type `kind`, or in F16 where their rows have no whole blocks of it."""
    writer = gguf.GGUFWriter(file, arch)
    for key, value in values.items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, tensor in tensors.items():
        inputs = gguf.GGML_QUANT_SIZES[kind][0]
        own = kind if tensor.shape[-1] % inputs == 0 else gguf.GGMLQuantizationType.F16
        data = gguf.quants.quantize(np.ascontiguousarray(tensor, np.float32), own)
        writer.add_tensor(name, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_gguf(folder: Path, file: Path, head_dim: int = 8) -> Path:
    """Write the adapter of PEFT's folder to a GGUF file."""
    config = json.loads((folder / "adapter_config.json").read_text())
    return write_tensors(file, gguf_tensors(folder, head_dim), config["lora_alpha"])
