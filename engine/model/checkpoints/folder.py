"""Reads a model's weights out of a Hugging Face folder: quantised ones as they are, others as tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from engine.model.checkpoints.awq import Awq
from engine.model.checkpoints.compressed_tensors import CompressedTensors
from engine.model.checkpoints.fp8 import Fp8
from engine.model.checkpoints.gptq import Gptq
from engine.model.checkpoints.layers import Family, Json, Layer
from engine.model.checkpoints.stacks import MXFP4, Part, find_stacked
from engine.model.checkpoints.stored import FLOATS, Shape, StoredTensors, WeightsError
from engine.process.small_files import read_small_text
from lora_kernels.quantized import AnyCoding, Weight

FAMILIES: dict[str, Callable[[Json, StoredTensors], Family]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
}
"""The families of quantised formats, by their `quant_method` in config.json."""
END = ".weight"


class Folder:
    """The weights of a checkpoint folder in safetensors, of `expected` shapes by name, read one by one. Raises
    WeightsError, which names the tensor, if something is missing, unknown or of another shape.

    Args:
        parts: which part of a stacked tensor each parameter is.
        aliases: see `StoredTensors`.
    """

    def __init__(
        self,
        folder: Path,
        expected: Mapping[str, Shape],
        parts: Mapping[str, Part] | None = None,
        aliases: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._stored = StoredTensors(folder, aliases)
        section = _read_section(folder)
        self._family = section.get("quant_method", "")
        self._layers = find_stacked(self._stored, parts or {}, self._family)
        others = {name: shape for name, shape in expected.items() if name not in self._layers}
        if not parts or self._family != MXFP4:
            self._layers |= _find_layers(section, self._stored, others)
        for name in expected:
            if name not in self._layers and self._stored.dtype(name) not in (None, *FLOATS):
                raise WeightsError(
                    f"tensor {name} is {self._stored.dtype(name)}: config.json does not say how to read it"
                )
        used = {part for layer in self._layers.values() for part in layer.parts}
        self._shapes = {name: self._stored[name].shape for name in self._stored if name not in used}
        self._shapes |= {name: expected[name] for name in self._layers}
        for name in self._layers:
            bias = f"{name.removesuffix(END)}.bias"
            if bias in self._shapes and bias not in expected and not self._stored.read(bias).any():
                del self._shapes[bias]  # AutoGPTQ writes zeros for modules that have no bias

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the checkpoint's parameters, by name, and of tensors that belong to no parameter."""
        return self._shapes

    def coding(self, name: str) -> AnyCoding | None:
        """Return how a parameter's weights are coded once they are read; None means that they are not quantised."""
        return self._layers[name].coding if name in self._layers else None

    def is_bf16(self, name: str) -> bool:
        """Return whether bf16 holds all numbers of a parameter exactly: the parameter is stored in bf16 or MXFP4."""
        layer = self._layers.get(name)
        if layer is not None and layer.form:
            return layer.form == MXFP4
        return all(self._stored.dtype(part) == "BF16" for part in (layer.parts if layer else [name]))

    def form(self, name: str) -> str | None:
        """Return the name of a parameter's format, such as `gptq-4bit-g128`; None means that it is not quantised."""
        if name not in self._layers or not self._layers[name].form:
            return None
        form = self._layers[name].form
        return form if form in self._family else f"{self._family}-{form}"

    def read(self, name: str) -> Weight:
        """Read a parameter from the checkpoint. Raises WeightsError, which names a tensor, if its numbers cannot be
        right."""
        return self._layers[name].read() if name in self._layers else self._stored.read(name)


def _read_section(folder: Path) -> Json:
    """Return what config.json, or else the file that AutoGPTQ or AutoAWQ wrote, says of quantisation; empty if neither
    does. Raises WeightsError, which names it, for a broken file."""
    section = quantisation_section(_read_object(folder / "config.json"))
    if not section and (found := _read_object(folder / "quantize_config.json")):
        section = {"quant_method": "gptq", **found}
    if not section and (found := _read_object(folder / "quant_config.json")):
        section = {"quant_method": "awq", **found}
    return section


def _read_object(file: Path) -> Json:
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_small_text(file))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{file} is not a JSON object: fetch it again")
    return found


def quantisation_section(config: Json) -> Json:
    """Return the section of a parsed config.json that says how weights are quantised, empty if there is none."""
    return config.get("quantization_config") or config.get("compression_config") or {}


def _find_layers(section: Json, stored: StoredTensors, expected: Mapping[str, Shape]) -> dict[str, Layer]:
    """Return how each quantised weight of a checkpoint is stored, by the names of parameters. Empty if config.json says
    nothing of quantisation. Raises WeightsError if it names an unknown method."""
    if not section:
        return {}
    method = section.get("quant_method", "unknown")
    if method not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise WeightsError(
            f"weights quantised by {method!r} cannot be read: choose a GGUF file, a checkpoint of {known}, or the "
            "original weights, which engine.weights quantises"
        )
    family = FAMILIES[method](section, stored)
    matrices = {name: (shape[0], shape[1]) for name, shape in expected.items() if len(shape) == 2}
    found = {name: family.find(name.removesuffix(END), shape) for name, shape in matrices.items()}
    return {name: layer for name, layer in found.items() if layer}
