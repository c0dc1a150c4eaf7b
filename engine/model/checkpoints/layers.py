"""What families of quantised checkpoints share: linear layers of `scale * (code - zero point)`, unsigned numbers of 4
or 8 bits, where neighbouring inputs, or all, share scale and zero point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.model.checkpoints.stored import Shape, StoredTensors, WeightsError
from lora_kernels.quantized import GROUPS, AnyCoding, Coding, QuantizedWeight, Weight, find_coding, unpack_halves

Json = Mapping[str, Any]
PRECISION = 2.0**-10
"""Largest relative error with which fp16 may hold a scale; that of bf16 is 2^-9."""


class Layer(NamedTuple):
    """How the weight of a linear layer is stored: its format in the family (empty: part of a larger tensor), the names
    of its tensors, its coding in memory (None: a plain tensor), and what reads it."""

    form: str
    parts: set[str]
    coding: AnyCoding | None
    read: Callable[[], Weight]


class Family(Protocol):
    """Protocol of a family of quantised checkpoint formats, such as GPTQ, that finds the weights of a folder."""

    def find(self, module: str, shape: tuple[int, int]) -> Layer | None:
        """Return how the quantised weight of a module, [out_features, in_features], is stored and read, or None if it
        is not quantised. Raises WeightsError, which names a tensor, if one is missing or does not fit."""


def parts_of(module: str, stored: StoredTensors, names: tuple[str, ...]) -> set[str]:
    """Return the full names of those tensors of a module, among the suffixes `names`, that the folder has."""
    return {name for part in names if (name := f"{module}.{part}") in stored}


def integer_form(bits: int, size: int, width: int) -> str:
    """Return the name of the format of integer weights of `bits` whose `width` inputs share scales in groups of `size`:
    `4bit-g128`, or `4bit` if all inputs are one group."""
    return f"{bits}bit" if size == width else f"{bits}bit-g{size}"


def integer_coding(name: str, width: int, bits: int, size: int, symmetric: bool) -> Coding:
    """Return the coding of weights that share scales in groups of `size` inputs; scales of larger groups are repeated.
    `symmetric` means that the zero point is the middle code. Raises WeightsError if they cannot be coded."""
    if bits not in (4, 8):
        raise WeightsError(f"tensor {name} has weights of {bits} bits: 4 and 8 can be read")
    wide = Coding(bits, GROUPS[-1], 1 << (bits - 1) if symmetric else None, in_scales=not symmetric)
    coding = find_coding(wide, size) if size > 0 and width % size == 0 else None
    if coding is None:
        raise WeightsError(f"tensor {name} has {width} inputs in groups of {size}: {GROUPS[0]} must divide groups")
    return coding


def integer_weight(
    name: str, coding: Coding, codes: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None = None
) -> QuantizedWeight:
    """Build a quantised weight from `codes`, uint8 [out_features, in_features] in the order of inputs. Raises
    WeightsError, which names `name`, if fp16 cannot hold the scales.

    Args:
        scales, zeros: [out_features, groups]. No `zeros` means that the coding has one code for zero.
        order: see `order_of`. None means sorted already.
    """
    repeats = codes.shape[1] // coding.group // scales.shape[1]
    halves = _halves(name, scales).repeat_interleave(repeats, dim=1)
    minima = None if zeros is None else -zeros.half().repeat_interleave(repeats, dim=1)
    columns = codes if order is None else codes.index_select(1, order)
    return QuantizedWeight(coding, columns.contiguous(), halves, minima, order=order)


def _halves(name: str, scales: Tensor) -> Tensor:
    exact = scales.float()
    halves = exact.half()
    if not ((halves.float() - exact).abs() <= exact.abs() * PRECISION).all():
        raise WeightsError(f"tensor {name} has scales too small or large for fp16: the original weights can be served")
    return halves


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers of 4 or 8 bits that int32 [rows, words] hold, those in lower bits first, as uint8 [rows, words
    * 32 / bits]."""
    data = packed.contiguous().view(torch.uint8)
    return data if bits == 8 else unpack_halves(data)


def order_of(name: str, groups: Tensor, size: int) -> Tensor | None:
    """Return the permutation that sorts inputs by group, int64 [in_features], given the group of each input; None means
    that they are sorted already. Raises WeightsError, which names the tensor `name`, unless each group has `size`
    inputs."""
    sorted_groups = torch.arange(len(groups)) // size
    order = torch.argsort(groups.long(), stable=True)
    if not torch.equal(groups.long()[order], sorted_groups):
        raise WeightsError(f"tensor {name} must name {size} inputs of each group")
    return None if torch.equal(groups.long(), sorted_groups) else order


def grid_shapes(rows: int, columns: int) -> tuple[Shape, ...]:
    """Return the shapes in which a checkpoint may store [rows, columns] scales: a single column also as [rows], and a
    single scale also as a scalar."""
    shapes: list[Shape] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
    if rows == columns == 1:
        shapes.append(())
    return tuple(shapes)
