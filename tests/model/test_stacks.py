"""Checkpoints that stack experts, as transformers 4 and 5 and gpt-oss store them, and adapters of stacked experts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import save_adapter
from tiny_families import save_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.model.adapters.peft.loader import load_peft
from engine.model.adapters.peft.targets import target_shapes
from engine.model.checkpoints.stored import WeightsError
from engine.model.spec.config import read_spec
from engine.model.weights.reader import name_weights, open_weights, parameter_shapes

BLOCK = "model.layers.1.block_sparse_moe"
RENAMED = {
    f"{BLOCK}.input_linear.weight": f"{BLOCK}.experts.gate_up_proj",
    f"{BLOCK}.output_linear.weight": f"{BLOCK}.experts.down_proj",
    f"{BLOCK}.router.layer.weight": f"{BLOCK}.router.weight",
}
"""Names of transformers 4, and those of transformers 5."""


def rewrite(folder, change):
    """Saves what `change` makes of the tensors of a file."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def source(folder):
    return open_weights(folder, read_spec(folder))


@pytest.mark.parametrize("is_new", [False, True])
def test_granites_experts_are_read_in_both_layouts(is_new, tmp_path):
    experts = save_model("granitemoe", tmp_path).model.layers[1].block_sparse_moe
    if is_new:
        rewrite(tmp_path, lambda stored: {RENAMED.get(name, name): tensor for name, tensor in stored.items()})
    read = source(tmp_path)
    gate, up = experts.experts.gate_up_proj[2].chunk(2)
    for name, expected in (("gate", gate), ("up", up), ("down", experts.experts.down_proj[2])):
        assert torch.equal(read(f"model.layers.1.mlp.experts.2.{name}_proj.weight"), expected)
    assert torch.equal(read("model.layers.1.mlp.gate.weight"), experts.router.weight)


def test_every_parameter_of_gpt_oss_is_read(tmp_path):
    model = save_model("gpt_oss", tmp_path)
    read, experts, seen = source(tmp_path), model.model.layers[0].mlp.experts, 0
    for side, first in (("gate", 0), ("up", 1)):
        path = f"model.layers.0.mlp.experts.3.{side}_proj"
        assert torch.equal(read(f"{path}.weight"), experts.gate_up_proj[3][:, first::2].T)
        assert torch.equal(read(f"{path}.bias"), experts.gate_up_proj_bias[3][first::2])
    for name, shape in parameter_shapes(read_spec(tmp_path)).items():
        assert read(name).shape == shape
        seen += read(name).numel()
    assert seen == sum(parameter.numel() for parameter in model.parameters())


def save_mxfp4(folder, change=lambda blocks, scales: None):
    """Saves a tiny gpt-oss whose experts are in MXFP4. Returns their weights by name, as transformers reads them."""
    save_model("gpt_oss", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    generator, expected = torch.Generator().manual_seed(2), {}

    def quantised(stored):
        for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
            count, inputs, outputs = stored.pop(name).shape
            shape = count, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
            expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            change(blocks, scales)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return stored

    rewrite(folder, quantised)
    return expected


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path):
    expected, read, spec = save_mxfp4(tmp_path), source(tmp_path), read_spec(tmp_path)
    path = "model.layers.1.mlp.experts"
    for number in range(4):
        both, down = expected[f"{path}.gate_up_proj"][number].T, expected[f"{path}.down_proj"][number].T
        for name, weight in (("gate", both[0::2]), ("up", both[1::2]), ("down", down)):
            assert torch.equal(read(f"{path}.{number}.{name}_proj.weight").float(), weight)
    assert name_weights(tmp_path, spec, "auto", "auto", torch.bfloat16) == "mxfp4"


def test_damaged_mxfp4_is_refused_by_name(tmp_path):
    save_mxfp4(tmp_path, lambda blocks, scales: scales[:, 0].fill_(255))
    with pytest.raises(WeightsError, match=r"gate_up_proj_scales has scales that are not numbers"):
        source(tmp_path)("model.layers.0.mlp.experts.0.gate_proj.weight")
    for scale, refused in ((252, False), (254, True)):
        save_mxfp4(tmp_path, lambda blocks, scales, scale=scale: scales[:, 0].fill_(scale))
        read = source(tmp_path)
        if refused:
            with pytest.raises(
                WeightsError, match=r"down_proj_scales has scales with which weights are 2\^128 or more"
            ):
                read("model.layers.0.mlp.experts.0.down_proj.weight")
        else:
            assert read("model.layers.0.mlp.experts.0.down_proj.weight").max() > 2.0**125
    rewrite(tmp_path, lambda stored: {name: part for name, part in stored.items() if "1.mlp.experts.down" not in name})
    with pytest.raises(WeightsError, match=r"missing tensor model.layers.1.mlp.experts.down_proj_bl"):
        source(tmp_path)
    save_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(WeightsError, match="weights quantised by 'mxfp4' cannot be read"):
        source(tmp_path)


def test_granites_adapters_of_transformers_4_are_those_of_5(tmp_path):
    save_adapter("granitemoe", tmp_path)
    spec, folder = read_spec(tmp_path / "model"), tmp_path / "adapter"
    shapes = target_shapes(spec, source(tmp_path / "model"), "model")
    new, tensors = load_peft(folder, shapes), load_file(folder / "adapter_model.safetensors")
    for part, old in (
        (".experts.base_layer.", ".input_linear."),
        (".experts.", ".output_linear."),
        (".router.", ".router.layer."),
    ):
        tensors = {name.replace(part, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_parameters"] = ["input_linear.weight", "output_linear.weight"]
    config["target_modules"] = [*config["target_modules"], "router.layer"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    found = load_peft(folder, shapes)
    assert found.blocks.keys() == new.blocks.keys() and found.target_modules == new.target_modules
    for place, block in new.blocks.items():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.blocks[place], block, strict=True))
