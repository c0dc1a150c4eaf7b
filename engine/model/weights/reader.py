"""Reads a model folder's weights, or makes seeded random ones. Checks names and shapes before it reads any."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.checkpoints.folder import Folder
from engine.model.checkpoints.stacks import Part
from engine.model.checkpoints.stored import Shape, StoredTensors, WeightsError
from engine.model.spec.config import ExpertsSpec, ModelSpec
from engine.model.spec.fused import fuse, fused_name, select_rows
from engine.model.weights.gguf import GgufFile
from engine.process.model_source import GGUF_NAME
from lora_kernels.quantized import AnyCoding, Weight

KV_SCALE = re.compile(r"model\.layers\.\d+\.self_attn\.(?:(?:attn\.)?[kqv]_scale|k_proj\.k_scale|v_proj\.v_scale)")
"""Names of scales for attention in FP8, in checkpoints of llm-compressor, vLLM and ModelOpt."""
CPU = torch.device("cpu")
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
WeightSource = Callable[[str], Weight]
"""Maps the name of a parameter to its tensor, in the dtype in which it is stored, or to its quantised form."""


def open_weights(
    folder: Path, spec: ModelSpec, load_format: str = "auto", seed: int = 0, device: torch.device = CPU
) -> WeightSource:
    """Check a model's stored weights and return a function that reads them one by one to the CPU. Raises WeightsError,
    which names it, if one is missing, unexpected or of the wrong shape.

    Args:
        load_format: auto, or dummy, which makes random weights from `seed` on `device`.
    """
    if load_format == "dummy":
        expected = parameter_shapes(spec)
        return lambda name: _dummy(name, expected[name], seed, device)
    stored = _open(folder, spec)
    _check(stored.shapes, stored_shapes(spec), spec)
    if spec.fused:
        return _parts_of(stored.read, spec)
    return lambda name: stored.read(spec.stored_name(name))


class StoredForm(NamedTuple):
    """How a model folder stores a parameter's weights: their `coding` (None means that they are not quantised), and
    whether all of their numbers are known to be bf16's."""

    coding: AnyCoding | None
    is_bf16: bool


def find_forms(folder: Path, spec: ModelSpec, load_format: str) -> Callable[[str], StoredForm]:
    """Return a function that says how the folder stores the weights of a parameter. Raises ValueError if a GGUF file is
    damaged, or WeightsError as `open_weights` does."""
    if load_format == "dummy":
        return lambda name: StoredForm(None, False)
    stored = _open(folder, spec)

    def form(name: str) -> StoredForm:
        name = fused_name(name) if spec.fused else spec.stored_name(name)
        return StoredForm(stored.coding(name), stored.is_bf16(name))

    return form


def name_weights(folder: Path, spec: ModelSpec, load_format: str, weights: str, dtype: torch.dtype) -> str:
    """Return the name of a model's format: those of its quantised matrices, joined by `+`, or of `dtype`, or the
    setting `weights` unless it is `auto`. Raises ValueError as `find_forms` does."""
    if weights != "auto":
        return weights
    sizes = Counter[str]()
    if load_format != "dummy":
        stored = _open(folder, spec)
        for name, shape in stored_shapes(spec).items():
            if form := stored.form(name):
                sizes[form] += prod(shape)
    return "+".join(form for form, _ in sizes.most_common()) or DTYPE_NAMES[dtype]


def _open(folder: Path, spec: ModelSpec) -> GgufFile | Folder:
    if (folder / GGUF_NAME).exists():
        return GgufFile(folder / GGUF_NAME, spec)
    return Folder(folder, stored_shapes(spec), stacked_parts(spec), spec.aliases)


def _parts_of(read: WeightSource, spec: ModelSpec) -> WeightSource:
    """Turn `read`, which reads the stored, fused projections of a checkpoint, into a source of the parameters fused in
    them. It keeps a fused projection in memory until its last part is read, because parts are read in order."""
    whole, rows = fuse(parameter_shapes(spec))
    kept: dict[str, Weight] = {}

    def part(name: str) -> Weight:
        stored, start, stop = rows[name]
        if stop - start == whole[stored][0]:
            return read(stored)
        weight = kept.pop(stored, None)
        weight = read(stored) if weight is None else weight
        kept.clear()
        if stop < whole[stored][0]:
            kept[stored] = weight
        return select_rows(weight, start, stop)

    return part


def read_kv_scales(folder: Path, spec: ModelSpec) -> Tensor | None:
    """Return the factors by which K and V in FP8 are multiplied, fp32 [layers, 2, kv_heads], from a checkpoint with one
    for a layer or for each KV head; None without. Raises WeightsError if one is invalid."""
    if (folder / GGUF_NAME).exists():
        return None
    stored = StoredTensors(folder)
    scale_names = [name for name in stored if KV_SCALE.fullmatch(name)]
    if not any(name.endswith(("k_scale", "v_scale")) for name in scale_names):
        return None
    scales = torch.empty(spec.layers, 2, spec.kv_heads)
    for layer in range(spec.layers):
        for number, side in enumerate("kv"):
            prefix = f"model.layers.{layer}.self_attn"
            names = (f"{prefix}.{place}{side}_scale" for place in ("", "attn.", f"{side}_proj."))
            name = next((name for name in names if name in stored), None)
            if name is None:
                raise WeightsError(f"missing tensor {prefix}.{side}_scale: other layers have scales for K and V in FP8")
            scale = stored.read(name).float().flatten()
            if len(scale) not in (1, spec.kv_heads) or not ((scale > 0) & scale.isfinite()).all():
                raise WeightsError(f"tensor {name} must have 1 or {spec.kv_heads} positive numbers")
            scales[layer, number] = scale
    return scales


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of every parameter of the model, by the name that it has in a Llama of Hugging Face."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    for layer in range(spec.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec, layer).items()}
    return shapes


def stored_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of every tensor of a checkpoint whose weights are not quantised, by its Hugging Face name."""
    if spec.fused:
        return fuse(parameter_shapes(spec))[0]
    return {spec.stored_name(name): shape for name, shape in parameter_shapes(spec).items()}


def stacked_parts(spec: ModelSpec) -> dict[str, Part]:
    """Return, for each parameter of experts by its Hugging Face name, the part of a stacked tensor of the checkpoint
    that it is. Empty for families whose checkpoints store each parameter as a tensor."""
    if spec.experts is None or spec.experts.stacks is None:
        return {}
    stacks, width, count, hidden = spec.experts.stacks, spec.experts.width, spec.experts.count, spec.hidden_size
    gate, up = slice(width), slice(width, None)
    if stacks.interleaved:
        gate, up = slice(0, None, 2), slice(1, None, 2)
    projections = (
        ("gate_proj", stacks.gate_up, (2 * width, hidden), gate),
        ("up_proj", stacks.gate_up, (2 * width, hidden), up),
        ("down_proj", stacks.down, (hidden, width), slice(None)),
    )
    parts: dict[str, Part] = {}
    for layer, number in product(filter(spec.has_experts, range(spec.layers)), range(count)):
        prefix = f"model.layers.{layer}"
        for name, tensor, (outputs, inputs), rows in projections:
            path, stored = spec.stored_name(f"{prefix}.mlp.experts.{number}.{name}"), f"{prefix}.{tensor}"
            parts[f"{path}.weight"] = Part(stored, (count, outputs, inputs), stacks.transposed, number, rows)
            if spec.experts.biased:
                parts[f"{path}.bias"] = Part(f"{stored}_bias", (count, outputs), False, number, rows)
    return parts


def _layer_shapes(spec: ModelSpec, layer: int) -> dict[str, Shape]:
    hidden = spec.hidden_size
    shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in spec.norms if name}
    for name, out, in_, bias in (
        ("self_attn.q_proj", spec.query_width, hidden, spec.qkv_bias),
        ("self_attn.k_proj", spec.kv_width, hidden, spec.qkv_bias),
        ("self_attn.v_proj", spec.kv_width, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, spec.query_width, spec.o_bias),
    ):
        shapes[f"{name}.weight"] = (out, in_)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.heads,)
    if spec.has_mlp(layer):
        shapes |= _mlp_shapes(mlp_path(spec, layer), hidden, spec.intermediate_size, spec.mlp_bias)
    if spec.experts and spec.has_experts(layer):
        shapes |= _expert_shapes(spec.experts, hidden)
    if spec.qk_norm:
        widths = (spec.head_dim,) * 2 if spec.qk_norm == "head" else (spec.query_width, spec.kv_width)
        shapes |= {f"self_attn.{side}_norm.weight": (width,) for side, width in zip("qk", widths, strict=True)}
    return shapes


def mlp_path(spec: ModelSpec, layer: int) -> str:
    """Return the path, in its layer, of the MLP that computes all rows: `mlp.shared_expert` in a layer with experts,
    else `mlp`."""
    return "mlp.shared_expert" if spec.has_experts(layer) else "mlp"


def _mlp_shapes(path: str, hidden: int, inner: int, bias: bool = False) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for name, out, in_ in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        shapes[f"{path}.{name}.weight"] = (out, in_)
        if bias:
            shapes[f"{path}.{name}.bias"] = (out,)
    return shapes


def _expert_shapes(experts: ExpertsSpec, hidden: int) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts.count, hidden)}
    if experts.biased:
        shapes["mlp.gate.bias"] = (experts.count,)
    if experts.shared:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    for number in range(experts.count):
        shapes |= _mlp_shapes(f"mlp.experts.{number}", hidden, experts.width, experts.biased)
    return shapes


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
    """Return whether a tensor that some checkpoints have is not needed: an FP8 KV scale, rotary frequencies, or the
    head of a model with tied embeddings."""
    if KV_SCALE.fullmatch(name):
        return True  # only a KV cache in FP8 needs them: see `read_kv_scales`
    return name.endswith("rotary_emb.inv_freq") or (spec.tied_embeddings and name == "lm_head.weight")


def _dummy(name: str, shape: Shape, seed: int, device: torch.device) -> Tensor:
    """Return random fp32 weights, ones for norms, that depend on seed, name, shape and kind of device only, not on the
    weights that were made before."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(shape, generator=generator, device=device) * 0.02
