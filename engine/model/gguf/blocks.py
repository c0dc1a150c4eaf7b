"""The block types of GGUF files, as quantised weights: codes of 32 neighbouring inputs, or 256 for types with a K, and
their scales. Source: ggml's block structures (ggml-common.h) and the specification of GGUF."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lora_kernels.quantized import Coding, QuantizedWeight

Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Contents of blocks: codes (uint8 [blocks, inputs]), scales and minima ([blocks, groups]), and units. Scales and
minima are fp16 or, in types whose names have a K, int8 multiples of the units (fp16 [blocks, 1, 1] or, with minima,
[blocks, 1, 2]). None means that a type has no minima or no units."""
SUPER = 256
"""Inputs of a block of the types whose names have a K."""


class BlockType(NamedTuple):
    """A block type: its name in ggml, the coding of its weights, inputs and bytes of a block, and the function that
    takes blocks (uint8 [blocks, bytes]) apart."""

    name: str
    coding: Coding
    inputs: int
    num_bytes: int
    split: Callable[[Tensor], Parts]


def read_blocks(blocks: Tensor, kind: BlockType, shape: tuple[int, int]) -> QuantizedWeight:
    """Return the quantised weight of `shape`, [out_features, in_features], that ggml blocks of type `kind`, uint8
    [blocks, bytes], hold."""
    codes, scales, minima, units = kind.split(blocks)
    groups = shape[0], shape[1] // kind.coding.group
    return QuantizedWeight(
        kind.coding,
        codes.view(shape),
        scales.view(groups),
        None if minima is None else minima.view(groups),
        None if units is None else units.view(shape[0], -1, units.shape[2]),
    )


def _halves(blocks: Tensor, place: int) -> Tensor:
    """Return the fp16 number at byte `place` of each ggml block, [blocks, 1]."""
    return blocks[:, place : place + 2].contiguous().view(torch.float16)


def _nibbles(data: Tensor) -> Tensor:
    """Return the 4-bit codes of each ggml block, two in a byte: the lower halves of its bytes, and then the upper ones,
    32 codes of 16 bytes."""
    return torch.cat((data & 15, data >> 4), dim=1)


def _bits(data: Tensor) -> Tensor:
    """Return the bits of each ggml block's bytes, the lowest of a byte first, [blocks, 8 * bytes]."""
    return (data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None, None


def _q4_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2), None


def _q5_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _halves(blocks, 0), None, None


def _q5_1(blocks: Tensor) -> Parts:
    return _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _halves(blocks, 0), _halves(blocks, 2), None


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[:, 2:] ^ 128, _halves(blocks, 0), None, None


def _q4_k(blocks: Tensor) -> Parts:
    return _pairs_of_groups(blocks[:, 16:]), *_scales_and_minima(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    upper = blocks[:, 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _pairs_of_groups(blocks[:, 48:]) | upper.transpose(1, 2).flatten(1) << 4, *_scales_and_minima(blocks)


def _q6_k(blocks: Tensor) -> Parts:
    lower, upper = blocks[:, :128].view(-1, 2, 2, 32), blocks[:, 128:192].view(-1, 2, 1, 32)
    nibbles = torch.stack((lower & 15, lower >> 4), dim=2).view(-1, 2, 4, 32)
    tops = upper >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return (nibbles | tops << 4).flatten(1), scales, None, _halves(blocks, 208)[:, None]


def _pairs_of_groups(data: Tensor) -> Tensor:
    """Return the 4-bit codes of the eight groups of a Q4_K or Q5_K block: 32 bytes hold a group in their lower halves,
    and the next in their upper ones."""
    pairs = data.view(-1, 4, 32)
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales and minima of eight groups, and their units, from the first 16 bytes of Q4_K and Q5_K."""
    # Multiples have 6 bits: of the first four groups in the lower bits of eight bytes, of the others in four more bytes
    # and in the upper bits of the first eight.
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | first >> 6 << 4), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    units = torch.stack((_halves(blocks, 0), -_halves(blocks, 2)), dim=2)
    return scales.view(torch.int8), minima.view(torch.int8), units


BLOCK_TYPES = {
    2: BlockType("Q4_0", Coding(4, 32, 8), 32, 18, _q4_0),
    3: BlockType("Q4_1", Coding(4, 32), 32, 20, _q4_1),
    6: BlockType("Q5_0", Coding(5, 32, 16), 32, 22, _q5_0),
    7: BlockType("Q5_1", Coding(5, 32), 32, 24, _q5_1),
    8: BlockType("Q8_0", Coding(8, 32, 128), 32, 34, _q8_0),
    12: BlockType("Q4_K", Coding(4, 32, shared=8), SUPER, 144, _q4_k),
    13: BlockType("Q5_K", Coding(5, 32, shared=8), SUPER, 176, _q5_k),
    14: BlockType("Q6_K", Coding(6, 16, 32, shared=16), SUPER, 210, _q6_k),
}
"""The block types that are read as they are, by their numbers in ggml."""
