"""Throughput of a small mixture of experts beside Hugging Face: `make bench-experts`.

A random Qwen 3 MoE, whose checkpoint is in bf16, as most published ones are, is computed in fp32, with adapters of rank
8 on all of its projections, those of experts among them. The engine computes the same requests without and with
adapters, in turn with Hugging Face's `generate` in static batches, with its implementations of experts but
`batched_mm`, which copies an expert's weights for every row and took over four times as long. Hugging Face has no
batches of different adapters of experts. Tokens per second are of the fastest of several rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engine.config import EngineConfig, core_config
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.model.layers.lora import TARGETS, target_names, target_path, target_widths
from engine.model.runner.model_runner import ModelRunner
from engine.model.spec.config import ModelSpec, read_spec

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


def save_adapter(folder: Path, spec: ModelSpec, seed: int) -> None:
    """Saves a random adapter of all attention's and experts' projections, in the form of transformers 4."""
    generator, tensors, names = torch.Generator().manual_seed(seed), {}, target_names(spec)
    for target, (inputs, outputs) in enumerate(target_widths(spec).tolist()):
        if not names[target].endswith("_proj"):
            continue
        for layer in range(spec.layers):
            if path := target_path(spec, names, layer, target):
                a, b = torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator)
                tensors[f"base_model.model.{path}.lora_A.weight"] = a * 0.02
                tensors[f"base_model.model.{path}.lora_B.weight"] = b * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def make_items(count: int) -> list[dict[str, Any]]:
    """Returns requests of 32 to 127 prompt and 16 to 95 output tokens."""
    rng = random.Random(0)
    lengths = [(rng.randrange(32, 128), rng.randrange(16, 96)) for _ in range(count)]
    return [
        {"prompt": [rng.randrange(VOCAB) for _ in range(prompt)], "max_tokens": tokens, "model": "__base__"}
        for prompt, tokens in lengths
    ]


class Ours:
    """The engine, with its adapters loaded."""

    def __init__(self, folder: Path, adapters: Sequence[Path]) -> None:
        options: dict[str, Any] = {"prefix_caching": False, "speculation": "off"}  # random models repeat themselves
        config = EngineConfig(str(folder), device="cpu", dtype="float32", memory_gb=1, max_seqs=BATCH, **options)
        runner = ModelRunner(config)
        core = core_config(runner.config, runner.num_pages, 0, runner.max_model_len, ())
        self._engine = Engine(EngineState.create(core), runner)
        self.adapters = [self._engine.load_adapter(str(path)).adapter_hash for path in adapters]

    def run(self, items: Sequence[dict[str, Any]], adapters: Sequence[str | None]) -> float:
        """Returns the seconds that the requests take, with the adapters in turn; None is the base model."""
        for number, item in enumerate(items):
            params = SamplingParams(item["max_tokens"], temperature=0.0, ignore_eos=True)
            adapter = adapters[number % len(adapters)]
            self._engine.inbox.put(Submit(Request(str(number), tuple(item["prompt"]), params, adapter)))
        began = time.perf_counter()
        while True:
            self._engine.step()
            if not self._engine.state.has_work:
                return time.perf_counter() - began


def run_peer(folder: Path, items: Sequence[dict[str, Any]], implementation: str) -> float:
    """Returns the seconds that Hugging Face takes for the requests."""
    job = {"model": str(folder), "adapters": {}, "items": items, "batch": BATCH, "dtype": "float32"}
    command = [sys.executable, "-m", "benchmarks.hf_peer"]
    text = json.dumps(job | {"experts": implementation})
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["seconds"])


def measure(sizes: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Returns output tokens per second, by what computed them."""
    save_model(folder / "model", sizes)
    items = make_items(sizes.requests)
    tokens = sum(item["max_tokens"] for item in items)
    spec = read_spec(folder / "model")
    paths = [folder / f"adapter-{number}" for number in range(sizes.adapters)]
    for number, path in enumerate(paths):
        save_adapter(path, spec, number)
    ours = Ours(folder / "model", paths)
    ours.run(items[:BATCH], [None, *ours.adapters])
    seconds: dict[str, list[float]] = {}
    for _ in range(sizes.rounds):
        seconds.setdefault("base", []).append(ours.run(items, [None]))
        seconds.setdefault(f"{sizes.adapters} adapters", []).append(ours.run(items, ours.adapters))
        for name in sizes.peer:
            seconds.setdefault(f"Hugging Face, {name}", []).append(run_peer(folder / "model", items, name))
    return {name: tokens / min(times) for name, times in seconds.items()}


def show(found: dict[str, float], console: Console) -> None:
    table = Table("", "tokens/s", "over base")
    for name, rate in found.items():
        table.add_row(name, f"{rate:.0f}", f"{rate / found['base']:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("layers", 8), ("hidden", 512), ("experts", 16), ("top-k", 4), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, help="size of the model; default: %(default)s")
    parser.add_argument(
        "--checkpoint", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the checkpoint's weights"
    )
    parser.add_argument("--requests", type=int, default=32, help="number of requests; default: %(default)s")
    parser.add_argument("--adapters", type=int, default=8, help="number of adapters; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="times that all is measured; default: %(default)s")
    parser.add_argument(
        "--peer", nargs="*", default=IMPLEMENTATIONS, help="Hugging Face's implementations; default: %(default)s"
    )
    sizes = parser.parse_args()
    with TemporaryDirectory() as scratch:
        show(measure(sizes, Path(scratch)), Console())


if __name__ == "__main__":
    main()
