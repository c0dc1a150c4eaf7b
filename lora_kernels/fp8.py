"""Weights in FP8 (e4m3), with a scale for each output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Coding:
    """How weights are coded in FP8: in e4m3, with an fp32 scale for each output."""

    bits_per_weight: float = 8.0


FP8 = Fp8Coding()
LARGEST_FP8 = 448.0
"""Largest number of e4m3."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A weight [out_features, in_features] in FP8."""

    numbers: Tensor
    """E4m3 [out_features, in_features]."""
    scales: Tensor
    """fp32 [out_features], by which numbers are multiplied."""

    @property
    def coding(self) -> Fp8Coding:
        return FP8

    @property
    def shape(self) -> tuple[int, int]:
        """[out_features, in_features]."""
        features, width = self.numbers.shape
        return features, width

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    def to(self, device: torch.device) -> Fp8Weight:
        """Return the weight on a device."""
        return Fp8Weight(self.numbers.to(device), self.scales.to(device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights, computed in fp32 and rounded to `dtype`, [out_features, in_features]."""
        return self.numbers.float().mul_(self.scales[:, None]).to(dtype)

    def above(self, below: Fp8Weight) -> Fp8Weight:
        """Return both weights, which have the same inputs, as one: this weight's outputs, then those of `below`."""
        bits = torch.cat((self.numbers.view(torch.uint8), below.numbers.view(torch.uint8)))
        return Fp8Weight(bits.view(torch.float8_e4m3fn), torch.cat((self.scales, below.scales)))


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """Return a weight [out_features, in_features] of finite numbers in FP8, scaled so that the largest magnitude of
    each output becomes the largest of e4m3."""
    scales = weight.float().abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / LARGEST_FP8
    return Fp8Weight((weight / scales[:, None]).to(torch.float8_e4m3fn), scales)
