"""Random PEFT folders for the tiny model of conftest.py."""

import json

import torch
from safetensors.torch import save_file


def save_adapter(folder, rank, seed):
    """A PEFT folder touching q_proj and down_proj of both layers; returns what it adds to which weight."""
    folder.mkdir()
    generator, tensors, delta = torch.Generator().manual_seed(seed), {}, {}
    for layer in range(2):
        for module, out, in_ in (("self_attn.q_proj", 64, 64), ("mlp.down_proj", 64, 96)):
            a, b = torch.randn(rank, in_, generator=generator), torch.randn(out, rank, generator=generator) * 0.1
            path = f"model.layers.{layer}.{module}"
            tensors[f"base_model.model.{path}.lora_A.weight"], delta[f"{path}.weight"] = a, 2 * b @ a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return delta
