"""GPTQ's checkpoints, as AutoGPTQ and GPTQModel write them. Source: AutoGPTQ's QuantLinear and GPTQModel's
configuration."""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from engine.model.checkpoints.layers import (
    Json,
    Layer,
    integer_coding,
    integer_form,
    integer_weight,
    order_of,
    parts_of,
    unpack,
)
from engine.model.checkpoints.stored import FLOATS, StoredTensors, WeightsError
from lora_kernels.quantized import Coding, QuantizedWeight

# A module has `qweight` (int32 [in_features * bits / 32, out_features]), `scales` ([groups, out_features]), `qzeros`
# (int32 [groups, out_features * bits / 32]) and `g_idx`. Format `gptq` stores zero points less 1, `gptq_v2` as they
# are.

OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Numbers that are added to stored zero points, by the name of the format."""


class Gptq:
    """Finds the weights of a folder that are quantised with GPTQ. Raises WeightsError if `section`, the quantisation
    settings in config.json, names a format with another layout."""

    def __init__(self, section: Json, stored: StoredTensors) -> None:
        self._section, self._stored = section, stored
        name = "marlin" if section.get("is_marlin_format") else section.get("checkpoint_format")
        name = name or section.get("format") or "gptq"
        if name not in OFFSETS:
            raise WeightsError(f"GPTQ's checkpoint_format {name!r} is not supported; supported: {', '.join(OFFSETS)}")
        self._offset = OFFSETS[name]

    def find(self, module: str, shape: tuple[int, int]) -> Layer | None:
        if f"{module}.qweight" not in self._stored:
            return None
        settings = self._settings(module)
        (features, width), bits = shape, settings.get("bits", 4)
        size = settings.get("group_size", -1)
        size = width if size == -1 else size
        coding = integer_coding(f"{module}.qweight", width, bits, size, bool(settings.get("sym", True)))
        groups = width // size
        self._stored.require(f"{module}.qweight", ("I32",), (width * bits // 32, features))
        self._stored.require(f"{module}.qzeros", ("I32",), (groups, features * bits // 32))
        self._stored.require(f"{module}.scales", FLOATS, (groups, features))
        sorts = bool(settings.get("desc_act"))
        if sorts:
            self._stored.require(f"{module}.g_idx", ("I32",), (width,))
        parts = parts_of(module, self._stored, ("qweight", "qzeros", "scales", "g_idx"))
        read = partial(self._read, module, coding, size if sorts else 0)
        return Layer(integer_form(bits, size, width), parts, coding, read)

    def _settings(self, module: str) -> Json:
        """Return the quantisation settings of a module: those of config.json, with the changes that GPTQModel's
        `dynamic`, whose keys are regular expressions, makes for the module."""
        for pattern, changes in (self._section.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
                return {**self._section, **changes}
        return self._section

    def _read(self, module: str, coding: Coding, sorted_size: int) -> QuantizedWeight:
        """Read the weight of a module. `sorted_size` is the size of groups by which `g_idx` sorts inputs (act-order),
        or 0 where the inputs of each group are neighbours."""
        codes = unpack(self._stored.read(f"{module}.qweight").T, coding.bits)
        zeros = unpack(self._stored.read(f"{module}.qzeros"), coding.bits)
        offset = self._offset if coding.zero is None else _offset_of(f"{module}.qzeros", zeros, coding.zero)
        zeros = (zeros + offset & (1 << coding.bits) - 1).T
        scales, order = self._stored.read(f"{module}.scales").T, None
        if sorted_size:
            order = order_of(f"{module}.g_idx", self._stored.read(f"{module}.g_idx"), sorted_size)
        return integer_weight(f"{module}.scales", coding, codes, scales, zeros if coding.zero is None else None, order)


def _offset_of(name: str, zeros: Tensor, zero: int) -> int:
    """Return the number that makes `zero` of all stored zero points of symmetric weights. Raises WeightsError, which
    names the tensor, if there is none."""
    # The numbers tell their format better than the settings: some tools write those of `gptq_v2` and name it `gptq`.
    found = next((offset for offset in OFFSETS.values() if (zeros == zero - offset).all()), None)
    if found is None:
        raise WeightsError(f"tensor {name} has zero points besides {zero}, but its settings say that sym is true")
    return found
