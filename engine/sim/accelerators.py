"""Devices that a model may be planned for, and what a step costs on one or several of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.executor.cost import DeviceSpec, RooflineCost
from engine.sim.links import LINK_SHARE
from engine.sim.pipeline import PipelineCost
from engine.sim.shapes import Shape
from engine.sizing import DEVICE_SHARE, FLOP_REACHED, GIB, MEMORY_REACHED

BLOCK_SIZE = 16
STEP_OVERHEAD_S = 0.002
"""Seconds of a step that neither bandwidth nor arithmetic explain."""
EXCHANGE_S, LINK_REACHED = 30e-6, 0.2
"""Seconds that an all-reduce takes however little it sums, and the fraction of the links' bandwidth that it reaches.
With these, the overhead above and the fractions of `engine.sizing`, 60 of 63 throughputs that TensorRT-LLM 0.17
publishes for Llama 3.1 8B and 70B on one to eight H100, H200 and A100 are predicted within 25 %
(tests/sim/test_published.py)."""
RESERVED = 3 << 30
"""Bytes of a device that steps need beside weights and pages."""
HOST_BYTES = 128 * GIB
NOISE, COPY_BYTES_PER_S, DISK_BYTES_PER_S = 0.02, 5e10, 2e9
"""As in engine/sim/devices/h100-8b.json, which names their sources."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The figures of a data sheet."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float
    """Dense bf16 products."""
    flop8_per_s: float
    """Dense FP8 products; 0 means that there are none."""
    link_bytes_per_s: float
    """Bandwidth between devices of one machine, both directions together."""


ACCELERATORS: Mapping[str, Accelerator] = {
    one.name: one
    for one in (
        Accelerator("h200", 141e9, 4.8e12, 989e12, 1979e12, 900e9),
        Accelerator("h100", 80e9, 3.35e12, 989e12, 1979e12, 900e9),
        Accelerator("a100", 80e9, 2.039e12, 312e12, 0.0, 600e9),
        Accelerator("a100-40gb", 40e9, 1.555e12, 312e12, 0.0, 600e9),
        Accelerator("l40s", 48e9, 0.864e12, 362e12, 733e12, 64e9),
        Accelerator("l4", 24e9, 0.3e12, 121e12, 242e12, 64e9),
        Accelerator("a10g", 24e9, 0.6e12, 70e12, 0.0, 64e9),
    )
}
"""Devices by name, from NVIDIA's data sheets (SXM where there are several; without sparsity; A10G: Amazon's)."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of weights: bytes of a weight of the layers, and of a number of KV, and whether products are in 8 bits."""

    name: str
    weight_bytes: float
    kv_bytes: int
    is_fp8: bool = False


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (Form("bf16", 2.0, 2), Form("fp8", 1.0, 1, is_fp8=True), Form("int8", 1.06, 2), Form("int4", 0.56, 2))
}
"""Forms by name. FP8 has KV in FP8, too; int8 and int4 are groups of 32 with scales, multiplied in 16 bits."""


def fits(shape: Shape, form: Form, accelerator: Accelerator, ranks: int, stages: int = 1) -> bool:
    """Return whether a model can be served by `stages` stages of `ranks` devices each: its heads and layers can be
    divided among them, they have FP8 if it is needed, and there is room for at least a sequence of 1,024 tokens."""
    if shape.heads % ranks or shape.kv_heads % ranks or (form.is_fp8 and not accelerator.flop8_per_s):
        return False
    return pool_bytes(shape, form, accelerator, ranks * stages) >= 1024 * shape.kv_bytes(form.kv_bytes)


def weight_bytes(shape: Shape, form: Form) -> float:
    """Return the bytes of all weights in memory; embedding and output head stay in 16 bits."""
    return shape.linear_weights * form.weight_bytes + 2 * (shape.weights - shape.linear_weights)


def pool_bytes(shape: Shape, form: Form, accelerator: Accelerator, devices: int) -> float:
    """Return the bytes that all devices of an engine have for pages; negative if the weights do not fit."""
    return DEVICE_SHARE * (devices * (accelerator.memory_bytes - RESERVED) - weight_bytes(shape, form))


def device_of(
    shape: Shape,
    form: Form,
    accelerator: Accelerator,
    ranks: int,
    stages: int = 1,
    *,
    max_seqs: int,
    token_budget: int,
) -> DeviceSpec:
    """Return the description of an engine over `stages` stages, which have a part of the layers each (pipeline
    parallelism), of `ranks` devices, which share each of these layers (tensor parallelism)."""
    page = BLOCK_SIZE * shape.kv_bytes(form.kv_bytes)
    per_rank = 2 * shape.lora_widths
    cost = _cost(shape, form, accelerator, ranks, page)
    pages = int(pool_bytes(shape, form, accelerator, ranks * stages) / page)
    engine = {
        "num_pages": pages,
        "host_pages": pages,
        "block_size": BLOCK_SIZE,
        "max_seqs": max_seqs,
        "max_model_len": shape.max_position,
        "token_budget": token_budget,
        "max_resident_adapters": 1024,
        "host_adapter_bytes": HOST_BYTES,
    }
    name = f"{ranks} x {accelerator.name}" if ranks > 1 else accelerator.name
    name = f"{stages} stages of {name}" if stages > 1 else name
    return DeviceSpec(
        name,
        f"{shape.name} in {form.name} on {name}",
        cost if stages == 1 else _in_stages(cost, shape, accelerator, ranks, stages),
        NOISE,
        page,
        per_rank,
        DISK_BYTES_PER_S,
        engine,
    )


def _cost(shape: Shape, form: Form, accelerator: Accelerator, ranks: int, page_bytes: int) -> RooflineCost:
    """Return what steps cost on `ranks` devices that share each layer: they have the bandwidth and arithmetic of all,
    and sum their results twice a layer, over rings of links."""
    sums = 2 * shape.layers if ranks > 1 else 0
    moved = 2 * (ranks - 1) / ranks * shape.hidden * 2 / (accelerator.link_bytes_per_s * LINK_REACHED)
    return RooflineCost(
        memory_bytes_per_s=ranks * accelerator.bytes_per_s,
        memory_reached=MEMORY_REACHED,
        flop_per_s=ranks * (accelerator.flop8_per_s if form.is_fp8 else accelerator.flop_per_s),
        flop_reached=FLOP_REACHED,
        copy_bytes_per_s=COPY_BYTES_PER_S,
        step_overhead_s=STEP_OVERHEAD_S + sums * EXCHANGE_S,
        weight_bytes=shape.linear_weights * form.weight_bytes + 2 * shape.head_weights,
        flop_per_token=2 * shape.linear_weights,
        flop_per_sample=2 * shape.head_weights,
        flop_per_attention_pair=4 * shape.heads * shape.head_dim * shape.layers,
        flop_per_lora_row=2 * shape.lora_widths,
        kv_bytes_per_token=shape.kv_bytes(form.kv_bytes),
        adapter_bytes_per_rank=2 * shape.lora_widths,
        page_bytes=page_bytes,
        exchange_s_per_token=sums * moved,
    )


def _in_stages(cost: RooflineCost, shape: Shape, accelerator: Accelerator, ranks: int, stages: int) -> PipelineCost:
    """Return what steps cost whose layers are divided among stages with this cost of all layers. Each rank sends rows
    of hidden states, in 16 bits, to that of the next stage."""
    head_bytes = 2.0 * shape.head_weights
    layers = replace(
        cost,
        step_overhead_s=cost.step_overhead_s - STEP_OVERHEAD_S,
        weight_bytes=cost.weight_bytes - head_bytes,
        flop_per_sample=0.0,
    )
    hop = shape.hidden * 2 / (accelerator.link_bytes_per_s / 2 * LINK_SHARE)
    return PipelineCost(layers, stages, STEP_OVERHEAD_S, head_bytes, cost.flop_per_sample, EXCHANGE_S, hop)
