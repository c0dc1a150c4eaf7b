"""Quantises a checkpoint's weights when they are loaded, and keeps the results on disk for the next start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.model.weights import WeightSource
from lora_kernels.quantized import INT4, INT8, Coding, QuantizedWeight, Weight, find_coding, quantize

ENDS = re.compile(r"(?:lm_head|embed_tokens)\.weight")
"""Finds the names of the embedding and the head, which have 8 bits in any case: they decide which token is next."""
LINEARS = re.compile(r"_proj\.weight")
HALF_BITS = 4
VERSION = 1
"""Version of quantisation. A change makes the engine quantise again what it kept."""


def quantized_source(source: WeightSource, weights: str, folder: Path | None) -> WeightSource:
    """Returns a source that quantises what `source` reads: weights of linear layers, the embedding and the head.

    Args:
        weights: `int8` or `int4`.
        folder: where results are kept, for weights with the same content. None means that they are not kept.

    Raises:
        ValueError: from the source, if a weight is quantised already or has numbers that are not finite.
    """

    def read(name: str) -> Weight:
        coding = coding_for(name, weights)
        if coding is None:
            return source(name)
        file = folder / f"{name}.{coding.bits}.v{VERSION}.safetensors" if folder else None
        kept = _load(file) if file else None
        return kept if kept is not None else _quantize(name, source(name), coding, file)

    return read


def coding_for(name: str, weights: str) -> Coding | None:
    """Returns the coding of a parameter's weights under `int8` or `int4`; None means that they are not quantised."""
    if ENDS.search(name):
        return INT8
    return (INT4 if weights == "int4" else INT8) if LINEARS.search(name) else None


def _quantize(name: str, weight: Weight, coding: Coding, file: Path | None) -> Weight:
    if isinstance(weight, QuantizedWeight):
        raise ValueError(f"{name} is quantised already: engine.weights must be auto for this checkpoint")
    fitting = find_coding(coding, weight.shape[1])
    if fitting is None:
        return weight
    if not weight.isfinite().all():
        raise ValueError(f"{name} has numbers that are not finite")
    quantized = quantize(weight, fitting)
    if file:
        _save(file, quantized)
    return quantized


def _load(file: Path) -> QuantizedWeight | None:
    """Returns the kept weight, or None if there is none that can be read."""
    try:
        with safe_open(file, framework="pt") as stored:
            found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    bits, group, zero = (int(number) for number in found["coding"])
    codes = found["codes"]
    if bits == HALF_BITS:
        codes = torch.stack((codes & 15, codes >> HALF_BITS), dim=2).flatten(1)
    coding = Coding(bits, group, None if zero < 0 else zero)
    return QuantizedWeight(coding, codes, found["scales"], found.get("minima"))


def _save(file: Path, weight: QuantizedWeight) -> None:
    """Writes a weight so that it appears whole or not at all. Raises OSError if the disk refuses."""
    coding, codes = weight.coding, weight.codes
    if coding.bits == HALF_BITS:
        codes = codes[:, 0::2] | codes[:, 1::2] << HALF_BITS
    zero = -1 if coding.zero is None else coding.zero
    tensors = {"coding": torch.tensor([coding.bits, coding.group, zero]), "codes": codes, "scales": weight.scales}
    if weight.minima is not None:
        tensors["minima"] = weight.minima
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    save_file(tensors, partial)
    os.replace(partial, file)
