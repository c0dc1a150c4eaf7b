"""What `compile_worker` compiles of experts, at the shapes of Qwen3-30B-A3B, gpt-oss-20b and Mixtral 8x7B."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_kernels.gpu.grouped_linear import expert_constants
from lora_kernels.gpu.grouped_tuning import SHIPPED
from lora_kernels.gpu.triton_expert_tiles import WARPS, expert_tiles_kernel, tile_constants
from lora_kernels.gpu.triton_experts import COMBINE_BLOCK, PLACE_BLOCK, ROWS
from lora_kernels.gpu.triton_grouped import grouped_kernel
from lora_kernels.gpu.triton_lora_tuning import SHIPPED as LORA
from lora_kernels.gpu.triton_routing import choose_experts_kernel, combine_kernel, place_entries_kernel

POINTERS = {
    **dict.fromkeys(("expert_weights_ptr", "expert_biases_ptr", "entries_ptr"), "bf16"),
    "weights_ptr": "fp32",
    "order_ptr": "i64",
}
MODELS = {"qwen": (128, 8, 1536, 2048), "mixtral": (8, 2, 28672, 4096)}
"""Experts, experts of a row, and outputs and inputs of gate and up."""
BIASED = {"gpt-oss": (32, 4, 5760, 2880)}
"""The same of models whose experts have biases."""


def cases(capability: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    for model, (count, _, features, width) in {**MODELS, **BIASED}.items():
        for kind, tile in (("few", SHIPPED.few), ("many", SHIPPED.many)):
            constants = {**expert_constants(count), "FEATURES": features, "WIDTH": width, **tile.constants}
            launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
            constants["HAS_BIASES"] = model in BIASED
            yield f"experts {model}, {kind}", grouped_kernel, constants, launch
    for model, (count, top_k, *_) in MODELS.items():
        block = {"EXPERTS": count, "BLOCK": count, "TOP_K": top_k, "CHOSEN": top_k, "NORMALISED": False, "ROWS": ROWS}
        yield f"choose experts {model}", choose_experts_kernel, block, {"num_warps": ROWS}
        place = {"TOP_K": top_k, "HAS_ORDER": True, "BLOCK": PLACE_BLOCK}
        yield f"place entries {model}", place_entries_kernel, place, {"num_warps": 4}
        tiles = {**expert_constants(count), "SLOTS_EACH": 48 * (count + 3), "TARGETS": 3, **tile_constants(LORA, True)}
        for write in (False, True):
            name = f"expert tiles {model}{', written' if write else ''}"
            yield name, expert_tiles_kernel, {**tiles, "WRITE": write}, {"num_warps": WARPS}
        yield f"combine {model}", combine_kernel, {"TOP_K": top_k, "BLOCK": COMBINE_BLOCK}, {"num_warps": 4}
