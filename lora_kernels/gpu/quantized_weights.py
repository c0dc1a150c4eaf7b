"""Quantised weights in the memory of a GPU: the form in which the kernels of triton_quantized.py read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_kernels.gpu.launch import with_constants
from lora_kernels.gpu.triton_quantized import dequantise_kernel
from lora_kernels.quantized import Coding, QuantizedWeight

LANES = 32
"""Words that a feature has in a span (triton_quantized.py), and the least number of inputs that may share a scale."""
ROWS_AT_A_TIME = 4096
"""Features that are packed at a time, so that temporary copies stay small."""
BLOCK_N = 64


def word_bits(coding: Coding) -> int | None:
    """Return the bits, 4 or 8, in which a GPU stores the codes of a coding. None means that it must be dequantised:
    fewer than 32 inputs share a scale, or 4 bits have a zero other than 8."""
    if coding.group < LANES or (coding.bits == 4 and coding.zero not in (None, 8)):
        return None
    return 4 if coding.bits == 4 else 8


def stored_bits(coding: Coding) -> float | None:
    """Return the bits of device memory that each number of a weight takes, with its part of the scale and the offset,
    but without padding. None means that a GPU does not compute with such weights as they are."""
    bits = word_bits(coding)
    if coding.by_rows:
        return bits
    return None if bits is None else bits + 16 * (2 if offset_kind(coding) else 1) / coding.group


def offset_kind(coding: Coding) -> int:
    """Return the form of a coding's offsets (OFFSETS in triton_quantized.py): 0 if there are none, because the middle
    code stands for 0 in all groups; 1 if they are added to codes; 2 if they are added to scaled codes."""
    return 0 if coding.zero is not None else 1 if coding.in_scales and not coding.shared else 2


@dataclass(frozen=True, slots=True)
class DeviceWeight:
    """A weight [features, width], packed."""

    bits: int
    """Bits of a code, 4 or 8."""
    group: int
    """Number of inputs that share a scale."""
    width: int
    kind: int
    """What offsets are, see `offset_kind`."""
    words: Tensor
    """int16 [spans, features, 32], see triton_quantized.py. A span is `32 * 16 / bits` inputs, the last one padded."""
    numbers: Tensor
    """fp16 [1, groups, features], scales; or [2, groups, features], scales and offsets."""
    order: Tensor | None
    """int64 [width], as in QuantizedWeight."""

    @property
    def features(self) -> int:
        return self.words.shape[1]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.numbers.nbytes

    @property
    def constants(self) -> dict[str, int]:
        """The constants of kernels that read the weight."""
        return {"BITS": self.bits, "GROUP": self.group, "OFFSETS": self.kind}

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Words, scales and offsets, as kernels take them: without offsets, scales stand in for them."""
        return self.words, self.numbers[0], self.numbers[-1]

    def dequantize(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of `count` features from `first` on, [count, width]. Inputs are in the order of codes."""
        out = torch.empty(count, self.width, dtype=dtype, device=self.words.device)
        return self._launch(None, first, out)

    def rows(self, ids: Tensor, out: Tensor) -> Tensor:
        """Write the weights of the features `ids` (integers [count]) to `out`, contiguous [count, width], and return
        it. Inputs are in the order of codes."""
        return self._launch(ids, 0, out)

    def _launch(self, ids: Tensor | None, first: int, out: Tensor) -> Tensor:
        count, block = len(out), BLOCK_N if ids is None else 1
        kernel = with_constants(
            dequantise_kernel, **self.constants, HAS_IDS=ids is not None, BLOCK_N=block, num_warps=4 if block > 1 else 1
        )
        grid = (-(-count // block), len(self.words))
        if count:
            ids = self.words if ids is None else ids
            kernel(grid, ids, *self.tensors, out, first, count, self.features, self.width)
        return out


def pack(weight: QuantizedWeight) -> DeviceWeight:
    """Pack a weight, on the device on which it is. Raises ValueError if a GPU cannot compute with its coding (see
    `word_bits`), or a scale is beyond fp16."""
    coding, (features, width) = weight.coding, weight.shape
    bits = word_bits(coding)
    if bits is None:
        raise ValueError(f"a GPU reads weights in groups of {LANES} inputs or more, not of {coding.group}")
    span = LANES * 16 // bits
    spans, device = -(-width // span), weight.codes.device
    groups = -(-spans * span // coding.group)
    words = torch.empty(spans, features, LANES, dtype=torch.int16, device=device)
    kind = offset_kind(coding)
    numbers = torch.zeros(2 if kind else 1, groups, features, dtype=torch.float16, device=device)
    for rows in torch.arange(features, device=device).split(ROWS_AT_A_TIME):
        codes, parts = _with_offsets(weight.select(rows))
        words[:, rows] = _words(codes, bits, spans)
        for kept, part in zip(numbers, parts, strict=True):
            kept[: width // coding.group, rows] = part.T.half()
    if not numbers.isfinite().all():
        raise ValueError("weights are too large for scales in fp16")
    return DeviceWeight(bits, coding.group, width, kind, words, numbers, weight.order)


def _words(codes: Tensor, bits: int, spans: int) -> Tensor:
    """Return codes, uint8 [features, width], in words, int16 [spans, features, 32]."""
    parts = 16 // bits
    padded = codes.new_zeros(len(codes), spans * parts * LANES)
    padded[:, : codes.shape[1]] = codes
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=codes.device)[:, None]
    shifted = padded.view(len(codes), spans, parts, LANES).int() << shifts
    return shifted.sum(2, dtype=torch.int32).to(torch.int16).transpose(0, 1)


def _with_offsets(weight: QuantizedWeight) -> tuple[Tensor, list[Tensor]]:
    """Return codes, uint8 [features, width], and scales and, if groups have them, offsets, [features, groups]."""
    coding, codes = weight.coding, weight.codes
    scale, minimum = weight.fp32_scales()
    if minimum is None or weight.minima is None:
        return codes + (128 - (coding.zero or 0) if coding.bits > 4 else 0), [scale]
    return codes, [scale, weight.minima if coding.in_scales and weight.units is None else minimum]
