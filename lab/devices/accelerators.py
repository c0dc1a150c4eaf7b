"""The accelerators among which a plan for a model chooses, and the cost of a step on one or several of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from engine.model.ranks.stages import split_layers
from engine.sizing import DEVICE_SHARE, FLOP_REACHED, GIB, MEMORY_REACHED, micro_batches
from lab.devices.cost import DeviceSpec, RooflineCost, StepWork
from lab.devices.links import LINK_SHARE
from lab.devices.shapes import Shape
from lora_kernels.layout import ALIGN, RANK_TILE, plan_layout
from lora_kernels.quantized import INT4, INT8, Coding, find_coding

BLOCK_SIZE = 16
STEP_OVERHEAD_S = 0.002
"""Seconds of a step that neither bandwidth nor arithmetic explain, fitted to the published throughputs below. They are
more than `engine.sizing.HOST_OVERHEAD_S`, which counts only what this engine's host adds to a step."""
EXCHANGE_S, LINK_REACHED = 30e-6, 0.2
"""Seconds that an all-reduce takes however little it sums, and the fraction of the links' bandwidth that it reaches.
With these, the overhead above and the fractions of `engine.sizing`, 60 of 63 throughputs that TensorRT-LLM 0.17
publishes for Llama 3.1 8B and 70B on one to eight H100, H200 and A100 are predicted within 25 %
(tests/lab/devices/test_published.py)."""
EXPERT_REACHED = 0.8
"""Fraction that products with experts reach of the bandwidth and arithmetic of dense matrices: they are many smaller
products, and some experts have more rows than others. With it, 86 of 90 throughputs that TensorRT-LLM 0.17 publishes
for Mixtral 8x7B on one to eight of these GPUs are predicted within 25 %; without it, 68, most of the others too
high."""
RESERVED = 3 << 30
"""Bytes of each device's memory that are set aside for steps. Weights and pages get the rest."""
HOST_BYTES = 128 * GIB
NOISE, COPY_BYTES_PER_S, DISK_BYTES_PER_S = 0.02, 5e10, 2e9
"""Sigma of the noise of a step's duration, bytes a second of copies from host memory to the device, and bytes a second
of reads from disk. The values are those of lab/devices/profiles/h100-8b.json, which names their sources."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU with the figures of its data sheet, by which plans estimate step times and memory."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float
    """Floating-point operations a second of dense matrix products in bf16."""
    flop8_per_s: float
    """Floating-point operations a second of dense matrix products in FP8; 0 means that the device does not have FP8."""
    link_bytes_per_s: float
    """Bandwidth between devices of one machine, both directions together."""


ACCELERATORS: Mapping[str, Accelerator] = {
    device.name: device
    for device in (
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
    """A number format of weights and KV: bytes of a weight and of an element of the KV cache, whether products are in
    FP8, and the integer coding of weights, or None."""

    name: str
    weight_bytes: float
    kv_bytes: int
    is_fp8: bool = False
    coding: Coding | None = None


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("bf16", 2.0, 2),
        Form("fp8", 1.0, 1, is_fp8=True),
        Form("int8", 1.06, 2, coding=INT8),
        Form("int4", 0.56, 2, coding=INT4),
    )
}
"""Forms by name. With fp8, KV is in FP8, too, unless `served_form` changes that. int8 and int4 have a scale for each
group of 32 weights, and are multiplied in 16 bits."""


def served_form(name: str, shape: Shape, ranks: int, stages: int = 1) -> Form:
    """Return the number format `name` as an engine of `stages` stages of `ranks` devices serves it: with KV in 16 bits
    in place of FP8 on several devices (see `EngineConfig`) or with partly rotated heads."""
    form = FORMS[name]
    return replace(form, kv_bytes=2) if ranks * stages > 1 or shape.rotates_parts else form


def fits(shape: Shape, form: Form, accelerator: Accelerator, ranks: int, stages: int = 1) -> bool:
    """Return whether a model can be served by `stages` stages of `ranks` devices each: its layers can be divided among
    them, they have FP8 if it is needed, and there is room for at least a sequence of 1,024 tokens."""
    if not divides(shape, form, ranks) or stages > shape.layers or (form.is_fp8 and not accelerator.flop8_per_s):
        return False
    return BLOCK_SIZE * count_pages(shape, form, accelerator, ranks, stages) >= 1024


def divides(shape: Shape, form: Form, ranks: int) -> bool:
    """Return whether a layer's heads, KV heads, MLP and experts can be divided evenly among `ranks` devices, without
    cutting groups that share a scale, or normalising heads together."""
    if ranks == 1:
        return True
    widths = [shape.heads, shape.kv_heads, *shape.inner_widths]
    if shape.norms_all_heads or any(width % ranks for width in widths):
        return False
    return all(_keeps_groups(form, width, ranks) for width in (shape.heads * shape.head_dim, *shape.inner_widths))


def _keeps_groups(form: Form, width: int, ranks: int) -> bool:
    """Return whether the `width` inputs of a weight can be divided among `ranks` devices without cutting a group that
    shares a scale. True if the weight is not quantised."""
    coding = find_coding(form.coding, width) if form.coding else None
    return coding is None or width // ranks % coding.group == 0


def weight_bytes(shape: Shape, form: Form, ranks: int = 1, stages: int = 1) -> list[float]:
    """Return the bytes of weights on each device, one entry for each stage: 1/`ranks` of every matrix but whole
    routers, and in the first stage of embedding and head, in 16 bits."""
    layers, ends = _layer_bytes(shape, form, ranks), _end_bytes(shape, ranks)
    stage_bytes = [sum(layers[part.start : part.stop]) for part in split_layers(layers, ends, stages)]
    return [stage_bytes[0] + ends, *stage_bytes[1:]]


def _layer_bytes(shape: Shape, form: Form, ranks: int) -> list[float]:
    """Return the bytes of each layer's weights on one of the ranks that share it. Layers without experts come first."""
    layer_bytes = []
    for has_experts, count in shape.kinds_of_layers.items():
        weights = sum(inputs * outputs for inputs, outputs in shape.projections(has_experts))
        whole = shape.router_weights / count if has_experts and count else 0.0
        layer_bytes += [(whole + (weights - whole) / ranks) * form.weight_bytes] * count
    return layer_bytes


def _end_bytes(shape: Shape, ranks: int) -> float:
    return 2.0 * (shape.weights - shape.linear_weights) / ranks


def count_pages(shape: Shape, form: Form, accelerator: Accelerator, ranks: int, stages: int = 1) -> int:
    """Return the number of KV pages for which the device with the most weights has room beside them; negative if these
    do not fit. Pages have the KV of as many layers as the stage with most of them."""
    parts = split_layers(_layer_bytes(shape, form, ranks), _end_bytes(shape, ranks), stages)
    page = BLOCK_SIZE * shape.kv_bytes(form.kv_bytes) * max(map(len, parts)) / shape.layers / ranks
    left = accelerator.memory_bytes - RESERVED - max(weight_bytes(shape, form, ranks, stages))
    return int(DEVICE_SHARE * left / page)


@lru_cache
def stored_bytes_per_rank(shape: Shape, page_bytes: int) -> int:
    """Return the bytes of pages that an adapter on all projections takes for each unit of rank, in 16 bits, with what
    tiles (16 rows, or what fits) leave empty (see `lora_kernels.layout`)."""
    elements, pages = page_bytes // 2, 0
    kinds = [(np.asarray(shape.projections(kind), np.int32), count) for kind, count in shape.kinds_of_layers.items()]
    rows = min([max(1, (elements - ALIGN) // int(widths.max())) for widths, _ in kinds] + [RANK_TILE])
    for widths, layers in kinds:
        pages += plan_layout(np.full((layers, len(widths)), rows, np.int32), widths, elements).num_pages
    return pages * page_bytes // rows


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
    """Return the device description with which the simulator runs an engine of `stages` pipeline stages of `ranks`
    tensor-parallel devices each. `max_seqs` and `token_budget` are settings of that engine."""
    page = BLOCK_SIZE * shape.kv_bytes(form.kv_bytes)
    cost = _cost(shape, form, accelerator, ranks, page)
    pages = count_pages(shape, form, accelerator, ranks, stages)
    engine = {
        "num_pages": pages,
        "host_pages": pages,
        "block_size": BLOCK_SIZE,
        "max_seqs": max_seqs,
        "max_model_len": shape.max_position,
        "token_budget": token_budget,
        "chosen_experts": shape.chosen,
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
        stored_bytes_per_rank(shape, page),
        DISK_BYTES_PER_S,
        engine,
    )


def _cost(shape: Shape, form: Form, accelerator: Accelerator, ranks: int, page_bytes: int) -> RooflineCost:
    """Return the roofline model of step durations on `ranks` tensor-parallel devices. They have the bandwidth and
    arithmetic of all devices together, and each layer adds two all-reduces over rings of links."""
    sums = 2 * shape.layers if ranks > 1 else 0
    moved = 2 * (ranks - 1) / ranks * shape.hidden * 2 / (accelerator.link_bytes_per_s * LINK_REACHED)
    row_weights = shape.linear_weights - shape.expert_weights
    row_lora, expert_lora = shape.lora_widths - shape.expert_lora_widths, shape.expert_lora_widths
    return RooflineCost(
        memory_bytes_per_s=ranks * accelerator.bytes_per_s,
        memory_reached=MEMORY_REACHED,
        flop_per_s=ranks * (accelerator.flop8_per_s if form.is_fp8 else accelerator.flop_per_s),
        flop_reached=FLOP_REACHED,
        copy_bytes_per_s=COPY_BYTES_PER_S,
        step_overhead_s=STEP_OVERHEAD_S + sums * EXCHANGE_S,
        weight_bytes=row_weights * form.weight_bytes + 2 * shape.head_weights,
        flop_per_token=2 * row_weights,
        flop_per_sample=2 * shape.head_weights,
        flop_per_attention_pair=4 * shape.heads * shape.head_dim * shape.layers,
        flop_per_lora_row=2 * (row_lora + shape.chosen * expert_lora),
        kv_bytes_per_token=shape.kv_bytes(form.kv_bytes),
        adapter_bytes_per_rank=2 * row_lora,
        page_bytes=page_bytes,
        exchange_s_per_token=sums * moved,
        chosen=shape.chosen,
        expert_reached=EXPERT_REACHED,
        expert_bytes=shape.expert_weights * form.weight_bytes,
        expert_flop_per_token=2 * shape.expert_weights * shape.chosen,
        expert_adapter_bytes_per_rank=2 * expert_lora,
    )


def _in_stages(cost: RooflineCost, shape: Shape, accelerator: Accelerator, ranks: int, stages: int) -> PipelineCost:
    """Return the model of step durations on an engine of `stages` pipeline stages, given that of all layers on one
    stage's devices, `cost`. Ranks send rows of hidden states in 16 bits."""
    head_bytes = 2.0 * shape.head_weights
    layers = replace(
        cost,
        step_overhead_s=cost.step_overhead_s - STEP_OVERHEAD_S,
        weight_bytes=cost.weight_bytes - head_bytes,
        flop_per_sample=0.0,
    )
    hop = shape.hidden * 2 / (accelerator.link_bytes_per_s / 2 * LINK_SHARE)
    return PipelineCost(layers, stages, STEP_OVERHEAD_S, head_bytes, cost.flop_per_sample, EXCHANGE_S, hop)


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """A `CostModel` of a model whose layers are divided among `stages` stages."""

    # A step's rows are cut into m micro-batches, which pass s stages in m + s - 1 slots, in each of which a stage reads
    # its weights and computes one. The first stage also embeds and computes the head.
    layers: RooflineCost
    """Cost of all layers on the devices of one stage. Its `step_overhead_s` is the time that all-reduces between these
    devices take however little they sum."""
    stages: int
    step_overhead_s: float
    head_bytes: float
    flop_per_sample: float
    hop_s: float
    """Fixed latency in seconds of sending a micro-batch's hidden states to the next stage, to which `hop_s_per_token`
    adds the time of the transfer."""
    hop_s_per_token: float

    def seconds(self, work: StepWork) -> float:
        """Return the duration in seconds of a step with this work, without noise."""
        if not work.tokens:
            return self.layers.seconds(work) / self.stages
        count = self.micro_batches(work.tokens)
        part = StepWork._make(amount / count for amount in work)
        turn = self.layers.seconds(part) / self.stages + self.hop_s + part.tokens * self.hop_s_per_token
        return self.step_overhead_s + (count + self.stages - 1) * turn + self._head_s(work)

    def micro_batches(self, rows: int) -> int:
        """Return into how many micro-batches a step of so many rows is cut."""
        weights_s = (self.layers.weight_bytes + self.layers.expert_bytes) / self.layers.bandwidth
        row_s = (self.layers.flop_per_token + self.layers.expert_flop_per_token) / self.layers.speed
        return micro_batches(rows, self.stages, weights_s / row_s)

    def _head_s(self, work: StepWork) -> float:
        read_s = self.head_bytes / self.layers.bandwidth
        return max(read_s, work.samples * self.flop_per_sample / self.layers.speed)
