"""The layout in memory of quantised weights: panels of 48 outputs, each one run of codes, then scales, minima and
units. Four neighbouring inputs of 16 outputs are the 64 bytes of a vector, a *quad*."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_kernels.cpu.formats import Constant
from lora_kernels.quantized import Coding, QuantizedWeight

PANEL_VECTORS, PANEL = 3, 48
"""Vectors of 16 outputs, and outputs, of a panel."""

# Codes of 4 bits lie in pairs of quads, one in the lower and one in the upper halves of bytes. Codes of 5 and 6 bits
# have their upper bits in a second plane, eight or four quads to a vector.

LINE = 64
"""Bytes of a vector, and of a cache line."""
QUAD = 4
"""Inputs of a quad."""
HALF_BITS = 4


@dataclass(frozen=True)
class PanelForm(Constant):
    """How a kernel reads panels. To numba functions it is a constant."""

    coding: Coding
    """The coding of the weights."""
    code_bits: int
    """Bits of the codes of activations, 8 or 16, with which products are sums of integers. 0 means that activations are
    numbers, and that products are in fp32."""

    def key(self) -> str:
        return f"{self.coding}, {self.code_bits}"

    @property
    def block(self) -> int:
        """Number of inputs in a block, whose activations share a scale: 32, or the size of the weights' groups if that
        is smaller."""
        return min(self.coding.group, 32)

    @property
    def blocks(self) -> int:
        """Number of blocks in a group of inputs whose weights share a scale."""
        return self.coding.group // self.block

    @property
    def quads_in_vector(self) -> int:
        """Quads in a vector of the first plane."""
        return 1 if self.coding.bits == 8 else 2

    @property
    def upper_bits(self) -> int:
        """Bits of a code in the second plane; 0 means that there is none."""
        return 0 if self.coding.bits == 8 else self.coding.bits - HALF_BITS

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the first plane, for all outputs of a panel."""
        return self.block // QUAD // self.quads_in_vector * PANEL_VECTORS * LINE

    @property
    def upper_bytes(self) -> int:
        """Bytes of a block in the second plane, for all outputs of a panel."""
        return -(-self.block // QUAD * self.upper_bits // 8) * PANEL_VECTORS * LINE

    @property
    def has_minima(self) -> bool:
        return self.coding.zero is None

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, and of a minimum."""
        return 1 if self.coding.shared else 2

    def panel_bytes(self, width: int) -> int:
        """Bytes of a panel of `width` inputs. Panels begin at cache lines."""
        groups, numbers = width // self.coding.group, 2 if self.has_minima else 1
        scales = numbers * groups * PANEL * self.scale_bytes
        units = numbers * groups // self.coding.shared * PANEL * 2 if self.coding.shared else 0
        size = width // self.block * (self.block_bytes + self.upper_bytes) + scales + units
        return -(-size // LINE) * LINE


def pack(weight: QuantizedWeight) -> Tensor:
    """Pack a weight into panels. Return uint8 [panels, bytes], aligned to cache lines; outputs that pad the last panel
    are 0. Columns stay in the order of `weight.codes`, whatever `weight.order` is."""
    form = PanelForm(weight.coding, code_bits=0)
    features, width = weight.shape
    panels, size = -(-features // PANEL), form.panel_bytes(width)
    packed = aligned(panels * size).view(panels, size)
    for start in range(0, panels, 64):  # a few at a time, because intermediate results are larger than the panels
        rows = slice(start * PANEL, min((start + 64) * PANEL, features))
        planes = [_codes(weight.codes[rows], form), _numbers(weight.scales[rows])]
        if weight.minima is not None:
            planes.append(_numbers(weight.minima[rows]))
        if weight.units is not None:
            planes.extend(_numbers(side[rows].contiguous()) for side in weight.units.unbind(2))
        found = torch.cat(planes, dim=1)
        packed[start : start + len(found)] = F.pad(found, (0, size - found.shape[1]))
    return packed


def aligned(size: int) -> Tensor:
    """Return uint8 [size], aligned to a cache line and not initialised."""
    raw = torch.empty(size + LINE, dtype=torch.uint8)
    start = -raw.data_ptr() % LINE
    return raw[start : start + size]


def _codes(codes: Tensor, form: PanelForm) -> Tensor:
    """Return codes, uint8 [outputs, inputs], as the planes of their panels, uint8 [panels, bytes]. Outputs that pad the
    last panel have codes of 0."""
    rows, width = codes.shape
    codes = F.pad(codes, (0, 0, 0, -rows % PANEL))
    quads = codes.view(-1, PANEL, width // form.block, form.block // QUAD, QUAD).permute(0, 2, 3, 1, 4)
    if form.quads_in_vector == 1:
        return quads.reshape(len(quads), -1)
    lower = (quads[:, :, 0::2] & 15) | (quads[:, :, 1::2] << HALF_BITS)
    planes = [lower.reshape(len(quads), -1)]
    if form.upper_bits:
        step = 8 // form.upper_bits
        upper = F.pad(quads >> HALF_BITS, (0, 0, 0, 0, 0, -quads.shape[2] % step))
        parts = (upper[:, :, part::step] << (part * form.upper_bits) for part in range(step))
        planes.append(sum(parts, torch.zeros_like(upper[:, :, 0::step])).reshape(len(quads), -1))
    return torch.cat(planes, dim=1)


def _numbers(numbers: Tensor) -> Tensor:
    """Return the scales, minima or units of some panels, as uint8 [panels, bytes], from [outputs, groups]."""
    padded = F.pad(numbers, (0, 0, 0, -len(numbers) % PANEL))
    panels = padded.view(-1, PANEL, numbers.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.uint8).view(len(panels), -1)
