"""Reads LoRA adapters from GGUF files of llama.cpp into what PEFT's folders hold: settings, and the bytes of a
safetensors file. Source: convert_lora_to_gguf.py and llama-adapter.cpp."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.model.adapters.peft.settings import AdapterError, PeftSettings, check_invocation, settings_of_ranks
from engine.model.gguf.blocks import BLOCK_TYPES, read_blocks
from engine.model.gguf.header import ARCHITECTURES, Header, StoredTensor, read_header
from engine.model.gguf.names import hub_name
from engine.model.weights.gguf import FLOATS, is_turned, turned_back

# For each adapted matrix a file has `blk.N.attn_q.weight.lora_a` [rank, in_features] and `.lora_b` [out_features,
# rank]. Their product is multiplied by `adapter.lora.alpha` / rank or, where alpha is 0, by nothing.

MAX_HEADER_BYTES = 16 << 20
"""Maximum size in bytes of the header of an adapter's weights file."""
REQUIRED = {"general.type": "adapter", "adapter.type": "lora"}
ALPHA, INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
KEY = re.compile(r"(?P<base>.+)\.lora_(?P<side>[ab])")
SIDES = {"a": "A", "b": "B"}
LARGEST_ALPHA = 1e9
FLOAT32_BYTES = 4


class GgufBase(NamedTuple):
    """The facts about the base model that decide how an adapter's GGUF file is read: the `model_type` of the model's
    config.json, and the size of its heads."""

    model_type: str = ""
    head_dim: int = 0


def from_gguf(data: memoryview, name: str, base: GgufBase, max_bytes: int) -> tuple[PeftSettings, memoryview]:
    """Return the settings of an adapter in GGUF, and its tensors in fp32, at most `max_bytes`, as a safetensors file
    with PEFT's names and Hugging Face's order of rows. Raises AdapterError, which names `name`, if it cannot be
    served."""
    header = _header(data[:MAX_HEADER_BYTES], name)
    _check_values(header, name, base)
    num_bytes = sum(prod(stored.shape) for stored in header.tensors.values()) * FLOAT32_BYTES
    if num_bytes > max_bytes:
        raise AdapterError(f"{name} holds {num_bytes} bytes in fp32, and no adapter of this model has over {max_bytes}")
    parts = {key: _hub_key(key, name) for key in header.tensors}
    settings = settings_of_ranks(_ranks(header.tensors, parts, name), _alpha(header, name))
    settings = replace(settings, invocation=_invocation(header, name))
    tensors: dict[str, Tensor] = {}
    for key, (module, side) in parts.items():
        tensor = _read(data, header.tensors[key], f"{key!r} of {name}")
        is_b_turned = side == "B" and is_turned(module, base.model_type)
        tensors[f"base_model.model.{module}.lora_{side}.weight"] = _turned(tensor, base) if is_b_turned else tensor
    return settings, _safetensors(tensors)


def _header(data: memoryview, name: str) -> Header:
    try:
        return read_header(BytesIO(data), len(data), name)
    except ValueError as error:
        raise AdapterError(f"{error}; copy it again") from error


def _turned(rows: Tensor, base: GgufBase) -> Tensor:
    """Return the rows of B of a q or k projection in Hugging Face's order, given them in llama.cpp's. Rows that are not
    whole heads, which no model has, are left as they are."""
    return rows[turned_back(len(rows), base.head_dim)] if len(rows) % base.head_dim == 0 else rows


def _check_values(header: Header, name: str, base: GgufBase) -> None:
    for key, value in REQUIRED.items():
        if header.values.get(key) != value:
            raise AdapterError(f"{name} is no LoRA adapter: {key} is {_short(header.values.get(key))}, not {value!r}")
    found, needed = header.values.get("general.architecture"), ARCHITECTURES.get(base.model_type)
    if needed is None:
        raise AdapterError(
            f"{name}: adapters of {base.model_type} models are not read from GGUF files; use PEFT's folder"
        )
    if found != needed:
        raise AdapterError(f"{name} is an adapter of architecture {_short(found)}, and this model is {needed!r}")
    if not header.tensors:
        raise AdapterError(f"{name} has no tensors")


def _alpha(header: Header, name: str) -> float:
    alpha = header.values.get(ALPHA, 0.0)
    if not isinstance(alpha, int | float) or not abs(alpha) <= LARGEST_ALPHA:
        raise AdapterError(f"{name}: {ALPHA} must be a number, not {_short(alpha)}")
    return float(alpha)


def _invocation(header: Header, name: str) -> tuple[int, ...]:
    """Return, from the header of the GGUF file `name`, the invocation tokens of an activated LoRA, which takes effect
    only from these tokens on. Empty means that the adapter is no activated LoRA."""
    if INVOCATION not in header.values:
        return ()
    return check_invocation(header.values[INVOCATION], f"{name}: {INVOCATION}")


def _hub_key(key: str, name: str) -> tuple[str, str]:
    """Split the name `key` of a tensor in an adapter's GGUF file into Hugging Face's path of its module and its side, A
    or B. Raises AdapterError, which names the file, for any other tensor."""
    found = KEY.fullmatch(key)
    module = hub_name(found["base"]) if found else ""
    if found is None or module == found["base"]:
        raise AdapterError(f"{name} has {_short(key)}: only lora_a and lora_b of projections are supported")
    return module.removesuffix(".weight"), SIDES[found["side"]]


def _ranks(tensors: Mapping[str, StoredTensor], parts: Mapping[str, tuple[str, str]], name: str) -> dict[str, int]:
    """Return the LoRA rank of each module in an adapter's GGUF file. Raises AdapterError if a module's A and B have not
    the same rank."""
    ranks: dict[str, int] = {}
    for key, (module, side) in parts.items():
        shape = _shape(tensors[key])
        if len(shape) != 2 or not all(shape):
            raise AdapterError(f"{_short(key)} of {name} is {list(shape)}: it must be a matrix")
        rank = shape[0] if side == "A" else shape[1]
        if ranks.setdefault(module, rank) != rank:
            raise AdapterError(f"{_short(key)} of {name} has rank {rank}, and its partner {ranks[module]}")
    return ranks


def _shape(stored: StoredTensor) -> tuple[int, ...]:
    """Return the shape of a tensor as a matrix: ggml leaves out a first dimension of 1."""
    return (1, *stored.shape) if len(stored.shape) == 1 else stored.shape


def _read(data: memoryview, stored: StoredTensor, what: str) -> Tensor:
    """Return a tensor of an adapter's GGUF file in fp32. Raises AdapterError, which describes the tensor by `what`, if
    the file ends before the tensor does, or its type is not supported."""
    shape = _shape(stored)
    if dtype := FLOATS.get(stored.kind):
        part = _bytes(data, stored.place, prod(shape) * dtype.itemsize, what)
        return torch.from_numpy(part).view(dtype).view(shape).float()
    kind = BLOCK_TYPES.get(stored.kind)
    if kind is None or shape[1] % kind.inputs:
        raise AdapterError(f"{what} is of type {stored.kind} of ggml, which is not supported; convert it to F16")
    part = _bytes(data, stored.place, prod(shape) // kind.inputs * kind.num_bytes, what)
    return read_blocks(torch.from_numpy(part).view(-1, kind.num_bytes), kind, (shape[0], shape[1])).dequantize()


def _bytes(data: memoryview, place: int, size: int, what: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return a copy of `size` bytes of the file from byte `place` on. The copy is aligned for every dtype. Raises
    AdapterError, which begins with `what`, if the file ends earlier."""
    if place + size > len(data):
        raise AdapterError(f"{what} lies beyond the end of the file: it was cut short; copy it again")
    return np.frombuffer(data, np.uint8, size, place).copy()


def _safetensors(tensors: Mapping[str, Tensor]) -> memoryview:
    """Return the bytes of a safetensors file that holds these fp32 tensors. Its numbers are aligned to 8 bytes."""
    ends = list(accumulate((tensor.nbytes for tensor in tensors.values()), initial=0))
    entries = {
        name: {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        for (name, tensor), offsets in zip(tensors.items(), pairwise(ends), strict=True)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    first = 8 + len(header)
    memory = np.empty(first + ends[-1], np.uint8)
    memory[:first] = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    for tensor, (start, end) in zip(tensors.values(), pairwise(ends), strict=True):
        memory[first + start : first + end] = tensor.contiguous().view(-1).numpy().view(np.uint8)
    return memory.data.toreadonly()


def _short(value: object) -> str:
    return repr(value)[:120]
