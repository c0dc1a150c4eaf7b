"""Says what an engine's configuration comes to on this machine, without loading the model.

`python -m engine.model.explain JSON` prints the answer as JSON; `loralane check --explain` shows it.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.config import EngineConfig
from engine.model.arena import page_shape
from engine.model.memory import count_host_pages, count_pages, pick_device, pick_dtype
from engine.model.runner import has_fp8_kv, max_model_len
from engine.model.spec import read_spec
from engine.process.cores import usable_cores


def explain(config: EngineConfig) -> dict[str, Any]:
    """Return the device, the dtype and the sizes that an engine with this configuration would have.

    The sizes of the page pool follow from the memory that is free now, less the weights. Values that depend on the
    model are left out while `config.model` is empty.

    Raises:
        ValueError: the configuration cannot be served here; the message says why.
    """
    device = pick_device(config.device)
    dtype, config = pick_dtype(config.dtype, device), config.sized(device.type)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": config.threads or min(torch.get_num_threads(), usable_cores()),
        "max_seqs": config.max_seqs,
        "token_budget": config.token_budget,
    }
    if not config.model:
        return found
    spec, weight_bytes = read_spec(Path(config.model)), count_weights(Path(config.model)) * dtype.itemsize
    page_bytes = page_shape(spec, config.block_size, has_fp8_kv(config, dtype, device)).elements * dtype.itemsize
    pages = count_pages(config, page_bytes, device, weight_bytes)
    return found | {
        "architecture": spec.model_type,
        "weight_bytes": weight_bytes,
        "page_bytes": page_bytes,
        "pages": pages,
        "host_pages": count_host_pages(config, page_bytes),
        "max_model_len": min(max_model_len(config, spec), (pages - 1) * config.block_size),
    }


def count_weights(folder: Path) -> int:
    """Returns the number of weights in a folder's safetensors files, from their headers."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def main() -> int:
    try:
        print(json.dumps(explain(EngineConfig.from_json(sys.argv[1]))))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
