"""A whole engine that plans each step ahead of replays, against one that computes each step with torch when it is
planned. For processes in which Triton's kernels are interpreted (graph_checks.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rerun import Rerun
from tiny_adapters import save_adapter

from engine.config import EngineConfig
from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.prompt_logprobs import unpack
from engine.core.messages.requests import FinishReason, Lane, Pooling, PoolingKind, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.runner.loading import Loaded, load
from engine.model.runner.model_runner import ModelRunner
from engine.model.sample.device_sampler import DeviceSampler
from engine.model.steps.forward import Steps, forward_over
from engine.model.steps.graphs import StepGraphs, StepParts
from lora_kernels.backend import Backend
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_sampling import SamplingTiles
from lora_kernels.pinned import UploadRing
from lora_kernels.reference import ReferenceBackend

CPU = torch.device("cpu")
BLOCK, NUM_PAGES, MAX_SEQS, MAX_LEN, VOCAB, EOS = 16, 14, 3, 64, 97, (2, 3)
TOKENS = 16
ABORT_AFTER = 2
"""Tokens."""
PARAMS = {
    "greedy": SamplingParams(6, temperature=0.0, ignore_eos=True, logprobs=2),
    "drawn": SamplingParams(6, temperature=1.1, seed=5, top_k=20, ignore_eos=True),
    "adapted": SamplingParams(6, temperature=0.0, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=0.7),
    "stopped": SamplingParams(9, temperature=0.0, stop_token_ids=tuple(range(0, VOCAB, 4))),
    "aborted": SamplingParams(6, temperature=0.0, ignore_eos=True),
    "last": SamplingParams(1, temperature=0.0, ignore_eos=True),
    "adapted prompt": SamplingParams(0, prompt_logprobs=3),
    "prompt and answer": SamplingParams(2, temperature=0.0, ignore_eos=True, prompt_logprobs=1),
}
SCORED = ("adapted prompt", "prompt and answer")
VECTORS = {"mean": Pooling(PoolingKind.MEAN), "last in batch": Pooling(normalize=False)}
IN_BATCH = ("greedy", "drawn", "adapted")
LATE = 4
"""Steps until the others come, and take the place of those in the batch lane."""


def prompt_length(name: str) -> int:
    """A page in one step or, where it is scored, some more in another."""
    return BLOCK + 5 * (name in SCORED)


class SteppedEngine:
    """Steps an engine whose pages are NaN until they are written, and keeps what came of every request."""

    def __init__(self, model: Path, adapter: Path, ahead: bool) -> None:
        sizes = {"block_size": BLOCK, "num_pages": NUM_PAGES, "max_seqs": MAX_SEQS, "max_model_len": MAX_LEN}
        config = EngineConfig(str(model), dtype="float32", device="cpu", swap_gb=0.001, threads=1, **sizes)
        self.recorder = Rerun()
        runner = ModelRunner(_sampled_with_triton(load(config), self.recorder if ahead else None))
        runner.loaded.arena.pages[1:] = torch.nan
        runner.overlaps = ahead
        core = CoreConfig(
            **sizes,
            token_budget=TOKENS,
            host_pages=6,
            eos_token_ids=EOS,
            prefix_caching=False,
            scheduling=Scheduling(preemption="swap"),
        )
        ticks = iter(range(10**9))
        self.runner = runner
        self.engine = Engine(EngineState.create(core), runner, clock=lambda: next(ticks) / 1000)
        self.adapter = self.engine.load_adapter(str(adapter)).adapter_hash
        self.tokens: dict[str, list[int]] = {name: [] for name in PARAMS}
        self.vectors: dict[str, bytes] = {}
        self.scores: dict[str, bytes] = dict.fromkeys(SCORED, b"")
        self.ends: dict[str, FinishReason] = {}

    def submit(self, name: str) -> None:
        length, adapter = prompt_length(name), self.adapter if name.startswith("adapted") else None
        lane = Lane.BATCH if name in IN_BATCH else Lane.INTERACTIVE
        self.engine.inbox.put(Submit(Request(name, tuple(range(5, 5 + length)), PARAMS[name], adapter, lane)))

    def embed(self, name: str, pooling: Pooling) -> None:
        """Ask for a vector, which takes two chunks, of the adapter."""
        lane, params = Lane.BATCH if "batch" in name else Lane.INTERACTIVE, SamplingParams(max_tokens=0)
        request = Request(name, tuple(range(5, 29)), params, self.adapter, lane, pooling=pooling)
        self.engine.inbox.put(Submit(request))

    def step(self) -> None:
        for event in self.engine.step():
            assert event.request_id not in self.ends, "an event after the terminal one"
            if event.request_id in VECTORS:
                self.vectors[event.request_id] = event.vector
                continue
            self.tokens[event.request_id] += event.tokens
            if event.prompt_logprobs:
                self.scores[event.request_id] += event.prompt_logprobs
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.finish_reason
        assert violations(self.engine.state) == []

    def run(self) -> None:
        for name in IN_BATCH:
            self.submit(name)
        for _ in range(LATE):
            self.step()
        for name in PARAMS.keys() - set(IN_BATCH):
            self.submit(name)
        for name, pooling in VECTORS.items():
            self.embed(name, pooling)
        while len(self.ends) < len(PARAMS):
            self.step()
            if len(self.tokens["aborted"]) == ABORT_AFTER:
                self.engine.inbox.put(Abort("aborted"))
        while self.engine.state.has_work:
            self.step()
        assert leftovers(self.engine.state) == [] and len(self.runner._requests.batch) == 0


def _sampled_with_triton(loaded: Loaded, recorder: Rerun | None) -> Loaded:
    """Steps are replayed if there is a recorder; otherwise torch computes them, without the interpreter."""
    attention = PagedAttention(DecodeTuning(block_n=16, split_tokens=16, max_splits=4, programs=3))
    backend: Backend = TritonBackend(LoraTuning(most_programs=4), attention) if recorder else ReferenceBackend()
    sampler = DeviceSampler(VOCAB, CPU, EOS, MAX_SEQS, SamplingTiles(128, 128))
    parts = StepParts(loaded.decoder, loaded.arena, backend, sampler)
    graphs = StepGraphs(parts, recorder, MAX_SEQS, MAX_LEN, TOKENS) if recorder else None
    forward = forward_over(parts.decoder, parts.arena, backend)
    return replace(loaded, sampler=sampler, steps=Steps(forward, sampler.last_tokens, graphs))


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("memory was pinned while the engine served")


def _unpinned(make: Any) -> Any:
    return lambda *args, **options: _refuse() if options.get("pin_memory") else make(*args, **options)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Uploads pass through a ring, as on a GPU, and whatever pins memory fails."""
    memory = torch.zeros(3, 1024, dtype=torch.uint8)
    ring = UploadRing(memory, CPU, lambda: SimpleNamespace(synchronize=lambda: None))
    with (
        patch("lora_kernels.pinned.upload_ring", lambda _: ring),
        patch.object(torch.Tensor, "pin_memory", _refuse),
        patch.object(torch.cuda, "cudart", _refuse),
        patch.object(torch, "empty", _unpinned(torch.empty)),
        patch.object(torch, "zeros", _unpinned(torch.zeros)),
    ):
        yield
    assert memory.any(), "uploads did not pass through the ring"


def _values(rows: bytes, width: int) -> list[list[float]]:
    """The logprob of each prompt token, and those of the alternatives."""
    return [[values.logprob, *(logprob for _, logprob in values.top)] for _, values in unpack(rows, width)]


def an_engine_ahead_of_replays(model: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        save_adapter(Path(scratch) / "x", 3, seed=3)
        plain, ahead = (SteppedEngine(model, Path(scratch) / "x", is_ahead) for is_ahead in (False, True))
        plain.run()
        with as_on_a_gpu():
            ahead.run()
    assert ahead.ends == plain.ends
    assert plain.ends["stopped"] is FinishReason.STOP and plain.ends["aborted"] is FinishReason.ABORT
    for name in PARAMS.keys() - {"aborted"}:
        assert ahead.tokens[name] == plain.tokens[name], name
    assert ahead.tokens["aborted"][:ABORT_AFTER] == plain.tokens["aborted"][:ABORT_AFTER]
    for name in VECTORS:
        ours, theirs = (np.frombuffer(engine.vectors[name], "<f4") for engine in (ahead, plain))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        assert np.abs(theirs).max() > 0.01
    for name in SCORED:
        ours, theirs = (_values(engine.scores[name], PARAMS[name].prompt_logprobs or 0) for engine in (ahead, plain))
        assert len(theirs) == prompt_length(name) - 1
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    counters = ahead.engine.state.counters
    assert counters.preemptions > 0 and counters.kv.restored > 0
    kinds = {number % 2 for number in ahead.recorder.replayed}
    assert kinds == {0, 1}, "replays with adapters and without"
    assert plain.recorder.replayed == []
