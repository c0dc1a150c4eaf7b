"""A peer to compare with: Hugging Face `generate` with PEFT's mixed-adapter batches, on static batches of requests.

It is a separate program, so that it has the machine to itself: `python -m benchmarks.hf_peer < job.json > result.json`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, StoppingCriteria
from transformers.utils import logging

BASE = "__base__"
"""PEFT's adapter name for batch rows without an adapter."""


class Clock(StoppingCriteria):
    """Stopping criterion that never stops: it is called after every step and records the seconds since its creation."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.started = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter() - self.started)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(model_dir: str, adapters: dict[str, str], dtype: str = "bfloat16", experts: str | None = None) -> Any:
    """Load a model with adapters. `experts` is Hugging Face's implementation of experts; None means its own choice."""
    options = {"experts_implementation": experts} if experts else {}
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), **options)
    for name, folder in adapters.items():
        if isinstance(model, PeftModel):
            model.load_adapter(folder, adapter_name=name)
        else:
            model = PeftModel.from_pretrained(model, folder, adapter_name=name)
    return model.eval()


def generate(model: Any, items: Sequence[dict[str, Any]]) -> Clock:
    """Run one static batch, padded on the left, until its longest request is done. Returns the clock, which has
    recorded the time of each step."""
    width = max(len(item["prompt"]) for item in items)
    ids = torch.zeros(len(items), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, item in enumerate(items):
        ids[row, width - len(item["prompt"]) :] = torch.tensor(item["prompt"])
        mask[row, width - len(item["prompt"]) :] = 1
    steps = max(item["max_tokens"] for item in items)
    names = {"adapter_names": [item["model"] for item in items]} if isinstance(model, PeftModel) else {}
    clock = Clock()
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
            **names,
        )
    return clock


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Time a job's batches one after the other, as a server without continuous batching would run them. The job has the
    folders of the `model` and of the `adapters` (by name), the requests (`items`), and how many make a `batch`; it may
    have a `dtype` and an implementation of `experts` (see `load`). Returns the total `seconds`, and in `streams` the
    times of each request's tokens, in seconds since the beginning."""
    options = {name: job[name] for name in ("dtype", "experts") if name in job}
    model, size = load(job["model"], job["adapters"], **options), job["batch"]
    generate(model, [{**item, "max_tokens": 4} for item in job["items"][:size]])
    streams, started = [], time.perf_counter()
    for start in range(0, len(job["items"]), size):
        batch = job["items"][start : start + size]
        waited = time.perf_counter() - started
        clock = generate(model, batch)
        streams += [[waited + at for at in clock.times[: item["max_tokens"]]] for item in batch]
    return {"seconds": time.perf_counter() - started, "streams": streams}


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    result = run(json.load(sys.stdin))
    json.dump(result, sys.stdout)
