"""Random PEFT folders for the tiny model of conftest.py."""

import json

import torch
from safetensors.torch import save_file

Q_PROJ, DOWN_PROJ = ("self_attn.q_proj", 64, 64), ("mlp.down_proj", 64, 96)


def save_adapter(folder, rank, seed, modules=(Q_PROJ, DOWN_PROJ)):
    """A PEFT folder touching `modules` of both layers; returns what it adds to which weight."""
    folder.mkdir()
    generator, tensors, delta = torch.Generator().manual_seed(seed), {}, {}
    for layer in range(2):
        for module, out, in_ in modules:
            a, b = torch.randn(rank, in_, generator=generator), torch.randn(out, rank, generator=generator) * 0.1
            path = f"model.layers.{layer}.{module}"
            tensors[f"base_model.model.{path}.lora_A.weight"], delta[f"{path}.weight"] = a, 2 * b @ a
            tensors[f"base_model.model.{path}.lora_B.weight"] = b
    names = [module.rpartition(".")[2] for module, *_ in modules]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return delta
