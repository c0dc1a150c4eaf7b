"""Quantises a checkpoint's weights when they are loaded, and keeps the results on disk for the next start."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.model.spec.config import ModelSpec
from engine.model.weights.reader import CPU, WeightSource, open_weights
from engine.process.files import replacing
from lora_kernels.fp8 import FP8, quantize_fp8
from lora_kernels.quantized import (
    INT4,
    INT8,
    AnyCoding,
    Coding,
    QuantizedWeight,
    Weight,
    dense,
    find_coding,
    pack_halves,
    quantize,
    unpack_halves,
)

log = structlog.get_logger("engine")

ENDS = re.compile(r"(?:lm_head|embed_tokens)\.weight")
"""Finds the names of the embedding and the head, which have 8 bits in any case: they decide which token is next."""
LINEARS = re.compile(r"_proj\.weight")
VERSION = 1
"""Version of quantisation. A change makes the engine quantise again what it kept."""


def kept_folder(state_dir: Path, model: Path) -> Path:
    """Return the folder in `state_dir` that keeps the quantised weights of the model's folder `model`. Its name changes
    with the name, size or modification time of any weights file, so that changed weights are quantised anew."""
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return state_dir / "weights" / f"{model.name}-{digest.hexdigest()[:12]}"


def open_source(config: EngineConfig, spec: ModelSpec, device: torch.device) -> WeightSource:
    """Return the function that reads the weights of the configured model one by one, quantised if so configured. Raises
    what `open_weights` raises."""
    folder = Path(config.model)
    source = open_weights(folder, spec, config.load_format, config.seed, device)
    if config.weights == "auto":
        return source
    kept = kept_folder(Path(config.state_dir), folder) if config.state_dir else None
    return quantized_source(source, config.weights, kept, device)


def quantized_source(
    source: WeightSource, weights: str, folder: Path | None, device: torch.device = CPU
) -> WeightSource:
    """Return a source that quantises on `device` what `source` reads, to `int8`, `int4` or `fp8`, and keeps it in
    `folder`, if given (see `kept_folder`). The source raises ValueError for weights that are quantised or not
    finite."""

    def read(name: str) -> Weight:
        coding = coding_for(name, weights)
        if coding is None:
            return source(name)
        if not isinstance(coding, Coding):
            return quantize_fp8(_plain(name, source(name)).to(device))
        file = folder / f"{name}.{coding.bits}.v{VERSION}.safetensors" if folder else None
        kept = _load(file) if file else None
        return kept if kept is not None else _quantize(name, source(name), coding, file, device)

    return read


def coding_for(name: str, weights: str) -> AnyCoding | None:
    """Return the coding of a parameter's weights under `int8`, `int4` or `fp8`; None means that they are not quantised,
    as are the embedding and the head under `fp8`."""
    if weights == "fp8":
        return FP8 if LINEARS.search(name) else None
    if ENDS.search(name):
        return INT8
    return (INT4 if weights == "int4" else INT8) if LINEARS.search(name) else None


def _quantize(name: str, weight: Weight, coding: Coding, file: Path | None, device: torch.device) -> Weight:
    plain = _plain(name, weight)
    fitting = find_coding(coding, plain.shape[1])
    if fitting is None:
        return plain
    quantized = quantize(plain.to(device), fitting)
    if file:
        _save(file, quantized)
    return quantized


def _plain(name: str, weight: Weight) -> Tensor:
    """Return a weight of a checkpoint as a tensor, to be quantised. Raises ValueError if it is quantised in integers
    already, or has numbers that are not finite."""
    if isinstance(weight, QuantizedWeight):
        raise ValueError(f"{name} is quantised already: engine.weights must be auto for this checkpoint")
    plain = dense(weight)
    if not plain.isfinite().all():
        raise ValueError(f"{name} has numbers that are not finite")
    return plain


def _load(file: Path) -> QuantizedWeight | None:
    """Return the quantised weight that an earlier start kept in `file`. None means that there is none that can be
    read."""
    try:
        with safe_open(file, framework="pt") as stored:
            found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    bits, group, zero = (int(number) for number in found["coding"])
    codes = found["codes"]
    if bits == INT4.bits:
        codes = unpack_halves(codes)
    coding = Coding(bits, group, None if zero < 0 else zero)
    return QuantizedWeight(coding, codes, found["scales"], found.get("minima"))


def _save(file: Path, weight: QuantizedWeight) -> None:
    """Keep a quantised weight in `file` for the next start. Errors are only logged: the next start then quantises it
    again."""
    coding, codes = weight.coding, weight.codes
    zero = -1 if coding.zero is None else coding.zero
    tensors = {
        "coding": torch.tensor([coding.bits, coding.group, zero]),
        "codes": pack_halves(codes) if coding.bits == INT4.bits else codes,
        "scales": weight.scales,
    }
    if weight.minima is not None:
        tensors["minima"] = weight.minima
    try:
        with replacing(file) as temporary:
            save_file(tensors, temporary)
    except (OSError, SafetensorError) as error:
        log.warning("quantised_weight_unsaved", path=str(file), error=str(error))
