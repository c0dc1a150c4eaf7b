"""Folders and files that are no adapter of PEFT: the refusal says what they are and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft_folders import save_adapter
from safetensors.torch import load_file, save_file
from test_peft_loader import edit_weights, folder, refusal, saved  # noqa: F401  the last two are fixtures

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MLX = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}


def test_the_parent_of_checkpoints_names_the_latest(tmp_path):
    for name in ("checkpoint-500", "checkpoint-1000", "checkpoint-90", "checkpoint-200"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text("{}")
    (tmp_path / "runs").mkdir()
    message = refusal(tmp_path)
    assert f"{tmp_path} has no {CONFIG}" in message
    assert "checkpoint-1000, checkpoint-500, checkpoint-200 have one: load one of these folders" in message


def test_a_named_adapter_of_peft_lies_in_a_subfolder(tmp_path):
    save_adapter(tmp_path / "pirate")
    assert "subfolders pirate have one" in refusal(tmp_path)


def test_a_whole_model_is_to_be_served_as_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "a whole model and no adapter" in refusal(tmp_path)


def test_parts_of_weights_are_to_be_joined(folder):  # noqa: F811
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    for number in (1, 2):
        save_file(tensors, folder / f"adapter_model-0000{number}-of-00002.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text("{}")
    message = refusal(folder)
    assert "2 parts such as adapter_model-00001-of-00002.safetensors: join them" in message


def mlx_config(folder: Path) -> None:  # noqa: F811
    (folder / CONFIG).write_text(json.dumps(MLX))


def mlx_file(folder: Path) -> None:  # noqa: F811
    (folder / WEIGHTS).rename(folder / "adapters.safetensors")


def mlx_keys(folder: Path) -> None:  # noqa: F811
    edit_weights(folder, lambda tensors: {"model.layers.0.self_attn.q_proj.lora_a": torch.zeros(32, 4)})


@pytest.mark.parametrize("spoil", [mlx_config, mlx_file, mlx_keys], ids=lambda spoil: spoil.__name__)
def test_an_adapter_of_mlx_lm_is_named_by_file_configuration_and_keys(spoil, folder):  # noqa: F811
    spoil(folder)
    message = refusal(folder)
    assert "an adapter of mlx-lm: fuse it into its base" in message and "transposed" in message


def some_empty(tensors):
    return {name: torch.empty(0) if "lora_B" in name else tensor for name, tensor in tensors.items()}


def all_gone(tensors):
    return tensors.clear()


@pytest.mark.parametrize(
    ("change", "words"), [(some_empty, "is empty (shape [0])"), (all_gone, f"{WEIGHTS} has no tensors")]
)
def test_weights_that_zero_3_left_out_are_named(change, words, folder):  # noqa: F811
    edit_weights(folder, change)
    message = refusal(folder)
    assert words in message and "ZeRO-3" in message and "stage3_gather_16bit_weights_on_model_save" in message


def test_a_pointer_of_git_lfs_is_named(folder):  # noqa: F811
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
    assert "git lfs pull" in refusal(folder)
