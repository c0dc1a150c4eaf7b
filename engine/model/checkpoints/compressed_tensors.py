"""Checkpoints of compressed-tensors, which llm-compressor writes, with weights in integers or FP8. Activations are not
quantised, except to 8 bits on a GPU, by rows, for checkpoints that say so. Source: the package compressed-tensors."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.checkpoints.fp8 import E4M3, fp8_layer
from engine.model.checkpoints.layers import (
    Json,
    Layer,
    grid_shapes,
    integer_coding,
    integer_form,
    integer_weight,
    order_of,
    parts_of,
    unpack,
)
from engine.model.checkpoints.stored import FLOATS, StoredTensors, WeightsError
from lora_kernels.quantized import Coding, QuantizedWeight

# Each of `config_groups` names targets (modules by name, class or regular expression). A module has `weight_scale` and
# `weight_packed` (int32 [out_features, in_features * bits / 32]) or `weight` (int8 or e4m3), if asymmetric
# `weight_zero_point`, and `weight_g_idx` with the group of each input where these are not neighbours.

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
UNQUANTISED = ("dense", "fakequant")
PARTS = (
    *("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
    *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
)
STRATEGIES = ("tensor", "channel", "group", "block")


class Scheme(NamedTuple):
    """How the weights of a group of modules are quantised: packed integers (`packed`), int8, or e4m3 (`is_float`).
    `size` inputs and `rows` outputs share a scale; 0 means all. With `codes_rows`, activations are in 8-bit integers,
    too."""

    packed: bool
    is_float: bool
    bits: int
    symmetric: bool
    size: int
    rows: int
    codes_rows: bool

    def size_for(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return (outputs, inputs): how many of each share a scale in a weight of `shape`, [out_features,
        in_features]."""
        return self.rows or shape[0], self.size or shape[1]


class CompressedTensors:
    """Finds the weights of a folder that are quantised with compressed-tensors. Raises WeightsError if `section`, the
    quantisation settings in config.json, asks for something that the engine cannot compute."""

    def __init__(self, section: Json, stored: StoredTensors) -> None:
        self._stored, self._ignore = stored, tuple(section.get("ignore") or ())
        _refuse(section)
        self._schemes: dict[str, Scheme] = {}
        for group in (section.get("config_groups") or {}).values():
            scheme = _scheme(group, group.get("format") or section.get("format") or "")
            if scheme:
                self._schemes |= dict.fromkeys(group.get("targets") or (), scheme)

    def find(self, module: str, shape: tuple[int, int]) -> Layer | None:
        kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
        target = _find_target(module, kind, tuple(self._schemes))
        if target is None or _find_target(module, kind, self._ignore) is not None:
            return None
        scheme = self._schemes[target]
        if scheme.is_float:
            is_stored = self._stored.dtype(f"{module}.weight") == E4M3
            return fp8_layer(self._stored, module, shape, scheme.size_for(shape)) if is_stored else None
        weight = f"{module}.weight_packed" if scheme.packed else f"{module}.weight"
        if self._stored.dtype(weight) not in ("I32", "I8"):
            return None  # a module that was left as it is, although it is a target
        return self._integers(module, weight, shape, scheme)

    def _integers(self, module: str, weight: str, shape: tuple[int, int], scheme: Scheme) -> Layer:
        rows, size = scheme.size_for(shape)
        coding = integer_coding(weight, shape[1], scheme.bits, size, scheme.symmetric)
        if scheme.codes_rows and coding.bits == 8 and coding.zero is not None and size == shape[1]:
            coding = replace(coding, by_rows=True)
        grid = shape[0] // rows, shape[1] // size
        if scheme.packed:
            self._stored.require(weight, ("I32",), (shape[0], _words(shape[1], coding.bits)))
        else:
            self._stored.require(weight, ("I8",), shape)
        self._stored.require(f"{module}.weight_scale", FLOATS, *grid_shapes(*grid))
        if not scheme.symmetric:
            zero = f"{module}.weight_zero_point"
            if self._stored.dtype(zero) == "I32":
                self._stored.require(zero, ("I32",), (_words(grid[0], coding.bits), grid[1]))
            else:
                self._stored.require(zero, ("I8",), *grid_shapes(*grid))
        if f"{module}.weight_g_idx" in self._stored:
            self._stored.require(f"{module}.weight_g_idx", ("I32", "I64"), (shape[1],))
        parts = parts_of(module, self._stored, PARTS)
        form = integer_form(scheme.bits, size, shape[1])
        return Layer(form, parts, coding, partial(self._read, module, weight, coding, shape, grid))

    def _read(
        self, module: str, weight: str, coding: Coding, shape: tuple[int, int], grid: tuple[int, int]
    ) -> QuantizedWeight:
        codes, scales = self._stored.read(weight), f"{module}.weight_scale"
        codes = unpack(codes, coding.bits)[:, : shape[1]] if codes.dtype == torch.int32 else _unsigned(codes, coding)
        zeros = None if coding.zero is not None else self._zeros(module, coding, grid).expand(shape[0], -1)
        scale = self._stored.read(scales).view(grid).expand(shape[0], -1)
        return integer_weight(scales, coding, codes, scale, zeros, self._order(module, shape[1] // grid[1]))

    def _zeros(self, module: str, coding: Coding, grid: tuple[int, int]) -> Tensor:
        """Return the zero points of a module's weight as unsigned numbers, of the shape `grid`. They may be packed
        along outputs."""
        zeros = self._stored.read(f"{module}.weight_zero_point")
        if zeros.dtype == torch.int32:
            return unpack(zeros.T, coding.bits)[:, : grid[0]].T
        return _unsigned(zeros, coding).view(grid)

    def _order(self, module: str, size: int) -> Tensor | None:
        name = f"{module}.weight_g_idx"
        if name not in self._stored:
            return None
        groups = self._stored.read(name)
        return None if (groups == -1).any() else order_of(name, groups, size)  # -1 means that it was never set


def _refuse(section: Json) -> None:
    """Raises WeightsError if the quantisation settings ask for a KV cache that is quantised but not in FP8, sparse
    weights, or transforms of activations."""
    cache = section.get("kv_cache_scheme")
    if cache and (cache.get("num_bits"), cache.get("type")) != (8, "float"):
        raise WeightsError("compressed-tensors' kv_cache_scheme is supported for FP8 only")
    if (section.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise WeightsError("compressed-tensors' sparse weights are not supported")
    if (section.get("transform_config") or {}).get("config_groups"):
        raise WeightsError("compressed-tensors' transforms of activations are not supported")


def _scheme(group: Json, form: str) -> Scheme | None:
    """Return how the weights of one of `config_groups`, stored in the format `form`, are quantised; None means that
    they are not. Raises WeightsError if the engine cannot read them."""
    weights = group.get("weights")
    if not weights or not group.get("targets") or form in UNQUANTISED:
        return None
    size, is_float = weights.get("group_size") or -1, weights.get("type", "int") == "float"
    strategy = weights.get("strategy") or (
        "group" if size > 0 else "channel" if weights.get("group_size") else "tensor"
    )
    bits = weights.get("num_bits", 8)
    if form not in FORMATS or strategy not in STRATEGIES[: 4 if is_float else 3] or (is_float and bits != 8):
        what = f"{form or 'unknown'!r} with {bits}-bit {weights.get('type', 'int')} weights per {strategy}"
        raise WeightsError(f"compressed-tensors' format {what} is not supported; supported: {', '.join(FORMATS)}")
    rows, columns = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size), "block": (0, 0)}[strategy]
    if strategy == "block":
        rows, columns = weights["block_structure"]
    inputs = group.get("input_activations") or {}
    codes_rows = (inputs.get("num_bits"), inputs.get("type", "int")) == (8, "int")
    return Scheme(form == FORMATS[0], is_float, bits, bool(weights.get("symmetric", True)), columns, rows, codes_rows)


def _find_target(module: str, kind: str, targets: tuple[str, ...]) -> str | None:
    """Return the one of a configuration's `targets` that names a module most closely: by its name, else by a regular
    expression, else by its class `kind`. None means that no target names it."""
    if module in targets:
        return module
    patterns = (target for target in targets if target.startswith("re:") and re.match(target[3:], module))
    return next(patterns, kind if kind in targets else None)


def _unsigned(numbers: Tensor, coding: Coding) -> Tensor:
    """Return signed codes (int8) as the unsigned codes (uint8) of `coding`, in which the middle code stands for 0."""
    return (numbers + (1 << coding.bits - 1)).view(torch.uint8) if coding.bits < 8 else numbers.view(torch.uint8) ^ 128


def _words(count: int, bits: int) -> int:
    """Return how many int32 hold `count` packed numbers of `bits` bits."""
    return -(-count * bits // 32)
