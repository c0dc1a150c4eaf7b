"""Quantised weights, of GGUF, AWQ, GPTQ and compressed-tensors: integer codes with a scale for each group of inputs. A
weight is `scale * (code - zero)`, `scale * code + minimum` or `scale * (code + minimum)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lora_kernels.fp8 import Fp8Coding, Fp8Weight

GROUPS = (16, 32, 64, 128)
"""Numbers of inputs that may share a scale."""
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Fractions of a group's range that `quantize` tries: clipping the largest weight may round all others less. With 8
bits it does not, so that only the first is tried."""
AT_A_TIME = 1 << 18
"""Number of weights that `quantize` works on at a time: several fp32 copies of them should fit into the cache."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How weights are coded: in `bits` (4, 5, 6 or 8), in groups of `group` inputs. Raises ValueError for other bits or
    groups."""

    # `zero` is the code of weight 0; None means that each group has a minimum, a multiple of its scale with
    # `in_scales`. Scales and minima are fp16 or, with `shared`, multiples of fp16 units that so many groups share.
    # `by_rows` means one scale for each output, and activations in 8 bits with a scale for each row.
    bits: int
    group: int
    zero: int | None = None
    in_scales: bool = False
    shared: int = 0
    by_rows: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in (4, 5, 6, 8):
            raise ValueError(f"weights are coded in 4, 5, 6 or 8 bits, not {self.bits}")
        if self.group not in GROUPS:
            raise ValueError(f"groups have {', '.join(map(str, GROUPS))} inputs, not {self.group}")

    @property
    def bits_per_weight(self) -> float:
        """Bits of memory that a weight takes, with its part of the scale, the minimum and their units."""
        numbers = 1 if self.zero is not None else 2
        one = 8 + 16 / self.shared if self.shared else 16
        return self.bits + numbers * one / self.group


AnyCoding = Coding | Fp8Coding
INT8, INT4 = Coding(8, 32, 128), Coding(4, 32)
"""The codings of `quantize`. For INT8 they are those of GGUF's Q8_0, for INT4 of Q4_1."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A quantised weight [out_features, in_features]."""

    coding: Coding
    """How its codes are to be read."""
    codes: Tensor
    """uint8 [out_features, in_features], one code each."""
    scales: Tensor
    """fp16 [out_features, in_features / group]; int8 if groups share units."""
    minima: Tensor | None = None
    """Minima, of the shape and dtype of `scales`; None if the coding has a zero."""
    units: Tensor | None = None
    """fp16 [out_features, in_features / group / shared, 2], of scales and of minima; without minima, the last axis is
    1. None if groups share none."""
    order: Tensor | None = None
    """int64 [in_features]: column c of `codes` belongs to input `order[c]`, so that inputs that share a scale need not
    be neighbours (GPTQ's act-order). None means that columns are in the order of inputs."""

    def __post_init__(self) -> None:
        features, width = self.codes.shape
        groups = (features, width // self.coding.group)
        if width % self.coding.group or self.scales.shape != groups:
            raise ValueError(f"{width} inputs in groups of {self.coding.group} have scales {list(self.scales.shape)}")
        if (self.minima is None) != (self.coding.zero is not None):
            raise ValueError("a weight has either minima or a code for zero")
        if self.minima is not None and self.minima.shape != groups:
            raise ValueError(f"scales are {list(groups)} and minima {list(self.minima.shape)}")
        if bool(self.coding.shared) != (self.units is not None):
            raise ValueError("a weight has units of scales where its coding says that groups share them")

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        features, width = self.codes.shape
        return features, width

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes that the weight takes in a packed linear layer, without padding."""
        return round(self.codes.numel() * self.coding.bits_per_weight / 8)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights, computed in fp32 and rounded to `dtype`, [out_features, in_features]."""
        codes = self.codes.view(*self.scales.shape, self.coding.group).float()
        if self.minima is None:
            codes -= self.coding.zero or 0
        scales, minima = self.fp32_scales()
        weights = codes * scales[..., None]
        if minima is not None:
            weights += minima[..., None]
        weights = weights.view(self.shape)
        if self.order is not None:
            weights = torch.empty_like(weights).index_copy_(1, self.order, weights)
        return weights.to(dtype)

    def steps(self) -> Tensor:
        """Return the distances from each weight to the next that its code can have, fp32 [out_features, in_features].
        Rounding to codes changes weights by half of that, except those that were clipped."""
        steps = self.fp32_scales()[0].abs().repeat_interleave(self.coding.group, dim=1)
        return steps if self.order is None else torch.empty_like(steps).index_copy_(1, self.order, steps)

    def fp32_scales(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and minima in fp32, each [out_features, in_features / group], with units multiplied in (and
        scales into minima, if these are multiples of them). Minima are None if the coding has a zero."""
        scales = self._in_units(self.scales, 0)
        if self.minima is None:
            return scales, None
        minima = self._in_units(self.minima, 1)
        return scales, minima * scales if self.coding.in_scales else minima

    def _in_units(self, numbers: Tensor, side: int) -> Tensor:
        if self.units is None:
            return numbers.float()
        return numbers.float() * self.units[:, :, side].float().repeat_interleave(self.coding.shared, dim=1)

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the weight on a device."""
        minima, units, order = (
            None if tensor is None else tensor.to(device) for tensor in (self.minima, self.units, self.order)
        )
        return QuantizedWeight(self.coding, self.codes.to(device), self.scales.to(device), minima, units, order)

    def select(self, rows: Tensor) -> QuantizedWeight:
        """Return the weight of the outputs that `rows` (int64) lists, in that order."""
        minima = None if self.minima is None else self.minima[rows]
        units = None if self.units is None else self.units[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minima=minima, units=units)


Weight = Tensor | QuantizedWeight | Fp8Weight
"""A weight [out_features, in_features] in the form in which it is stored."""


def dense(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """Return a weight as a tensor, in `dtype` if it is given, else fp32 for a quantised one and unchanged for
    another."""
    if isinstance(weight, Tensor):
        return weight if dtype is None else weight.to(dtype)
    return weight.dequantize(dtype or torch.float32)


def stack(weights: Sequence[Weight]) -> list[Weight]:
    """Concatenate weights of the same inputs along their outputs. Return one piece for each run of weights that have
    the same coding and order of inputs."""
    stacked: list[Weight] = []
    for weight in weights:
        joined = _stacked(stacked[-1], weight) if stacked else None
        if joined is None:
            stacked.append(weight)
        else:
            stacked[-1] = joined
    return stacked


def _stacked(above: Weight, below: Weight) -> Weight | None:
    """Return two weights as one, or None if they differ in coding or in the order of inputs."""
    if isinstance(above, Tensor) or isinstance(below, Tensor):
        return torch.cat((above, below)) if isinstance(above, Tensor) and isinstance(below, Tensor) else None
    if isinstance(above, Fp8Weight) and isinstance(below, Fp8Weight):
        return above.above(below)
    if isinstance(above, Fp8Weight) or isinstance(below, Fp8Weight):
        return None
    if above.coding != below.coding or not _same_order(above.order, below.order):
        return None
    return replace(
        above,
        codes=torch.cat((above.codes, below.codes)),
        scales=torch.cat((above.scales, below.scales)),
        minima=_joined(above.minima, below.minima),
        units=_joined(above.units, below.units),
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _joined(above: Tensor | None, below: Tensor | None) -> Tensor | None:
    return None if above is None or below is None else torch.cat((above, below))


def pack_halves(numbers: Tensor) -> Tensor:
    """Return numbers of 4 bits, uint8 [rows, columns], two to a byte, the first in the lower bits."""
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def unpack_halves(data: Tensor) -> Tensor:
    """Return the numbers that `pack_halves` packed."""
    return torch.stack((data & 15, data >> 4), dim=2).flatten(1)


def find_coding(coding: Coding, width: int) -> Coding | None:
    """Return `coding` with the largest size of groups, up to its own, that divides `width` inputs, or None if no size
    does: such a weight is not quantised."""
    group = next((size for size in reversed(GROUPS) if size <= coding.group and width % size == 0), None)
    return None if group is None else replace(coding, group=group)


def quantize(weight: Tensor, coding: Coding) -> QuantizedWeight:
    """Return the quantised form of a weight [out_features, in_features] of finite numbers, with the scales of least
    squared error among a few. Raises ValueError if groups do not divide the inputs or a scale is beyond fp16."""
    features, width = weight.shape
    if width % coding.group:
        raise ValueError(f"{width} inputs cannot be divided into groups of {coding.group}")
    step = max(1, AT_A_TIME // width)
    pieces = [_quantize(weight[start : start + step].float(), coding) for start in range(0, features, step)]
    codes, scales, minima = (torch.cat(piece) for piece in zip(*pieces, strict=True))
    if not scales.isfinite().all():
        raise ValueError("weights are too large for scales in fp16")
    return QuantizedWeight(coding, codes, scales, minima if coding.zero is None else None)


def _quantize(weight: Tensor, coding: Coding) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [rows, width], and scales and minima [rows, groups] in fp16, of fp32 rows."""
    rows, width = weight.shape
    groups = weight.view(rows, -1, coding.group)
    codes, scales, minima = _candidate(groups, coding, 1.0)
    least = _error(groups, coding, codes, scales, minima)
    for shrink in SHRINKS[1:] if coding.bits < 8 else ():
        found = _candidate(groups, coding, shrink)
        error = _error(groups, coding, *found)
        better = error < least
        least = torch.where(better, error, least)
        pairs = zip(found, (codes, scales, minima), strict=True)
        codes, scales, minima = (torch.where(better[..., None], new, old) for new, old in pairs)
    return codes.to(torch.uint8).view(rows, width), scales[..., 0].half(), minima[..., 0].half()


def _candidate(groups: Tensor, coding: Coding, shrink: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return fp32 codes, and scales and minima as fp16 would hold them, if a group's range is made `shrink` times as
    wide."""
    top = 2**coding.bits - 1
    if coding.zero is not None:
        scales = groups.abs().amax(-1, keepdim=True) * shrink / (top - coding.zero)
        minima = torch.zeros_like(scales)
    else:
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        minima, scales = low * shrink, (high - low) * shrink / top
    scales, minima = scales.half().float(), minima.half().float()
    steps = (groups - minima) / scales.clamp_min(1e-20)
    return (steps.round() + (coding.zero or 0)).clamp(0, top), scales, minima


def _error(groups: Tensor, coding: Coding, codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    return ((codes - (coding.zero or 0)) * scales + minima - groups).square().sum(-1)
