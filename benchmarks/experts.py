"""Throughput of a small mixture of experts beside Hugging Face: `make bench-experts`.

A random Qwen 3 MoE, whose checkpoint is in bf16, as most published ones are, is computed in fp32, with adapters of rank
8 on all of its projections, those of experts among them. The engine computes the same requests without and with
adapters, in turn with Hugging Face's `generate` in static batches, with its implementations of experts but
`batched_mm`, which copies an expert's weights for every row and took over four times as long. Hugging Face has no
batches of different adapters of experts. Tokens per second are of the fastest of several rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.runner import Run, benchmark, option, table
from benchmarks.workload import generate_by_peer, requests
from engine.config import EngineConfig, core_config
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from lab.bench.plan import BenchRequest
from lab.random_adapters import write_adapters

VOCAB, RANK, BATCH = 8192, 8, 16
IMPLEMENTATIONS = ("eager", "grouped_mm")


def save_model(folder: Path, sizes: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        moe_intermediate_size=sizes.width,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.checkpoint)).save_pretrained(folder)


class Ours:
    """The engine, with its adapters loaded."""

    def __init__(self, folder: Path, adapters: Sequence[Path]) -> None:
        options: dict[str, Any] = {"prefix_caching": False, "speculation": "off"}  # random models repeat themselves
        config = EngineConfig(str(folder), device="cpu", dtype="float32", memory_gb=1, max_seqs=BATCH, **options)
        runner = ModelRunner(load(config))
        core = core_config(runner.facts.config, runner.loaded.num_pages, 0, runner.facts.max_model_len, ())
        self._engine = Engine(EngineState.create(core), runner)
        self.adapters = [self._engine.load_adapter(str(path)).adapter_hash for path in adapters]

    def run(self, items: Sequence[BenchRequest], adapters: Sequence[str | None]) -> float:
        """Returns the seconds that the requests take, with the adapters in turn; None is the base model."""
        for number, item in enumerate(items):
            params = SamplingParams(item.max_tokens, temperature=0.0, ignore_eos=True)
            adapter = adapters[number % len(adapters)]
            self._engine.inbox.put(Submit(Request(str(number), tuple(item.prompt), params, adapter)))
        began = time.perf_counter()
        while True:
            self._engine.step()
            if not self._engine.state.has_work:
                return time.perf_counter() - began


def measure(sizes: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Returns output tokens per second, by what computed them."""
    model = folder / "model"
    save_model(model, sizes)
    items = requests(["base"], sizes.requests, tokens=(0, VOCAB))
    tokens = sum(item.max_tokens for item in items)
    paths = list(write_adapters(model, folder / "adapters", [RANK] * sizes.adapters).values())
    ours = Ours(model, paths)
    ours.run(items[:BATCH], [None, *ours.adapters])
    seconds: dict[str, list[float]] = {}
    for _ in range(sizes.rounds):
        seconds.setdefault("base", []).append(ours.run(items, [None]))
        seconds.setdefault(f"{sizes.adapters} adapters", []).append(ours.run(items, ours.adapters))
        for name in sizes.peer:
            peer = generate_by_peer(model, {}, items, BATCH, dtype="float32", experts=name)
            seconds.setdefault(f"Hugging Face, {name}", []).append(peer["seconds"])
    return {name: tokens / min(times) for name, times in seconds.items()}


SIZES = {"layers": 8, "hidden": 512, "experts": 16, "top-k": 4, "width": 256}


@benchmark(
    *(option(f"--{name}", default, "size of the model") for name, default in SIZES.items()),
    option("--checkpoint", "bfloat16", "dtype of the checkpoint's weights", choices=("bfloat16", "float32")),
    option("--requests", 32, "number of requests"),
    option("--adapters", 8, "number of adapters"),
    option("--rounds", 3, "times that all is measured"),
    option("--peer", IMPLEMENTATIONS, "Hugging Face's implementations", nargs="*"),
)
def bench(run: Run) -> None:
    found = measure(run.options, run.scratch)
    rows = [(name, f"{rate:.0f}", f"{rate / found['base']:.2f}") for name, rate in found.items()]
    run.show(table(None, "| tokens/s | over base", rows))


if __name__ == "__main__":
    bench.main()
