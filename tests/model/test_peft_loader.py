"""Adapters loaded as PEFT loads them, or refused with a reason that helps."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import PeftConfig, PeftModel, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import LoraConfig, LoraLayer
from peft_folders import DORA, TARGETS, VARIANTS, base_model, save_adapter
from safetensors.torch import load_file, save_file

from engine.model.adapters.peft.config import parse_config
from engine.model.adapters.peft.fields import HANDLED, HARMLESS, KINDS, LATEST_PEFT, PLAIN_INITIALISATIONS, REFUSED
from engine.model.adapters.peft.folder import read_adapter
from engine.model.adapters.peft.gguf import MAX_HEADER_BYTES
from engine.model.adapters.peft.loader import LoadedAdapter, load_peft
from engine.model.adapters.peft.settings import AdapterError
from engine.model.adapters.peft.targets import NO_GGUF, TargetShapes
from tests.examples import examples

WIDTHS = np.array([[32, 32], [32, 16], [32, 16], [32, 32], [32, 48], [32, 48], [48, 32]], dtype=np.int32)


def base_linear(module: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    linear = base_model().get_submodule(module)
    bias = getattr(linear, "bias", None)  # the embedding has none
    return linear.weight.detach(), None if bias is None else bias.detach()


SHAPES = TargetShapes(layers=3, targets=TARGETS, widths=WIDTHS, base_linears=base_linear, base_names=("tiny",))
MAGNITUDE = "lora_magnitude_vector"
PREFIX = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(folder, target_modules=list(TARGETS))
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A sound adapter that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "adapter")


def edit_config(folder: Path, **changes) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder: Path, change) -> None:
    """`change` edits the dictionary of tensors, or returns another one."""
    tensors = load_file(folder / "adapter_model.safetensors")
    changed = change(tensors)
    tensors = changed if isinstance(changed, dict) else tensors
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def refusal(folder: Path, shapes: TargetShapes = SHAPES) -> str:
    with pytest.raises(AdapterError) as caught:
        load_peft(folder, shapes)
    return str(caught.value)


def delta(adapter: LoadedAdapter, layer: int, target: str) -> torch.Tensor | None:
    block = adapter.blocks.get((layer, TARGETS.index(target)))
    return None if block is None else block[1] @ block[0]


# --- as PEFT ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_deltas_equal_pefts_own(options, tmp_path):
    save_adapter(tmp_path, **options)
    adapter = load_peft(tmp_path, SHAPES)
    model = PeftModel.from_pretrained(base_model(), tmp_path)
    adapted = 0
    for layer, decoder in enumerate(model.base_model.model.model.layers):
        for target in TARGETS:
            module = getattr(decoder.self_attn if target in TARGETS[:4] else decoder.mlp, target)
            ours, place = delta(adapter, layer, target), (layer, TARGETS.index(target))
            assert (ours is not None) == isinstance(module, LoraLayer)
            assert adapter.ranks[place] == (module.r["default"] if ours is not None else 0)
            if ours is not None:
                adapted += 1
                theirs = module.get_delta_weight("default")
                assert float((ours - theirs).abs().max()) <= 1e-6 * max(1.0, float(theirs.abs().max()))
    assert adapted == len(adapter.blocks) > 0


@pytest.mark.parametrize("options", DORA.values(), ids=DORA.keys())
def test_dora_makes_the_weights_that_peft_merges(options, tmp_path):
    save_adapter(tmp_path, **options)
    adapter = load_peft(tmp_path, SHAPES)
    merged = PeftModel.from_pretrained(base_model(), tmp_path).merge_and_unload()
    assert adapter.scaled.sum() == len(adapter.scales) == len(adapter.blocks) > 0
    for place, (a, b) in adapter.blocks.items():
        theirs, (weight, bias) = merged.get_submodule(SHAPES.module(place)), base_linear(SHAPES.module(place))
        scale, shift = adapter.scales[place]
        assert torch.allclose((1 + scale)[:, None] * weight + b @ a, theirs.weight, rtol=1e-5, atol=1e-5)
        assert torch.allclose((1 + scale) * bias + shift, theirs.bias, atol=1e-6)
        assert scale.abs().max() > 0.1


def test_what_a_loaded_adapter_says_of_itself(tmp_path):
    save_adapter(tmp_path, target_modules=["up_proj", "q_proj"], rank_pattern={"up_proj": 9})
    adapter = load_peft(tmp_path, SHAPES)
    assert adapter.target_modules == ("q_proj", "up_proj")
    assert adapter.rank == 9
    assert adapter.ranks.dtype == np.int32
    assert adapter.ranks.tolist() == [[4, 0, 0, 0, 0, 9, 0]] * 3
    assert {(a.dtype, b.dtype) for a, b in adapter.blocks.values()} == {(torch.float32, torch.float32)}
    assert adapter.blocks[2, 5][0].shape == (9, 32)
    assert adapter.blocks[2, 5][1].shape == (48, 9)


def test_scale_is_folded_into_b(folder):
    plain = load_peft(folder, SHAPES)
    edit_config(folder, lora_alpha=8 * 3)
    louder = load_peft(folder, SHAPES)
    for place, (a, b) in plain.blocks.items():
        assert torch.equal(louder.blocks[place][0], a)
        assert torch.allclose(louder.blocks[place][1], 3 * b)


def test_an_adapter_name_inside_the_keys_is_accepted(folder):
    plain = load_peft(folder, SHAPES)
    edit_weights(folder, lambda tensors: {key.replace(".weight", ".default.weight"): t for key, t in tensors.items()})
    named = load_peft(folder, SHAPES)
    assert all(torch.equal(named.blocks[place][1], b) for place, (_, b) in plain.blocks.items())


def test_all_linear_written_in_the_file(folder):
    edit_config(folder, target_modules="All-Linear")
    assert len(load_peft(folder, SHAPES).blocks) == 21


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_fields_of_training_change_nothing(key, folder):
    before = load_peft(folder, SHAPES).adapter_hash
    edit_config(folder, **{key: "CAUSAL_LM"})
    assert load_peft(folder, SHAPES).adapter_hash == before


def test_a_field_unknown_here_is_accepted_while_it_is_off(folder):
    edit_config(folder, a_new_option=None, another=False, more=[], others={}, last="")
    assert load_peft(folder, SHAPES).rank == 4


def test_a_field_that_peft_does_not_know_is_a_warning_as_in_peft(folder):
    before = load_peft(folder, SHAPES).adapter_hash
    edit_config(folder, loraplus_lr_ratio=16, lorap_emb_lr=1e-06, enable_lora=[True, False], fan_in_fan_out=True)
    with pytest.warns(UserWarning, match=r"\['enable_lora', 'lorap_emb_lr', 'loraplus_lr_ratio'\].* ignored"):
        PeftConfig.from_pretrained(str(folder))
    assert load_peft(folder, SHAPES).adapter_hash == before
    settings = read_adapter(folder, 1 << 20, NO_GGUF).settings
    assert [warning.split()[0] for warning in settings.warnings] == [
        "'enable_lora'",
        "'lorap_emb_lr'",
        "'loraplus_lr_ratio'",
        "'fan_in_fan_out'",
    ]


def test_what_peft_writes_has_no_warnings(folder):
    assert read_adapter(folder, 1 << 20, NO_GGUF).settings.warnings == ()


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_pefts_configurations_is_read_harmless_or_refused(kind):
    known = KINDS[kind]
    fields = {field.name for field in fields_of(PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)])}
    assert fields - known.handled - known.harmless - known.refused - REFUSED.keys() == set()
    assert known.refused <= fields
    assert tuple(map(int, peft.__version__.split(".")[:2])) == LATEST_PEFT, "read what a later PEFT has added"


@pytest.mark.parametrize("key", sorted(KINDS["ADALORA"].refused - REFUSED.keys()))
def test_what_is_not_served_in_another_kind_is_refused_by_name(key):
    config = {"peft_type": "ADALORA", "target_modules": ["q_proj"], key: [1]}
    with pytest.raises(AdapterError, match=f"'{key}' is .* retrain without it"):
        parse_config(json.dumps(config).encode())


def test_every_initialisation_of_peft_is_plain_or_changes_the_base():
    """Initialisations that change the base weights are refused, and no others."""
    named = [name for part in get_args(get_type_hints(LoraConfig)["init_lora_weights"]) for name in get_args(part)]
    changing = {"olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq", "lora_ga"}
    assert {name for name in named if name not in PLAIN_INITIALISATIONS} == changing & {*named}


# --- identity -----------------------------------------------------------------------------------------------------


def test_identity_is_the_content(folder, tmp_path):
    first = load_peft(folder, SHAPES).adapter_hash
    assert len(first) == 32
    assert int(first, 16) >= 0
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    edit_config(copy, target_modules=list(reversed(TARGETS)), base_model_name_or_path="/somewhere/else", revision="x")
    assert load_peft(copy, SHAPES).adapter_hash == first


@pytest.mark.parametrize("change", [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}], ids=str)
def test_identity_follows_the_configuration(change, folder):
    first = load_peft(folder, SHAPES).adapter_hash
    edit_config(folder, **change)
    assert load_peft(folder, SHAPES).adapter_hash != first


def test_identity_follows_the_order_of_patterns(folder):
    edit_config(folder, alpha_pattern={"q_proj": 3, "self_attn.q_proj": 4})
    first = load_peft(folder, SHAPES)
    edit_config(folder, alpha_pattern={"self_attn.q_proj": 4, "q_proj": 3})
    second = load_peft(folder, SHAPES)
    assert first.adapter_hash != second.adapter_hash
    assert torch.allclose(first.blocks[0, 0][1] * 4, second.blocks[0, 0][1] * 3)


def test_identity_follows_one_weight(folder):
    first = load_peft(folder, SHAPES).adapter_hash
    edit_weights(folder, lambda tensors: next(iter(tensors.values())).view(-1)[0].add_(1))
    assert load_peft(folder, SHAPES).adapter_hash != first


# --- refused: the configuration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(REFUSED.keys() - HANDLED))
def test_what_is_not_served_is_refused_by_name(key, folder):
    edit_config(folder, **{key: True})
    message = refusal(folder)
    assert repr(key) in message
    assert REFUSED[key] in message


def test_options_that_an_empty_value_switches_on_are_refused(folder):
    edit_config(folder, kasa_config={})
    assert "kasa_config" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "OFT"}, ["peft_type", "OFT", "LORA"]),
        ({"peft_type": None}, ["peft_type"]),
        ({"bias": "all"}, ["bias", "all"]),
        ({"bias": "lora_only"}, ["bias", "lora_only"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["init_lora_weights", "pissa_niter_4", "base weights"]),
        ({"init_lora_weights": "loftq"}, ["init_lora_weights", "loftq"]),
        ({"brand_new_option": 3, "peft_version": "0.22.0"}, ["brand_new_option", "3", "not known", "0.22.0"]),
        ({"target_modules": None}, ["target_modules is missing"]),
        ({"target_modules": []}, ["target_modules is missing"]),
        ({"target_modules": 7}, ["target_modules must be"]),
        ({"target_modules": ["q_proj", 7]}, ["target_modules must be"]),
        ({"target_modules": ["c_attn"]}, ["none of the model's projections", "q_proj"]),
        ({"target_modules": "(q_proj"}, ["target_modules", "not a regular expression"]),
        ({"target_modules": "x" * 5000}, ["5000 characters"]),
        ({"target_modules": "q_proj", "layers_to_transform": [1]}, ["layers_to_transform", "as a list"]),
        ({"layers_to_transform": [3]}, ["layer 3", "layers 0 to 2", "another base"]),
        ({"layers_to_transform": ["a"]}, ["layers_to_transform must be"]),
        ({"layers_pattern": "layers"}, ["layers_pattern", "without layers_to_transform"]),
        ({"r": 0}, ["rank 0", "1 to 256"]),
        ({"r": 257}, ["rank 257", "1 to 256"]),
        ({"r": 4.5}, ["'r' must be an integer"]),
        ({"r": True}, ["'r' must be an integer"]),
        ({"r": 5}, ["rank 4", "says 5"]),
        ({"rank_pattern": {"v_proj": 6}}, ["v_proj", "rank 4", "says 6"]),
        ({"rank_pattern": {"v_proj": "6"}}, ["v_proj", "integer"]),
        ({"rank_pattern": ["v_proj"]}, ["rank_pattern must be an object"]),
        ({"rank_pattern": {"[": 4}}, ["rank_pattern", "not a regular expression"]),
        ({"alpha_pattern": {"v_proj": math.nan}}, ["v_proj", "number", "nan"]),
        ({"lora_alpha": math.inf}, ["lora_alpha", "number", "inf"]),
        ({"lora_alpha": "16"}, ["lora_alpha", "number"]),
        ({"use_rslora": "yes"}, ["use_rslora", "true or false"]),
    ],
    ids=str,
)
def test_configurations_refused(change, words, folder):
    edit_config(folder, **change)
    message = refusal(folder)
    assert [word for word in words if word not in message] == []


def test_an_expression_without_end_is_stopped(folder):
    edit_config(folder, target_modules=r"(?:(?:.|[a-z])+)+(?:(?:.|[a-z])+)+\d_proj")
    assert "takes too long" in refusal(folder)


def test_all_expressions_together_are_stopped(folder, monkeypatch):
    """Each entry alone takes microseconds. A name is matched with all of them once, not for each use of its rank."""
    names = {f"layers.{number}.x": 4 for number in range(4000)}
    edit_config(folder, rank_pattern=names)
    assert load_peft(folder, SHAPES).rank == 4
    monkeypatch.setattr("engine.model.adapters.peft.settings.ADAPTER_SECONDS", 0.005)
    assert "takes over 0.005 s, at last '(.*\\\\.)?(layers." in refusal(folder)
    settings = read_adapter(folder, 1 << 20, NO_GGUF).settings
    monkeypatch.setattr(settings.matching, "_left", 1.0)
    settings.rank_of("model.layers.0.self_attn.q_proj")
    monkeypatch.setattr(settings.matching, "_left", 0.0)
    assert settings.scale_of("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", "\xff", '{"r": 1e999999}', "[" * 100_000], ids=lambda t: t[:9]
)
def test_malformed_json(text, folder):
    (folder / "adapter_config.json").write_bytes(text.encode("latin-1"))
    assert "adapter_config.json" in refusal(folder) or "peft_type" in refusal(folder)


# --- refused: the files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_files_are_named(name, folder):
    (folder / name).unlink()
    message = refusal(folder)
    assert name in message
    assert str(folder) in message


def test_a_missing_folder(tmp_path):
    assert f"{tmp_path / 'nowhere'} is not a folder" in refusal(tmp_path / "nowhere")


def test_a_file_for_a_folder(folder):
    assert "is not a folder" in refusal(folder / "adapter_config.json")


def test_a_folder_for_a_file(folder):
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()
    assert "is not a file" in refusal(folder)


def test_a_pickle_is_never_opened(folder):
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.bin")  # opening it would hang
    message = refusal(folder)
    assert "adapter_model.bin" in message
    assert "safe_serialization" in message


def test_a_pickle_beside_safetensors_does_not_matter(folder):
    os.mkfifo(folder / "adapter_model.bin")
    assert load_peft(folder, SHAPES).rank == 4


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_of_the_folder_are_refused(name, folder, tmp_path):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert "leaves the adapter's folder" in refusal(folder)


def test_links_in_circles(folder):
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to("adapter_config.json")
    assert "cannot be read" in refusal(folder)


def test_links_inside_the_folder_and_to_it(folder, tmp_path):
    (folder / "adapter_model.safetensors").rename(folder / "weights")
    (folder / "adapter_model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(folder)
    assert load_peft(tmp_path / "link", SHAPES).rank == 4


def test_the_links_of_a_hub_cache(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "f00d"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).rename(blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert load_peft(snapshot, SHAPES).rank == 4


def test_a_file_too_large_for_any_adapter_is_not_read(folder):
    with open(folder / "adapter_model.safetensors", "ab") as file:
        file.truncate(1 << 40)
    assert "no adapter of this model has over" in refusal(folder)


def test_a_file_too_large_for_host_memory_is_not_read(folder):
    size = (folder / "adapter_model.safetensors").stat().st_size
    with open(folder / "adapter_model.safetensors", "ab") as file:
        file.truncate(MAX_HEADER_BYTES + 8 * size)
    assert "no adapter" not in refusal(folder)
    assert "engine.host_adapter_gb has no room" in refusal(folder, replace(SHAPES, most_numbers=size // 2))


@pytest.mark.parametrize("size", [0, 7, 8, 300, -1])
def test_truncated_weights(size, folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "damaged or cut short" in refusal(folder)


def test_a_huge_header(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**63) + file.read_bytes()[8:])
    assert "damaged or cut short" in refusal(folder)


# --- refused: the tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (f"{PREFIX}.0.self_attn.w_pack.lora_A.weight", ["matches no module", "q_proj"]),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", ["matches no module"]),
        (f"{PREFIX}.0.mlp.q_proj.lora_A.weight", ["matches no module"]),
        (f"{PREFIX}.3.self_attn.q_proj.lora_A.weight", ["layer 3", "layers 0 to 2", "tiny", "another base"]),
        (f"{PREFIX}.{'9' * 5000}.self_attn.q_proj.lora_A.weight", ["matches no module"]),
        (f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector", ["DoRA", "does not say use_dora"]),
        (f"{PREFIX}.0.self_attn.q_proj.lora_B.bias", ["biases are not supported", "lora_bias"]),
        (f"{PREFIX}.0.self_attn.q_proj.bias", ["biases are not supported", "bias='none'"]),
        ("base_model.model.lm_head.lora_A.weight", ["lm_head", "not supported"]),
        ("base_model.model.model.embed_tokens.lora_embedding_A", ["embed", "not supported"]),
        (f"{PREFIX}.0.self_attn.q_proj.lora_A.other.weight", ["more than one adapter", "lora_A.weight"]),
    ],
    ids=lambda value: value[-60:] if isinstance(value, str) else "",
)
def test_tensors_without_a_place_are_named(key, words, folder):
    edit_weights(folder, lambda tensors: tensors.update({key: torch.zeros(4, 32)}))
    message = refusal(folder)
    assert repr(key[:200]) in message
    assert [word for word in words if word not in message] == []


@pytest.fixture
def dora(tmp_path) -> Path:
    save_adapter(tmp_path / "dora", use_dora=True)
    return tmp_path / "dora"


@pytest.mark.parametrize("written", ["lora_magnitude_vector.weight", "lora_magnitude_vector.default.weight"])
def test_other_ways_to_write_a_magnitude(written, dora):
    plain = load_peft(dora, SHAPES)
    side = "default.weight" if "default" in written else "weight"

    def rename(key):
        return key.replace("A.weight", f"A.{side}").replace("B.weight", f"B.{side}").replace(MAGNITUDE, written)

    edit_weights(dora, lambda tensors: {rename(key): tensor for key, tensor in tensors.items()})
    assert all(torch.equal(scale, plain.scales[place]) for place, scale in load_peft(dora, SHAPES).scales.items())


def test_two_magnitudes_are_two_adapters(dora):
    key = f"{PREFIX}.0.self_attn.q_proj.{MAGNITUDE}"
    edit_weights(dora, lambda tensors: tensors.update({f"{key}.other": tensors[key].clone()}))
    assert "more than one adapter" in refusal(dora)


def test_a_missing_magnitude(dora):
    edit_weights(dora, lambda tensors: tensors.pop(f"{PREFIX}.1.self_attn.v_proj.lora_magnitude_vector"))
    assert "model.layers.1.self_attn.v_proj has no lora_magnitude_vector" in refusal(dora)


def test_magnitudes_that_the_config_does_not_mention(dora):
    edit_config(dora, use_dora=False)
    assert "does not say use_dora" in refusal(dora)


def test_a_magnitude_of_another_shape(dora):
    edit_weights(dora, lambda t: t.update({f"{PREFIX}.1.self_attn.v_proj.lora_magnitude_vector": torch.ones(32)}))
    message = refusal(dora)
    assert "v_proj.lora_magnitude_vector is [32], and the model needs [16]" in message


def test_a_norm_of_zero_has_no_direction(dora):
    def no_weights(module: str) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(base_linear(module)[0]), None

    edit_weights(dora, lambda t: t[f"{PREFIX}.2.self_attn.q_proj.lora_B.weight"].zero_())
    message = refusal(dora, replace(SHAPES, base_linears=no_weights))
    assert "model.layers.2.self_attn.q_proj.lora_magnitude_vector" in message
    assert "NaN or infinite" in message


def test_half_a_pair(folder):
    edit_weights(folder, lambda tensors: tensors.pop(f"{PREFIX}.1.mlp.up_proj.lora_B.weight"))
    message = refusal(folder)
    assert "model.layers.1.mlp.up_proj has no lora_B" in message


def test_a_module_without_its_weights(folder):
    def drop(tensors):
        return {key: tensor for key, tensor in tensors.items() if ".2.mlp.up_proj" not in key}

    edit_weights(folder, drop)
    message = refusal(folder)
    assert "model.layers.2.mlp.up_proj" in message
    assert "no weights" in message


def test_weights_of_a_module_not_targeted(folder):
    edit_config(folder, target_modules=[name for name in TARGETS if name != "o_proj"])
    assert "model.layers.0.self_attn.o_proj" in refusal(folder)


def test_a_wrong_shape_says_both(folder):
    key = f"{PREFIX}.1.self_attn.k_proj.lora_B.weight"
    edit_weights(folder, lambda tensors: tensors.update({key: torch.zeros(20, 4)}))
    message = refusal(folder)
    assert [word for word in ("[20, 4]", "[16, 4]", "another base") if word not in message] == []


def test_a_tensor_of_another_number_of_dimensions(folder):
    edit_weights(folder, lambda t: t.update({f"{PREFIX}.1.self_attn.k_proj.lora_A.weight": torch.zeros(4, 32, 1)}))
    assert "[4, 32, 1]" in refusal(folder)


def test_a_smaller_model_is_another_base(folder):
    smaller = TargetShapes(layers=2, targets=TARGETS, widths=WIDTHS, base_linears=base_linear)
    assert "layer 2" in refusal(folder, smaller)


def test_a_larger_model_is_another_base(folder):
    larger = TargetShapes(layers=4, targets=TARGETS, widths=WIDTHS, base_linears=base_linear)
    assert "model.layers.3.self_attn.q_proj" in refusal(folder, larger)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_numbers(value, folder):
    key = f"{PREFIX}.2.mlp.down_proj.lora_A.weight"
    edit_weights(folder, lambda tensors: tensors[key].view(-1)[5].fill_(value))
    message = refusal(folder)
    assert "model.layers.2.mlp.down_proj.lora_A" in message
    assert "NaN or infinite" in message


def test_a_scale_that_overflows(folder):
    edit_weights(folder, lambda t: t.update({f"{PREFIX}.0.mlp.up_proj.lora_B.weight": torch.full((48, 4), 1e38)}))
    edit_config(folder, lora_alpha=1000)
    assert "times its scale" in refusal(folder)


def test_integer_weights(folder):
    key = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"
    edit_weights(folder, lambda tensors: tensors.update({key: torch.zeros(4, 32, dtype=torch.int32)}))
    assert "I32" in refusal(folder)


# --- fuzz ---------------------------------------------------------------------------------------------------------


def load_or_refuse(folder: Path) -> LoadedAdapter | None:
    try:
        return load_peft(folder, SHAPES)
    except AdapterError:
        return None


@given(
    part=st.sampled_from(["header", "all"]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=3),
    length=st.just(1.0) | st.floats(0, 1),
)
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_weights_load_whole_or_are_refused(part, flips, length, saved, tmp_path):
    whole = load_peft(saved, SHAPES)
    data = bytearray((saved / "adapter_model.safetensors").read_bytes())
    reach = 8 + struct.unpack("<Q", data[:8])[0] if part == "header" else len(data)
    for place, bit in flips:
        data[int(place * reach)] ^= 1 << bit
    data = data[: int(length * len(data))]
    shutil.copy(saved / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    adapter = load_or_refuse(tmp_path)
    is_sound = data == (saved / "adapter_model.safetensors").read_bytes()
    assert adapter is not None or not is_sound
    if adapter is not None:
        assert (adapter.adapter_hash == whole.adapter_hash) == is_sound
        assert np.array_equal(adapter.ranks, whole.ranks)
        assert all(torch.isfinite(a).all() and torch.isfinite(b).all() for a, b in adapter.blocks.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["q_proj", "", "[", ".*", "LORA"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["q_proj", "(", ""]), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = st.sampled_from([*sorted(HANDLED), "modules_to_save", "use_dora", "other"])


@given(changes=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_configuration_loads_or_is_refused(changes, saved, tmp_path):
    shutil.copy(saved / "adapter_model.safetensors", tmp_path)
    shutil.copy(saved / "adapter_config.json", tmp_path)
    edit_config(tmp_path, **changes)
    adapter = load_or_refuse(tmp_path)
    assert adapter is None or len(adapter.blocks) == 21


def rename_keys(folder: Path, old: str, new: str) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({key.replace(old, new, 1): tensor for key, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize("root", ["", "model.language_model.", "language_model.model."])
def test_an_adapter_of_another_wrapper_of_the_decoder_is_the_same(folder, root):
    """As `AutoModel` and image models of two generations name the layers."""
    plain = load_peft(folder, SHAPES)
    rename_keys(folder, "base_model.model.model.", f"base_model.model.{root}")
    found = load_peft(folder, SHAPES)
    assert found.blocks.keys() == plain.blocks.keys()
    assert all(
        torch.equal(part, other)
        for place, block in plain.blocks.items()
        for part, other in zip(block, found.blocks[place], strict=True)
    )


def test_expressions_are_matched_with_the_names_of_the_wrapper(folder):
    rename_keys(folder, "base_model.model.model.", "base_model.model.model.language_model.")
    edit_config(folder, target_modules=r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")
    assert load_peft(folder, SHAPES).ranks.all()
    edit_config(folder, target_modules=r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj")
    with pytest.raises(AdapterError, match="match none of the model's projections"):
        load_peft(folder, SHAPES)


def test_another_unknown_prefix_is_named(folder):
    rename_keys(folder, "base_model.model.model.", "base_model.model._orig_mod.model.")
    with pytest.raises(AdapterError, match=r"prefix is 'base_model\.model\._orig_mod\.'"):
        load_peft(folder, SHAPES)


def test_fan_in_fan_out_changes_nothing_on_linears(folder):
    plain = load_peft(folder, SHAPES)
    edit_config(folder, fan_in_fan_out=True)
    assert load_peft(folder, SHAPES).blocks.keys() == plain.blocks.keys()


def store_embedding(folder, change=lambda rows: rows):
    rows = change(base_model().get_submodule("model.embed_tokens").weight.detach().clone())
    edit_weights(folder, lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": rows}))


def test_an_embedding_that_was_stored_untrained_is_left_out(folder):
    """PEFT stores it beside the LoRA with `save_embedding_layers`, also by itself if it takes the vocabulary for
    resized."""
    plain = load_peft(folder, SHAPES)
    store_embedding(folder)
    found = load_peft(folder, SHAPES)
    assert found.blocks.keys() == plain.blocks.keys() and found.tokens is None


def test_trained_rows_that_the_configuration_does_not_announce_are_refused(folder):
    def trained(rows):
        rows[7] += 1
        return rows

    store_embedding(folder, trained)
    message = refusal(folder)
    assert "1 rows differ" in message and "token 7" in message and "modules_to_save" in message


def test_a_resized_vocabulary_is_named(folder):
    store_embedding(folder, lambda rows: rows[:-3])
    assert "serve the base model whose embedding was resized" in refusal(folder)
