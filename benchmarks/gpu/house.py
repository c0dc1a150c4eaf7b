"""Runs the real engine in this process, with a model of random weights and any number of random adapters ("house").

Two thousand adapters of an 8B model take 300 GB, more than a host has. So all adapters of the same rank share one copy
in host memory. Each still has its own identity, load cost and device pages, so that the engine and the device do the
same work as with distinct adapters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.shapes import BLOCK_SIZE, adapter_elements, full_layout, model_config
from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.memory.adapters import HostAdapter
from engine.core.messages.commands import AdapterFetched
from engine.core.messages.moves import PageMemory
from engine.core.messages.requests import AdapterHash, TokenEvent
from engine.core.messages.step import Launch, StepPlan, StepResult
from engine.engine import Engine
from engine.executor.base import Claim, Report
from engine.model.layers.lora import TARGETS
from engine.model.memory.arena import page_shape
from engine.model.memory.host import Blob
from engine.model.memory.host_store import PackedAdapter
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from lab.sim.baselines import Mode, engine_under
from lora_kernels.layout import AdapterLayout

UNBOUNDED_BYTES = 1 << 60
"""Limit in bytes of host memory for adapters, in effect none, because there is only one copy for each rank."""


@dataclass(frozen=True)
class HouseSize:
    """Sizes of an engine, as in EngineConfig. `tiny`: a toy model on the CPU. `num_pages`: 0 means as many as fit.
    `policy`: see Mode."""

    tiny: bool
    max_seqs: int
    token_budget: int
    max_model_len: int
    num_pages: int = 0
    policy: str = "lanes"


class Adapters:
    """An `Executor` around a runner; its `load_host("RANK/NAME")` generates an adapter instead of reading a folder."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._report: Report = lambda _: None
        self._packed: dict[int, tuple[AdapterLayout, torch.Tensor]] = {}

    def connect(self, report: Report) -> None:
        self._report = report
        self._runner.connect(report)

    @property
    def overlaps(self) -> bool:
        return self._runner.overlaps

    def submit(self, plan: StepPlan) -> Launch:
        return self._runner.submit(plan)

    def collect(self) -> StepResult:
        return self._runner.collect()

    def load_host(self, path: str, claim: Claim) -> HostAdapter:
        rank = int(path.split("/")[0])
        layout, blob = self._pack(rank)
        host = HostAdapter(path, rank, TARGETS, layout.num_pages, blob.nbytes)
        if claim(host):
            self._runner.loaded.host_adapters.put(PackedAdapter(path, layout, Blob.of(blob)))
            self._report(AdapterFetched(path, 0.0))
        return host

    @property
    def page_memory(self) -> PageMemory:
        return self._runner.page_memory

    def close(self) -> None:
        self._runner.close()

    def _pack(self, rank: int) -> tuple[AdapterLayout, torch.Tensor]:
        if rank not in self._packed:
            spec, runner = self._runner.facts.spec, self._runner
            layout = full_layout(spec, rank)
            page = torch.empty(page_shape(spec, BLOCK_SIZE).elements, dtype=runner.facts.dtype)
            page.normal_(0, 0.01, generator=torch.Generator().manual_seed(rank))
            blob = page.expand(layout.num_pages, -1).contiguous()  # one page repeated: drawing all takes seconds
            self._packed[rank] = layout, blob.pin_memory() if runner.facts.device.type == "cuda" else blob
        return self._packed[rank]


@dataclass(frozen=True)
class House:
    runner: ModelRunner
    engine: Engine

    def register(self, ranks: Sequence[int], name: str) -> list[AdapterHash]:
        """Register one adapter of each rank with the engine, called `name` and its index. Returns their hashes."""
        return [self.engine.load_adapter(f"{rank}/{name}{index}").adapter_hash for index, rank in enumerate(ranks)]

    def weight_bytes(self) -> int:
        """Bytes of the base model that a step reads: all but the embedding, of which it reads one row per token."""
        spec = self.runner.facts.spec
        linears = spec.layers * (
            spec.hidden_size * (2 * spec.query_width + 2 * spec.kv_width)
            + 3 * spec.hidden_size * spec.intermediate_size
        )
        return (linears + spec.vocab_size * spec.hidden_size) * self.runner.facts.dtype.itemsize

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of K and V of `tokens` tokens, in all layers."""
        return tokens * self.runner.facts.page_bytes // BLOCK_SIZE

    def adapter_bytes(self, ranks: Sequence[int]) -> int:
        """Return the bytes of A and B, in all layers, of one adapter for each of `ranks`."""
        spec = self.runner.facts.spec
        return sum(adapter_elements(spec, rank) for rank in ranks) * spec.layers * self.runner.facts.dtype.itemsize


def build_house(size: HouseSize, scratch: Path, tell: Callable[[str], None]) -> House:
    """Build an engine with random weights at the 8B shape, or a toy one on the CPU. `scratch` is the folder for its
    config.json. `tell` receives progress messages."""
    (scratch / "config.json").write_text(json.dumps(model_config(size.tiny)))
    config = EngineConfig(
        str(scratch),
        load_format="dummy",
        device="cpu" if size.tiny else "cuda",
        dtype="float32" if size.tiny else "bfloat16",
        max_seqs=size.max_seqs,
        max_model_len=size.max_model_len,
        token_budget=size.token_budget,
        num_pages=size.num_pages,
        max_resident_adapters=1024,
        swap_gb=0.0 if size.tiny else 1.0,
        host_adapter_gb=0.1,  # adapters are in memory of their own, and pinning takes seconds
    )
    started = time.perf_counter()
    runner = ModelRunner(load(config, partial(_tell_progress, tell)))
    core = CoreConfig(
        num_pages=runner.loaded.num_pages,
        block_size=BLOCK_SIZE,
        host_pages=runner.loaded.num_host_pages,
        max_seqs=size.max_seqs,
        max_model_len=size.max_model_len,
        token_budget=size.token_budget,
        max_resident_adapters=config.max_resident_adapters,
        host_adapter_bytes=UNBOUNDED_BYTES,
        prefix_caching=False,
    )
    tell(
        f"engine ready in {time.perf_counter() - started:.1f} s, "
        f"{runner.loaded.num_pages} pages of {runner.facts.page_bytes} bytes"
    )
    return House(runner, engine_under(Mode(size.policy), core, Adapters(runner)))


def _tell_progress(tell: Callable[[str], None], what: str, done: int, total: int) -> None:
    if done == total:
        tell(f"{what}: {done} of {total}")


def check_events(events: Sequence[TokenEvent]) -> int:
    """Return the number of tokens in the events. Raises RuntimeError if a request was refused."""
    for event in events:
        if event.refusal is not None:
            raise RuntimeError(f"{event.request_id} was refused: {event.refusal.message}")
    return sum(len(event.tokens) for event in events)
