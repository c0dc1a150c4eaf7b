"""Fills in the sizes that a configuration leaves to the engine, from the device, the model and the memory of this
machine, before the weights are loaded. The rules are in `engine.sizing`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import structlog
import torch

from engine.config import EngineConfig
from engine.model.adapters.shard import shard_adapters
from engine.model.checkpoints.stacks import MXFP4
from engine.model.layers.lora import target_names, target_path, target_widths
from engine.model.memory.allocation import count_pages, free_host_bytes
from engine.model.memory.arena import page_shape
from engine.model.ranks.collectives import Ranks
from engine.model.ranks.shard import WHOLE, Shard
from engine.model.runner.gpu_facts import count_gpus, find_gpu
from engine.model.spec.config import ModelSpec, read_spec
from engine.model.spec.draft import DraftFolder, find_draft
from engine.model.weights.quantize import coding_for
from engine.model.weights.reader import find_forms, parameter_shapes
from engine.sizing import GIB, HOST_SHARE, SET, Chosen, Model, StepSizes, adapter_bytes, cpu_sizes, gpu_sizes
from lora_kernels.forms import multiplies_fp8
from lora_kernels.grouped import grouped_bits
from lora_kernels.layout import TARGET_BYTES
from lora_kernels.linear import embedding_bits, kept_bits, packed_bits

log = structlog.get_logger("sizes")

Bits = Callable[[str], float]
"""Maps the name of a parameter to the bits that each of its weights takes in memory."""
EMBEDDING = "model.embed_tokens.weight"
EXPERTS = re.compile(r"\.mlp\.experts\.\d+\.\w+_proj\.weight$")
LINEARS = re.compile(r"(?:_proj|lm_head|\.mlp\.gate|\.shared_expert_gate)\.weight$")

DEFAULT_MAX_MODEL_LEN = 8192
TABLE_BYTES = 256 << 20
"""Maximum size in bytes of the tables through which kernels find adapters."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A configuration in which all sizes are set, and what the engine found out to set them."""

    config: EngineConfig
    """The configuration, with `max_seqs`, `token_budget` and `host_adapter_gb` set, and with no more
    `max_resident_adapters` than `fit_table` allows."""
    reasons: dict[str, str]
    """The reason for each of these settings, by its name; for `max_resident_adapters` only if it was lowered."""
    weight_bytes: int = 0
    draft_bytes: int = 0
    """`weight_bytes` and `draft_bytes`: bytes of the weights of the model and of the draft model in memory."""
    loaded_bytes: int = 0
    """Bytes of weights in the memory that pages are in: on a CPU those of all ranks, on a GPU those of this rank."""
    draft: DraftFolder | None = None
    """The draft model. None means that there is none."""
    reserved: int = 0
    """Bytes of a GPU's memory, besides weights and pages, that steps are expected to need."""

    def tell(self) -> None:
        """Log each of the sizes that the engine has set, with its reason."""
        for name, reason in self.reasons.items():
            log.info("size", setting=f"engine.{name}", value=getattr(self.config, name), reason=reason)


def fill_sizes(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> Sized:
    """Return the configuration of one rank with all sizes. `spec` is the whole model's, `shard` the rank's part. Raises
    ValueError, which says what to do, if the device cannot serve it."""
    asked, draft = config.max_resident_adapters, find_draft(config, spec, device)
    config = fit_table(config, spec, draft.spec) if draft else fit_table(config, spec)
    sized = _fill_sizes(config, spec, device, dtype, shard, draft)
    if config.max_resident_adapters == asked:
        return sized
    reason = f"as many as the table of adapters holds in {TABLE_BYTES >> 20} MiB, in place of {asked}"
    return replace(sized, reasons=sized.reasons | {"max_resident_adapters": reason})


def _fill_sizes(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    shard: Shard,
    draft: DraftFolder | None,
) -> Sized:
    whole, spec = spec, shard.spec(spec)
    page_bytes = count_page_bytes(config, whole, device, dtype, shard)
    chosen, bits = chosen_sizes(config, page_bytes), find_kept_bits(config, whole, device, dtype)
    weight_bytes = count_weight_bytes(whole, bits, shard)
    draft_bytes = count_weight_bytes(draft.spec, find_kept_bits(*draft, device, dtype)) if draft else 0
    if device.type == "cpu":
        # All ranks' weights are in this memory.
        loaded = sum(count_weight_bytes(whole, bits, one) for one in shard.everyone) + draft_bytes
        pool = count_pages(config, page_bytes, device, loaded) * page_bytes
        sized = with_sizes(config, device, cpu_sizes(chosen), loaded + pool)
        return replace(sized, weight_bytes=weight_bytes, draft_bytes=draft_bytes, loaded_bytes=loaded, draft=draft)
    from engine.model.steps.graph_plan import expected_bytes, row_bytes  # a machine without CUDA may have no triton

    costs = weight_bytes, dtype.itemsize, page_bytes // config.block_size, row_bytes(spec, dtype)
    model = Model(*costs, multiplied_share(whole, shard))
    captured = replace(config, graphs=config.graphs and not _has_quantised_experts(whole, bits, dtype))
    expected = partial(expected_bytes, captured, spec, dtype, device, max_model_len(config, spec))
    steps = gpu_sizes(find_gpu(device, dtype), model, chosen, expected)
    sized = with_sizes(config, device, steps)
    reserved = expected(sized.config.max_seqs, sized.config.token_budget)
    return replace(sized, weight_bytes=weight_bytes, loaded_bytes=weight_bytes, reserved=reserved)


def _has_quantised_experts(spec: ModelSpec, bits: Bits, dtype: torch.dtype) -> bool:
    """Return whether a GPU keeps experts quantised, for whose routing the host waits, so that no step is captured."""
    return any(EXPERTS.search(name) and bits(name) < 8 * dtype.itemsize for name in parameter_shapes(spec))


def warn_of_dequantised(weights: str, weight_bytes: int, dtype: torch.dtype) -> None:
    """Log a warning with the memory that the weights take, if their format, named `weights` (see `name_weights`), is
    MXFP4. No kernel multiplies that format, so that the weights are dequantised."""
    if MXFP4 in weights:
        log.warning("weights are dequantised", format=weights, dtype=str(dtype), gib=round(weight_bytes / GIB, 2))


def fit_table(config: EngineConfig, *specs: ModelSpec) -> EngineConfig:
    """Return the configuration with `max_resident_adapters` low enough that the tables of all models fit into
    TABLE_BYTES: by default, 2.5 GB with 48 layers of 128 experts."""
    of_adapter = sum(spec.layers * len(target_names(spec)) for spec in specs) * TARGET_BYTES
    return replace(config, max_resident_adapters=min(config.max_resident_adapters, max(1, TABLE_BYTES // of_adapter)))


def agreed(sized: Sized, ranks: Ranks) -> Sized:
    """Return the sizes with the least `max_seqs`, `token_budget` and host memory for adapters that any rank has found,
    because ranks find different amounts of free memory, and all need the same sizes."""
    config = sized.config
    own = (config.max_seqs, config.token_budget, int(config.host_adapter_gb * GIB))
    seqs, tokens, adapters = ranks.least(own)
    if ranks.count > 1:
        config = replace(config, max_seqs=seqs, token_budget=tokens, host_adapter_gb=adapters / GIB)
    return replace(sized, config=config)


def with_sizes(config: EngineConfig, device: torch.device, steps: StepSizes, host_bytes: int = 0) -> Sized:
    """Return the configuration with these sizes of steps. If `host_adapter_gb` is not configured, it becomes the host
    memory that is left for adapters when weights and pages take `host_bytes`."""
    config = config.sized(steps.max_seqs.value, steps.token_budget.value)
    reasons = {"max_seqs": steps.max_seqs.reason, "token_budget": steps.token_budget.reason}
    if config.host_adapter_gb:
        return Sized(config, reasons | {"host_adapter_gb": SET})
    free = free_host_bytes()
    swap = int(min(config.swap_gb * GIB, HOST_SHARE * config.machine_share * free))
    engines = count_gpus() if device.type == "cuda" else 1
    size = adapter_bytes(device.type, free, host_bytes + swap, engines, config.machine_share)
    return Sized(replace(config, host_adapter_gb=size.value / GIB), reasons | {"host_adapter_gb": size.reason})


def chosen_sizes(config: EngineConfig, page_bytes: int) -> Chosen:
    """Return the sizes and the ITL goal that the operator has configured, from which the engine works out the others.
    The size of the page pool is in bytes, for pages of `page_bytes`."""
    pool = config.num_pages * page_bytes or int(config.memory_gb * GIB)
    return Chosen(config.max_seqs, config.token_budget, pool, config.interactive.itl_s)


def find_kept_bits(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Bits:
    """Return a function that says how many bits each weight of a parameter takes in the device's memory. Raises
    ValueError if a GGUF file is damaged, or FP8 is configured and the device has no products of FP8."""
    if config.weights == "fp8" and not multiplies_fp8(device, dtype):
        raise ValueError(
            "engine.weights fp8 needs a GPU of compute capability 8.9 or later and bfloat16, "
            f"not {device.type}, {dtype}"
        )
    stored = find_forms(Path(config.model), spec, config.load_format)

    def bits(name: str) -> float:
        form = stored(name)
        coding = form.coding if config.weights == "auto" else coding_for(name, config.weights)
        kept = kept_bits(coding, device, dtype) if coding else None
        return kept or _dense_bits(name, spec, device, dtype, is_bf16=form.is_bf16 and coding is None)

    return bits


def _dense_bits(name: str, spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, is_bf16: bool) -> int:
    """Return the bits that each weight of a parameter takes in memory if it is not quantised, in the layout that
    linears make of it. With tied embeddings, the embedding also counts the copy that the head makes."""
    if EXPERTS.search(name):
        return grouped_bits(device, dtype, is_bf16=is_bf16)
    copied, whole = packed_bits(device, dtype, is_bf16=is_bf16), 8 * dtype.itemsize
    if LINEARS.search(name):
        return copied or whole
    if name == EMBEDDING:
        return embedding_bits(device, dtype, is_bf16=is_bf16) + (copied or 0) * spec.tied_embeddings
    return whole


def count_weights(spec: ModelSpec, shard: Shard = WHOLE) -> int:
    """Return how many weights a rank has. `spec` is the whole model's."""
    return sum(map(prod, shard.shapes(spec).values()))


def multiplied_share(spec: ModelSpec, shard: Shard = WHOLE) -> float:
    """Return the share of a rank's weights by which one row is multiplied: those of the experts that are chosen for it,
    and all that are not experts'. `spec` is the whole model's."""
    if spec.chosen_experts == 1:
        return 1.0
    of_experts = sum(prod(shape) for name, shape in shard.shapes(spec).items() if ".mlp.experts." in name)
    return 1.0 - (1.0 - spec.chosen_experts) * of_experts / count_weights(spec, shard)


def count_weight_bytes(spec: ModelSpec, bits: Bits, shard: Shard = WHOLE) -> int:
    """Return the bytes of all weights in a rank's memory, of which each takes the `bits` of its parameter. `spec` is
    the whole model's."""
    return int(sum(prod(shape) * bits(name) for name, shape in shard.shapes(spec).items()) / 8)


def stores_fp8(adapter_dtype: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether adapters are stored in FP8. Raises ValueError if that is configured for a CPU or fp32."""
    if adapter_dtype == "fp8" and (device.type != "cuda" or dtype == torch.float32):
        raise ValueError(
            f"engine.adapter_dtype fp8 needs device cuda and 16-bit weights, not {device.type} and {dtype}"
        )
    return adapter_dtype == "fp8"


def has_fp8_kv(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether KV is stored in FP8. Raises ValueError if that is configured, and the device is no GPU of compute
    capability 8.9 or later, or `dtype` is not of 16 bits."""
    if config.kv_dtype == "auto":
        return False
    capable = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    if not capable or dtype.itemsize != 2:
        raise ValueError(
            "engine.kv_dtype fp8 needs a GPU of compute capability 8.9 or later and 16-bit weights, "
            f"not {device.type}, {dtype}"
        )
    return True


def count_page_bytes(
    config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype, shard: Shard = WHOLE
) -> int:
    """Return the bytes of a page of KV on the pipeline stage that has most layers. `spec` is the whole model's."""
    most = replace(shard.spec(spec), layers=shard.most_layers(spec))
    return page_shape(most, config.block_size, has_fp8_kv(config, dtype, device)).elements * dtype.itemsize


def adapter_bytes_per_rank(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, shard: Shard = WHOLE) -> int:
    """Return the bytes that a LoRA adapter of rank 1 on all projections takes in the page pool of one process, on the
    stage where it takes most."""
    itemsize = 1 if config.adapter_dtype == "fp8" else dtype.itemsize
    names, widths = target_names(spec), shard_adapters(shard, spec).widths(target_widths(spec)).sum(axis=1)
    layers = [
        sum(int(width) for target, width in enumerate(widths) if target_path(spec, names, layer, target))
        for layer in range(spec.layers)
    ]
    stages = shard.stages or (range(spec.layers),)
    return max(sum(layers[stage.start : stage.stop]) for stage in stages) * itemsize


def read_served_spec(config: EngineConfig) -> ModelSpec:
    """Read the shape of the configured model from its folder, with rotary embeddings for the served length. Raises
    ValueError if it cannot be served, or sequences are longer than the model was made for."""
    spec = read_spec(Path(config.model))
    return spec.served(max_model_len(config, spec))


def max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the maximum length of a sequence in tokens. Raises ValueError if the configured one is beyond what the
    model was made for."""
    if config.max_model_len > spec.max_position:
        raise ValueError(f"engine.max_model_len is {config.max_model_len}, the model was made for {spec.max_position}")
    return config.max_model_len or min(spec.max_position, DEFAULT_MAX_MODEL_LEN)
