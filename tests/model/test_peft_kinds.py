"""Adapters of kinds other than LoRA that cannot be converted to it exactly are refused with a reason that helps.

That converted ones compute what PEFT computes is in test_peft_parity.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import IA3Config, LoHaConfig, VeraConfig
from peft_folders import CONVERTED, save_adapter
from safetensors.torch import save_file
from test_peft_loader import PREFIX, SHAPES, edit_config, edit_weights, refusal

from engine.model.adapters.peft.fields import KINDS, OTHER_KINDS
from engine.model.adapters.peft.loader import load_peft

LOHA = {"kind": LoHaConfig, "target_modules": ["q_proj"]}
VERA = {"kind": VeraConfig, "r": 8, "target_modules": ["q_proj", "down_proj"]}
QUERY = "model.layers.0.self_attn.q_proj"


def edited(key: str, tensor: torch.Tensor | None = None):
    """Returns a change of the weights: the tensor of a key replaced, added or, with None, left out."""

    def change(tensors):
        kept = {name: value for name, value in tensors.items() if name != key}
        return kept if tensor is None else kept | {key: tensor}

    return change


@pytest.mark.parametrize("kind", [*OTHER_KINDS, "NEW_KIND"])
def test_other_kinds_are_refused_by_name(kind, tmp_path):
    save_adapter(tmp_path)
    edit_config(tmp_path, peft_type=kind)
    message = refusal(tmp_path)
    assert f"peft_type is {kind!r}: {OTHER_KINDS.get(kind, 'it is not known here')}" in message
    assert all(name in message for name in KINDS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({**LOHA, "r": 17}, [QUERY, "of rank 289", "up to 256", "smaller rank", "save_as_lora"]),
        ({**VERA, "r": 300}, ["rank 300", "1 to 256"]),
        (
            {"kind": IA3Config, "target_modules": ["o_proj"], "feedforward_modules": ["o_proj"]},
            ["layers.0.self_attn.o_proj", "inputs", "down_proj only", "retrain"],
        ),
        ({**LOHA, "target_modules": ["lm_head", "q_proj"]}, ["lm_head", "matches no module", "LOHA"]),
    ],
    ids=str,
)
def test_what_has_no_form_as_a_lora(options, words, tmp_path):
    save_adapter(tmp_path, **options)
    message = refusal(tmp_path)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (LOHA, {"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
        (LOHA, {"use_dora": True, "peft_version": "1.0.0"}, ["use_dora", "not known"]),
        (LOHA, {"layers_to_transform": [3]}, ["layer 3", "layers 0 to 2"]),
        (LOHA, {"target_modules": ["k_proj"]}, [QUERY, "does not target"]),
        (LOHA, {"target_modules": ["q_proj", "k_proj"]}, ["k_proj", "no weights"]),
        (LOHA, {"target_modules": ["c_attn"]}, ["none of the model's projections", "q_proj"]),
        (LOHA, {"r": 5}, [f"{QUERY}.hada_w1_b is [8, 32]", "[5, 32]"]),
        (VERA, {"save_projection": False}, ["vera_A", "save_projection=false"]),
        (VERA, {"save_projection": "no"}, ["save_projection", "true or false"]),
        (VERA, {"save_projection": False, "projection_prng_key": -1}, ["projection_prng_key", "-1"]),
        (VERA, {"bias": "vera_only"}, ["bias", "vera_only"]),
        (CONVERTED["ia3"], {"feedforward_modules": None}, ["feedforward_modules is missing"]),
        (CONVERTED["ia3"], {"feedforward_modules": []}, ["down_proj.ia3_l is [1, 48]", "[32, 1]"]),
    ],
    ids=str,
)
def test_configurations_refused(options, changes, words, tmp_path):
    save_adapter(tmp_path, **options)
    edit_config(tmp_path, **changes)
    message = refusal(tmp_path)
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("options", "key", "tensor", "words"),
    [
        (VERA, "base_model.vera_B", None, ["vera_A or vera_B is missing"]),
        (VERA, "base_model.vera_A", torch.ones(8, 40), ["vera_A is [8, 40]", "[8, 48]", "another base"]),
        (VERA, f"{PREFIX}.0.mlp.down_proj.vera_lambda_d", torch.ones(7), ["vera_lambda_d is [7]", "[8]"]),
        (LOHA, f"{PREFIX}.0.self_attn.q_proj.hada_w2_a", None, [QUERY, "no hada_w2_a"]),
        (LOHA, f"{PREFIX}.0.self_attn.q_proj.hada_t1", torch.ones(1), ["hada_t1", "matches no module"]),
        (LOHA, f"{PREFIX}.0.self_attn.q_proj.hada_w2_a.x", torch.ones(1), ["more than one adapter"]),
        (LOHA, f"{PREFIX}.0.self_attn.q_proj.hada_w2_a", torch.ones(32, 8, dtype=torch.int8), ["int8", "fp32"]),
        (LOHA, f"{PREFIX}.0.self_attn.q_proj.hada_w2_a", torch.full((32, 8), torch.nan), ["NaN"]),
        (CONVERTED["lokr"], f"{PREFIX}.0.self_attn.q_proj.lokr_w1", torch.ones(2, 3), ["another base", "[32, 32]"]),
        (CONVERTED["lokr"], f"{PREFIX}.0.self_attn.q_proj.lokr_w1_a", torch.ones(4, 2), ["both lokr_w1 and"]),
        (CONVERTED["ia3"], f"{PREFIX}.0.self_attn.k_proj.ia3_l", torch.full((16, 1), torch.inf), ["NaN or infinite"]),
    ],
    ids=lambda value: value[-45:] if isinstance(value, str) else "",
)
def test_tensors_refused(options, key, tensor, words, tmp_path):
    save_adapter(tmp_path, **options)
    edit_weights(tmp_path, edited(key, tensor))
    message = refusal(tmp_path)
    assert [word for word in words if word not in message] == []


def test_a_kronecker_product_of_whole_matrices_is_refused_before_it_is_made(tmp_path):
    """Its matrices would have 2**40 elements."""
    side = 1 << 10
    shapes = replace(SHAPES, widths=np.full((7, 2), side * side, dtype=np.int32))
    settings = {"peft_type": "LOKR", "r": 8, "alpha": 8, "target_modules": [QUERY]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    factors = {f"base_model.model.{QUERY}.lokr_w{number}": torch.ones(side, side) for number in (1, 2)}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    message = refusal(tmp_path, shapes)
    assert f"{QUERY}: the Kronecker product of two matrices of ranks 1024 and 1024 is of rank 1048576" in message


def test_an_adalora_without_ranks_changes_nothing(tmp_path):
    options = CONVERTED["adalora"] | {"layers_to_transform": [1], "target_modules": ["down_proj"]}
    save_adapter(tmp_path, **options | {"rank_pattern": {"model.layers.1.mlp.down_proj.lora_E": [False] * 6}})
    assert "every rank" in refusal(tmp_path)


def test_a_lora_has_no_factors_of_outputs(tmp_path):
    """The tensors into which (IA)³ is converted are not read from files."""
    save_adapter(tmp_path)
    key = f"{PREFIX}.0.self_attn.q_proj.lora_output_scale.weight"
    edit_weights(tmp_path, edited(key, torch.ones(32)))
    assert repr(key) in refusal(tmp_path)


def test_identity_is_that_of_the_files_and_their_meaning(tmp_path: Path):
    save_adapter(tmp_path, **CONVERTED["vera of a seed"])
    first = load_peft(tmp_path, SHAPES).adapter_hash
    edit_config(tmp_path, vera_dropout=0.5)
    assert load_peft(tmp_path, SHAPES).adapter_hash == first
    edit_config(tmp_path, projection_prng_key=8)
    assert load_peft(tmp_path, SHAPES).adapter_hash != first
