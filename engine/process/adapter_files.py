"""Names the files that make an adapter: the two of a folder that PEFT wrote, or a GGUF file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_FILES = (CONFIG_FILE, WEIGHTS_FILE)
GGUF_END = ".gguf"
TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "added_tokens.json",
)
TEXT_FILES = (TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, ADDED_TOKENS_FILE)
"""Small files of the tokenizer with which an adapter was trained, which may lie in its folder."""
PICKLE_FILE, MLX_FILE = "adapter_model.bin", "adapters.safetensors"
PART = re.compile(r"adapter_model-\d+-of-\d+\.safetensors")
FROM_MLX = (
    "an adapter of mlx-lm: fuse it into its base with `mlx_lm.fuse` and serve that model, or write it in PEFT's form, "
    f"in which {WEIGHTS_FILE} has lora_a and lora_b transposed, as lora_A.weight and lora_B.weight, and lora_alpha is "
    "scale times rank"
)


def is_place(path: Path) -> bool:
    """Return whether an adapter's files may be at this path: it is a folder, or a file whose name is that of a GGUF
    file."""
    return os.path.isdir(path) or (path.suffix == GGUF_END and os.path.isfile(path))


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that an adapter's path names, whether or not it exists: the path itself, or the only such
    file of a folder without PEFT's configuration; None for none. Raises ValueError for several, OSError."""
    if path.suffix == GGUF_END and not os.path.isdir(path):
        return path
    if os.path.exists(path / CONFIG_FILE) or not os.path.isdir(path):
        return None
    return only_gguf(path, os.listdir(path))


def only_gguf(place: Path | str, names: list[str]) -> Path | None:
    """Return the path in `place` (a folder or a hub repository) of the GGUF file among `names`, its files. None means
    that there is none. Raises ValueError if there are several."""
    found = sorted(name for name in names if name.endswith(GGUF_END) and "/" not in name)
    if len(found) > 1:
        raise ValueError(f"{place} has {len(found)} GGUF files: name the one to be loaded, such as {found[0]}")
    return Path(place, found[0]) if found else None


def lacks_weights(names: Iterable[str]) -> str:
    """Return what a folder or repository has, with files of these names, in place of the weights of an adapter, and
    what to do, as the end of a sentence about it: "has ..."."""
    names = set(names)
    if parts := sorted(filter(PART.fullmatch, names)):
        return (
            f"has its weights in {len(parts)} parts such as {parts[0]}: join them in one {WEIGHTS_FILE}, with "
            "safetensors' load_file of each part and save_file of all tensors"
        )
    if MLX_FILE in names:
        return f"has {MLX_FILE} but no {WEIGHTS_FILE}, which makes it {FROM_MLX}"
    if PICKLE_FILE in names:
        return (
            f"has {PICKLE_FILE} but no {WEIGHTS_FILE}: pickle files can run code and are never opened; save the "
            "adapter with PEFT's save_pretrained(..., safe_serialization=True)"
        )
    return f"has no {WEIGHTS_FILE}: name what PEFT's save_pretrained wrote"
