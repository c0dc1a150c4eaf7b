"""Writes random PEFT adapters, for measurements that need many of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model.layers.lora import ROUTERS, target_names, target_path, target_widths
from engine.model.spec.config import ModelSpec, read_spec

NUMBERS = 1 << 24


def write_adapters(
    model_dir: Path,
    out: Path,
    ranks: Sequence[int],
    seed: int = 0,
    on_written: Callable[[], None] = lambda: None,
    invocation: Sequence[int] = (),
) -> dict[str, Path]:
    """Write one random PEFT adapter for each of `ranks`, unless its folder exists, calling `on_written`, for all
    projections but routers. `invocation`, token ids, makes them activated LoRAs. Return name (`a0000` and so on) ->
    folder."""
    spec = read_spec(model_dir)
    shapes = dict(_projections(spec))
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    # All adapters are slices of the same random numbers, at different offsets: drawing 13 GB takes twenty minutes.
    numbers = (torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed)) * 0.02).to(torch.bfloat16)
    rng, folders = random.Random(seed), {}
    for index, rank in enumerate(ranks):
        folder = folders[f"a{index:04}"] = out / f"a{index:04}-{rank}"
        if not (folder / "adapter_config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            save_file(_tensors(shapes, rank, numbers, rng), folder / "adapter_model.safetensors")
            config = _adapter_config(rank, targets, list(invocation) or None)
            (folder / "adapter_config.json").write_text(json.dumps(config))
        on_written()
    return folders


def _projections(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path of each projection that random adapters change, all but routers, and its numbers of inputs and
    outputs."""
    names, widths = target_names(spec), target_widths(spec).tolist()
    for layer in range(spec.layers):
        for target, (inputs, outputs) in enumerate(widths):
            path = None if names[target] in ROUTERS else target_path(spec, names, layer, target)
            if path is not None:
                yield path, (inputs, outputs)


def _adapter_config(rank: int, targets: list[str], invocation: list[int] | None) -> dict[str, object]:
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


def _tensors(
    shapes: Mapping[str, tuple[int, int]], rank: int, numbers: torch.Tensor, rng: random.Random
) -> dict[str, torch.Tensor]:
    tensors = {}
    for module, (inputs, outputs) in shapes.items():
        for side, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            size = shape[0] * shape[1]
            start = rng.randrange(len(numbers) - size)
            part = numbers[start : start + size].view(shape).clone()
            tensors[f"base_model.model.{module}.{side}.weight"] = part
    return tensors
