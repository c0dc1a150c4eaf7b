"""Tells operators what a folder or file is that cannot be served as an adapter, and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from engine.model.adapters.peft.settings import AdapterError
from engine.process.adapter_files import CONFIG_FILE, FROM_MLX, GGUF_END, WEIGHTS_FILE, lacks_weights

MODEL_FILE = "config.json"
MLX_FIELDS = ("lora_parameters", "fine_tune_type")
"""Fields of the configuration that mlx-lm writes."""
MLX_KEY = re.compile(r"\.lora_[ab]$")
"""End of the names that mlx-lm gives to tensors."""
LFS = b"version https://git-lfs.github.com/"
MOST_NAMED = 3
"""Maximum number of subfolders that a message names."""
FROM_ZERO = (
    "as DeepSpeed's ZeRO-3 leaves weights that it has not gathered: save it again with "
    "stage3_gather_16bit_weights_on_model_save or transformers 5, or make it from the checkpoint with zero_to_fp32.py"
)


def missing(folder: Path, name: str) -> str:
    """Return the message of the error for an adapter's folder that lacks the file `name`."""
    if not folder.is_dir():
        return f"{folder} is not a folder: an adapter is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a GGUF file"
    if name.endswith(GGUF_END):
        return f"{folder / name} does not exist"
    names = _names(folder)
    if name == WEIGHTS_FILE:
        return f"{folder} {lacks_weights(names)}"
    if inner := _with_adapters(folder, names):
        return f"{folder} has no {name}, but its subfolders {', '.join(inner)} have one: load one of these folders"
    if MODEL_FILE in names:
        return f"{folder} holds a whole model and no adapter ({name}): serve it as model.source"
    return f"{folder} has no {name}: point to the folder that PEFT's save_pretrained wrote"


def _names(folder: Path) -> list[str]:
    """Return the names of the files in a folder. There are none if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _with_adapters(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the names of some subfolders with adapters: those of the latest checkpoints, by the numbers in their
    names, come first."""
    found = [name for name in names if (folder / name / CONFIG_FILE).is_file()]
    found.sort(key=lambda name: ([int(digits) for digits in re.findall(r"\d{1,9}", name)], name), reverse=True)
    return found[:MOST_NAMED]


def check_origin(config: Mapping[str, Any]) -> None:
    """Raise AdapterError if another program than PEFT has written an adapter's configuration."""
    if config.get("peft_type") is None and any(field in config for field in MLX_FIELDS):
        raise AdapterError(f"{CONFIG_FILE} is of {FROM_MLX}")


def load_tensors(data: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a weights file by name. Raises AdapterError if the file is damaged, or has no tensors or
    empty ones."""
    try:
        tensors = load(bytes(data))
    except (SafetensorError, KeyError) as error:
        raise damaged(data, error) from error
    check_gathered({name: tensor.shape for name, tensor in tensors.items()})
    return tensors


def damaged(data: memoryview, error: Exception) -> AdapterError:
    """Return the error for a weights file that is not in the format of safetensors."""
    if bytes(data[: len(LFS)]) == LFS:
        return AdapterError(f"{WEIGHTS_FILE} is a pointer of Git LFS: run `git lfs pull` in its folder")
    return AdapterError(f"{WEIGHTS_FILE} is damaged or cut short ({error}); copy it again")


def check_gathered(shapes: Mapping[str, Iterable[int]]) -> None:
    """Raise AdapterError if a weights file has no tensors or empty ones. `shapes` has the shapes of its tensors by
    name."""
    if not shapes:
        raise AdapterError(f"{WEIGHTS_FILE} has no tensors, {FROM_ZERO}")
    if empty := next((name for name, shape in shapes.items() if list(shape) == [0]), None):
        raise AdapterError(f"{empty[:200]!r} is empty (shape [0]), {FROM_ZERO}")
