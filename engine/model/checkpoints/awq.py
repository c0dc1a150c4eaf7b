"""AWQ's checkpoints of version gemm, as AutoAWQ writes them.

A module has `qweight` (int32 [in_features, out_features / 8]), `qzeros` (int32 [groups, out_features / 8]) and `scales`
([groups, out_features]). Source: AutoAWQ's WQLinear_GEMM.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.model.checkpoints.layers import Json, Layer, integer_coding, integer_form, integer_weight, parts_of
from engine.model.checkpoints.stored import FLOATS, StoredTensors, WeightsError
from lora_kernels.quantized import Coding, QuantizedWeight

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Index of the 4 bits of an int32, from the lowest on, that hold each of 8 neighbouring outputs: outputs of even number
come first."""


class Awq:
    """Finds the weights of a folder that are quantised with AWQ. Raises WeightsError if `section`, the quantisation
    settings in config.json, names another version or number of bits."""

    def __init__(self, section: Json, stored: StoredTensors) -> None:
        self._stored = stored
        version, bits = str(section.get("version", "gemm")).lower(), section.get("bits", section.get("w_bit", BITS))
        if version != "gemm" or bits != BITS:
            raise WeightsError(f"AWQ's version {version!r} of {bits} bits is not supported; supported: gemm of 4 bits")
        self._size = section.get("group_size", section.get("q_group_size", 128))

    def find(self, module: str, shape: tuple[int, int]) -> Layer | None:
        if f"{module}.qweight" not in self._stored:
            return None
        features, width = shape
        size = width if self._size == -1 else self._size
        coding = integer_coding(f"{module}.qweight", width, BITS, size, symmetric=False)
        self._stored.require(f"{module}.qweight", ("I32",), (width, features // 8))
        self._stored.require(f"{module}.qzeros", ("I32",), (width // size, features // 8))
        self._stored.require(f"{module}.scales", FLOATS, (width // size, features))
        parts = parts_of(module, self._stored, ("qweight", "qzeros", "scales"))
        return Layer(integer_form(BITS, size, width), parts, coding, partial(self._read, module, coding))

    def _read(self, module: str, coding: Coding) -> QuantizedWeight:
        codes, zeros = (_unpack(self._stored.read(f"{module}.{part}")) for part in ("qweight", "qzeros"))
        return integer_weight(f"{module}.scales", coding, codes, self._stored.read(f"{module}.scales").T, zeros)


def _unpack(packed: Tensor) -> Tensor:
    """Return the 4-bit numbers that int32 [rows, out_features / 8] hold in AWQ's order, as uint8 [out_features,
    rows]."""
    words = packed.T.contiguous()
    numbers = [(words >> BITS * place).to(torch.uint8) & 15 for place in PLACES]
    return torch.stack(numbers, dim=1).flatten(0, 1)
