"""Writes random PEFT adapters, for measurements that need many of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}

NUMBERS = 1 << 24


def write_adapters(
    model_dir: Path,
    out: Path,
    ranks: Sequence[int],
    seed: int = 0,
    on_written: Callable[[], None] = lambda: None,
    invocation: Sequence[int] = (),
) -> dict[str, Path]:
    """Write a random PEFT adapter for each rank, on all seven projections of a Llama-family model, or reuse its folder
    if that exists; call `on_written` after each. With `invocation`, which holds token ids, they are activated LoRAs.
    Returns name (`a0000` and so on) -> folder."""
    config = json.loads((model_dir / "config.json").read_text())
    # All adapters are slices of the same random numbers, at different offsets: drawing 13 GB takes twenty minutes.
    numbers = (torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed)) * 0.02).to(torch.bfloat16)
    rng, folders = random.Random(seed), {}
    for index, rank in enumerate(ranks):
        folder = folders[f"a{index:04}"] = out / f"a{index:04}-{rank}"
        if not (folder / "adapter_config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            save_file(_tensors(config, rank, numbers, rng), folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(_adapter_config(rank, list(invocation) or None)))
        on_written()
    return folders


def _adapter_config(rank: int, invocation: list[int] | None) -> dict[str, object]:
    targets = [name for names in PROJECTIONS.values() for name in names]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": targets,
        "bias": "none",
        "alora_invocation_tokens": invocation,
    }


def _tensors(config: dict[str, int], rank: int, numbers: torch.Tensor, rng: random.Random) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    widths = {"q_proj": (hidden, query), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (query, hidden)}
    widths |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for block, names in PROJECTIONS.items():
            for name in names:
                prefix = f"base_model.model.model.layers.{layer}.{block}.{name}"
                shapes = {"lora_A": (rank, widths[name][0]), "lora_B": (widths[name][1], rank)}
                for side, shape in shapes.items():
                    size = shape[0] * shape[1]
                    start = rng.randrange(len(numbers) - size)
                    tensors[f"{prefix}.{side}.weight"] = numbers[start : start + size].view(shape).clone()
    return tensors
