"""Computes an engine's device, dtype and sizes on this machine from its configuration, without loading the model.

`python -m engine.serve.explain JSON` prints the answer as JSON; `loralane check --explain` shows it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig, core_config
from engine.core.predict.capacity import Capacity, capacity_of, decode_seconds, prompt_within
from engine.core.predict.step_time import StepTimeModel
from engine.model.folders.converted import check_tokenizer
from engine.model.memory.allocation import count_host_pages, count_pages, free_host_bytes, pick_device, pick_dtype
from engine.model.ranks.collectives import threads_of_rank
from engine.model.ranks.shard import Shard
from engine.model.ranks.stages import find_shard
from engine.model.runner.identity import hash_model
from engine.model.runner.kernels import require_kv
from engine.model.runner.sizes import (
    Sized,
    adapter_bytes_per_rank,
    count_page_bytes,
    count_weight_bytes,
    count_weights,
    fill_sizes,
    find_kept_bits,
    has_fp8_kv,
    max_model_len,
    stores_fp8,
)
from engine.model.spec.config import ModelSpec, read_spec
from engine.model.spec.draft import draft_block
from engine.model.weights.reader import name_weights, open_weights
from engine.process.cores import usable_cores
from engine.serve.step_store import step_store


def explain(config: EngineConfig) -> dict[str, Any]:
    """Return the device, dtype, threads, sizes and architecture that an engine of this configuration would have, under
    `reasons` why, and under `capacity` a `Capacity`. Raises ValueError, which says why, if it cannot be served here."""
    # With several ranks, threads and bytes are those of each, of stages the largest. The page pool follows from the
    # memory that is free now. Values that depend on the model are left out while `config.model` is empty.
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    stores_fp8(config.adapter_dtype, device, dtype)
    has_fp8_kv(config, dtype, device)
    threads = config.threads or min(torch.get_num_threads(), usable_cores())
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": threads_of_rank(threads, config.tensor_parallel),
        "ranks": config.ranks,
    }
    if not config.model:
        return found
    spec = read_spec(Path(config.model))
    check_tokenizer(Path(config.model))
    require_kv(config, spec)
    open_weights(Path(config.model), spec, config.load_format)  # reads the headers, and refuses what cannot be served
    config, bits = config.of_rank(), find_kept_bits(config, spec, device, dtype)
    shards = find_shard(config, spec, bits).everyone
    weights = [count_weight_bytes(spec, bits, shard) for shard in shards]
    largest = shards[weights.index(max(weights))]
    sized = fill_sizes(config, spec, device, dtype, largest)
    page_bytes = count_page_bytes(config, spec, device, dtype, largest)
    if sized.draft is not None:
        open_weights(Path(sized.draft.config.model), sized.draft.spec, config.load_format)
        block = draft_block(sized.draft.spec, page_bytes // dtype.itemsize)
        found |= {"draft_bytes": sized.draft_bytes, "draft_block": block}
    pages = count_pages(config, page_bytes, device, sized.loaded_bytes + sized.reserved)
    return found | {
        "architecture": spec.model_type,
        "weights": name_weights(Path(config.model), spec, config.load_format, config.weights, dtype),
        "weight_bytes": sized.weight_bytes,
        "weight_bits": 8 * sized.weight_bytes / count_weights(spec, largest),
        "stages": [
            {"layers": len(shard.layers(spec)), "weight_bytes": taken}
            for shard, taken in zip(shards, weights, strict=True)
            if shard.rank == 0
        ],
        "page_bytes": page_bytes,
        "pages": pages,
        "capacity": asdict(_capacity(sized, spec, device, dtype, pages, page_bytes, largest)),
        "token_budget": sized.config.token_budget,
        "host_adapter_gb": sized.config.host_adapter_gb,
        "reasons": sized.reasons,
    }


def _capacity(
    sized: Sized, spec: ModelSpec, device: torch.device, dtype: torch.dtype, pages: int, page_bytes: int, shard: Shard
) -> Capacity:
    """Return the engine's capacity, with predictions from steps that engines of this kind have taken before, if these
    are fit for advice."""
    config = sized.config
    core = core_config(config, pages, count_host_pages(config, page_bytes), max_model_len(config, spec), ())
    free = max(0, free_host_bytes() - sized.loaded_bytes) // config.ranks if device.type == "cpu" else 0
    found = capacity_of(core, page_bytes, adapter_bytes_per_rank(config, spec, dtype, shard), free)
    name = str(dtype).removeprefix("torch.")
    ranks = config.tensor_parallel, config.pipeline_parallel
    store = step_store(config.state_dir, config.threads, str(device), name, hash_model(config), ranks)
    rules = core.scheduling
    margins = rules.margin_floor, rules.margin_ceiling
    model = StepTimeModel(rules.forgetting, rules.knots, *margins, spec.chosen_experts)
    if store is None or not store.load(model) or not store.is_fit_for_advice:
        return found
    within = prompt_within(model, core, core.interactive.ttft_s)
    return replace(found, decode_s=decode_seconds(model, core), prompt_tokens=within)


def main() -> int:
    try:
        print(json.dumps(explain(EngineConfig.from_json(sys.argv[1]))))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
