"""Reads a model folder's weights, or makes seeded random ones. Checks names and shapes before it reads any."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.model.gguf_weights import GgufFile
from engine.model.spec import ModelSpec
from engine.process.model_source import GGUF_NAME
from lora_kernels.quantized import Coding, Weight

Shape = tuple[int, ...]
KV_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.(?:(?:attn\.)?[kqv]_scale|k_proj\.k_scale|v_proj\.v_scale)")
"""Names of scales for attention in FP8, in checkpoints of llm-compressor, vLLM and ModelOpt."""
CPU = torch.device("cpu")
WeightSource = Callable[[str], Weight]
"""Maps the name of a parameter to its tensor, in the dtype in which it is stored, or to its quantised form."""


class WeightsError(ValueError):
    """The folder's weights are not those of the model that its config.json describes."""


def open_weights(
    folder: Path, spec: ModelSpec, load_format: str = "auto", seed: int = 0, device: torch.device = CPU
) -> WeightSource:
    """Checks a model's stored weights and returns a function that reads them one by one.

    Args:
        load_format: auto reads safetensors (one file, or shards with an index) or a GGUF file; dummy makes random
            weights from `seed`.
        device: device on which dummy weights are made; stored ones are always read to the CPU.

    Raises:
        WeightsError: a file or a tensor is missing, or a tensor is unexpected or of the wrong shape; the message names
            it.
    """
    expected = parameter_shapes(spec)
    if load_format == "dummy":
        return lambda name: _dummy(name, expected[name], seed, device)
    if (folder / GGUF_NAME).exists():
        file = GgufFile(folder / GGUF_NAME, spec)
        _check(file.shapes, expected, spec)
        return file.read
    stored = _read_headers(_locate(folder))
    _check({name: shape for name, (_, shape) in stored.items()}, expected, spec)
    return lambda name: _read(stored[name][0], name)


def find_codings(folder: Path, spec: ModelSpec, load_format: str) -> Callable[[str], Coding | None]:
    """Returns a function that says how the weights of a parameter are coded where the folder stores them; None means
    that they are not quantised. Raises ValueError if a GGUF file is damaged."""
    if load_format == "dummy" or not (folder / GGUF_NAME).exists():
        return lambda name: None
    return GgufFile(folder / GGUF_NAME, spec).coding


def read_kv_scales(folder: Path, spec: ModelSpec) -> Tensor | None:
    """Returns the factors by which K and V in FP8 are multiplied, fp32 [layers, 2, kv_heads], from a checkpoint made
    for such a cache, or None if it has none. A checkpoint has one factor for a layer's K and one for its V, or one for
    each KV head. Raises WeightsError if a factor is missing, not positive, or of another shape."""
    if (folder / GGUF_NAME).exists():
        return None
    stored = {name: path for name, (path, _) in _read_headers(_locate(folder)).items() if KV_SCALE.fullmatch(name)}
    if not any(name.endswith(("k_scale", "v_scale")) for name in stored):
        return None
    scales = torch.empty(spec.layers, 2, spec.kv_heads)
    for layer in range(spec.layers):
        for number, side in enumerate("kv"):
            prefix = f"model.layers.{layer}.self_attn"
            names = (f"{prefix}.{place}{side}_scale" for place in ("", "attn.", f"{side}_proj."))
            name = next((name for name in names if name in stored), None)
            if name is None:
                raise WeightsError(f"missing tensor {prefix}.{side}_scale: other layers have scales for K and V in FP8")
            scale = _read(stored[name], name).float().flatten()
            if len(scale) not in (1, spec.kv_heads) or not ((scale > 0) & scale.isfinite()).all():
                raise WeightsError(f"tensor {name} must have 1 or {spec.kv_heads} positive numbers")
            scales[layer, number] = scale
    return scales


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Returns the shape of every parameter of the model, by its Hugging Face name."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, out, in_, bias in (
        ("self_attn.q_proj", spec.query_width, hidden, spec.qkv_bias),
        ("self_attn.k_proj", spec.kv_width, hidden, spec.qkv_bias),
        ("self_attn.v_proj", spec.kv_width, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, spec.query_width, spec.o_bias),
        ("mlp.gate_proj", inner, hidden, spec.mlp_bias),
        ("mlp.up_proj", inner, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inner, spec.mlp_bias),
    ):
        shapes[f"{name}.weight"] = (out, in_)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if spec.qk_norm:
        shapes |= {f"self_attn.{side}_norm.weight": (spec.head_dim,) for side in "qk"}
    return shapes


def _locate(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        for file in files:
            if file.parent != folder:
                raise WeightsError(f"{index} names {file}, which is not in its folder")
        return files
    if single.is_file():
        return [single]
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f"; {pickled[0]} is a pickle, which is never read" if pickled else ""
    raise WeightsError(f"{folder} has no model.safetensors and no model.safetensors.index.json{hint}")


def _read_headers(paths: list[Path]) -> dict[str, tuple[Path, Shape]]:
    """Maps the name of each parameter to the file that holds it, and its shape. Raises WeightsError if a file is
    missing."""
    found: dict[str, tuple[Path, Shape]] = {}
    for path in paths:
        if not path.is_file():
            raise WeightsError(f"{path.parent} has no {path.name}, which its index names")
        with safe_open(path, framework="pt") as file:
            found |= {name: (path, tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
    return found


def _check(stored: Mapping[str, Shape], expected: Mapping[str, Shape], spec: ModelSpec) -> None:
    missing = [name for name in expected if name not in stored]
    if missing:
        raise WeightsError(f"missing tensor {missing[0]} ({len(missing)} in all)")
    unexpected = [name for name in stored if name not in expected and not _is_redundant(name, spec)]
    if unexpected:
        raise WeightsError(f"unexpected tensor {unexpected[0]} ({len(unexpected)} in all)")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise WeightsError(f"tensor {name} has shape {list(stored[name])}, the model needs {list(shape)}")


def _is_redundant(name: str, spec: ModelSpec) -> bool:
    """Returns whether a tensor, which some writers store, is not needed for the model itself."""
    if KV_SCALE.fullmatch(name):
        return True  # only a KV cache in FP8 needs them: see `read_kv_scales`
    return name.endswith("rotary_emb.inv_freq") or (spec.tied_embeddings and name == "lm_head.weight")


def _read(path: Path, name: str) -> Tensor:
    # Opened for each tensor, which takes 0.3 ms, because an open file stays mapped into the engine's memory.
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _dummy(name: str, shape: Shape, seed: int, device: torch.device) -> Tensor:
    """Returns random fp32 weights, ones for norms, that depend on seed, name, shape and kind of device only, not on the
    weights that were made before."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(shape, generator=generator, device=device) * 0.02
