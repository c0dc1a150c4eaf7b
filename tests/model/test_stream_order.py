"""Copies and kernels on several streams never use a page in the wrong order, and copies wait for no more than they
must. Random traffic on a real engine that plans ahead, whose streams are pretended (pretended_streams.py)."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from pretended_streams import Stream, Timeline, WatchedBackend
from tiny_adapters import save_adapter

from engine.config import EngineConfig
from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.memory.adapter_copies import CudaQueue, QueuedCopies
from engine.model.memory.allocation import CPU
from engine.model.memory.arena import PageUses
from engine.model.memory.host_pages import HostPages
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner, StepMemory
from engine.model.runner.submitted import CudaClock
from engine.model.steps.forward import Steps, forward_over

VOCAB, BLOCK, NUM_PAGES, MAX_SEQS, HOST_PAGES = 97, 4, 48, 4, 12
PAGE_BYTES = 2 * 2 * BLOCK * 2 * 16 * 4  # layers, K and V, tokens, heads, elements of a head, bytes of one
RANKS = (1, 2, 3, 4, 5)
NUM_REQUESTS, ARRIVAL_STEPS = 40, 100


class WatchedCopies(QueuedCopies):
    """Counts the pages that are copied while kernels are under way, by (the kernels may use the page, the copy waits
    for them), and the copies that do not wait at all."""

    def __init__(self, arena, timeline):
        super().__init__(arena, CudaQueue(CPU))
        self._timeline, self.pages, self.early = timeline, Counter(), 0

    def begin(self, blob, pages, layout, busy=None):
        if self._timeline.are_kernels_busy:
            in_use = [self._timeline.is_busy(("page", page)) for page in pages]
            self.pages.update(zip(in_use, busy.tolist(), strict=True))
            self.early += not any(in_use)
        super().begin(blob, pages, layout, busy)


class WatchedHostPages(HostPages):
    """Counts transfers to the device, by whether they wait for every kernel launched before."""

    def __init__(self, pages, timeline):
        super().__init__(pages, CPU)
        self._stream, self._timeline, self.fetches = torch.cuda.Stream(CPU), timeline, Counter()
        for name, memory in (("host page", pages), ("saved", self._saved), ("restored", self._restored)):
            timeline.watch(name, memory)

    def _fetch(self, host_pages):
        super()._fetch(host_pages)
        if self._timeline.are_kernels_busy:
            self.fetches[self._timeline.waits_for_kernels(self._stream)] += 1


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for rank in RANKS:
        save_adapter(root / str(rank), rank, seed=rank)
    return [root / str(rank) for rank in RANKS]


class Traffic:
    """Random requests of both lanes, with and without adapters, some of which are aborted, on an engine with too little
    memory for them."""

    def __init__(self, model, adapter_folders, preemption, seed=0):
        sizes = {"block_size": BLOCK, "num_pages": NUM_PAGES, "max_seqs": MAX_SEQS, "max_resident_adapters": 3}
        swap_gb = (HOST_PAGES + 0.5) * PAGE_BYTES / 2**30
        config = EngineConfig(str(model), dtype="float32", device="cpu", swap_gb=swap_gb, threads=1, **sizes)
        core = CoreConfig(
            **sizes,
            host_pages=HOST_PAGES,
            max_model_len=64,
            token_budget=16,
            eos_token_ids=tuple(range(0, VOCAB, 9)),
            scheduling=Scheduling(preemption=preemption),
        )
        self.timeline, self._random = Timeline(), np.random.default_rng(seed)
        ticks, loaded = iter(range(10**9)), load(config)
        with self.timeline.pretend():
            runner = self._pretend(loaded)
        self.engine = Engine(EngineState.create(core), runner, clock=lambda: next(ticks) / 1000)
        self._hashes = [None, *(self.engine.load_adapter(str(folder)).adapter_hash for folder in adapter_folders)]

    def _pretend(self, loaded):
        """Returns a runner on the CPU that uses streams and events as on a GPU."""
        arena, self.timeline.current = loaded.arena, self.timeline.kernels
        self.timeline.watch("page", arena.pages)
        arena.copies = self.copies = WatchedCopies(arena.pages, self.timeline)
        self.host_pages = WatchedHostPages(loaded.host_pages.pages, self.timeline)
        backend = WatchedBackend(loaded.backend, self.timeline, arena.shape.elements)
        steps = Steps(forward_over(loaded.decoder, arena, backend), loaded.sampler.last_tokens)
        runner = ModelRunner(replace(loaded, host_pages=self.host_pages, steps=steps))
        runner.overlaps, runner._clock = True, CudaClock()
        return runner

    def run(self, until_race=False):
        arrivals = Counter(self._random.integers(0, ARRIVAL_STEPS, NUM_REQUESTS).tolist())
        engine, step = self.engine, 0
        with self.timeline.pretend():
            while step <= ARRIVAL_STEPS or engine.state.has_work:
                for number in range(arrivals[step]):
                    engine.inbox.put(Submit(self._request(f"{step}.{number}")))
                if self._random.random() < 0.02 and engine.state.running:
                    engine.inbox.put(Abort(str(self._random.choice(list(engine.state.running)))))
                engine.step()
                assert violations(engine.state) == []
                step += 1
                if until_race and self.timeline.races:
                    return
        assert leftovers(engine.state) == []

    def _request(self, name):
        random = self._random
        params = SamplingParams(int(random.integers(1, 24)), seed=len(name), ignore_eos=random.random() < 0.5)
        prompt = tuple(random.integers(4, VOCAB, int(random.integers(1, 30))).tolist())
        lane = Lane.BATCH if random.random() < 0.6 else Lane.INTERACTIVE
        return Request(name, prompt, params, self._hashes[int(random.integers(len(self._hashes)))], lane)


@pytest.mark.parametrize("preemption", ["swap", "checkpoint"])
def test_copies_wait_for_the_kernels_that_use_their_pages_and_for_no_others(
    tiny_llama, adapter_folders, preemption, monkeypatch
):
    """The first part of a restore waits for no kernel under way, the others for those that empty the buffer."""
    monkeypatch.setattr("engine.model.memory.host_pages.STAGING_BYTES", 4 * PAGE_BYTES)
    traffic = Traffic(tiny_llama, adapter_folders, preemption)
    traffic.run()
    counters = traffic.engine.state.counters
    assert traffic.timeline.races == []
    assert min(counters.preemptions, counters.kv.restored, counters.kv.saved, counters.adapters.evictions) > 0
    assert set(traffic.copies.pages) == {(False, False), (True, True)} and traffic.copies.early
    assert set(traffic.host_pages.fetches) == {False, True}


def wait_of_kernels(wait):
    """A wait of a stream that only has an effect for the stream of kernels."""
    return lambda stream, other: wait(stream, other) if stream is stream.timeline.kernels else None


MUTANTS = {
    "a copy for the kernels that use its pages": (CudaQueue, "after_kernels", lambda queue: None),
    "a copy for the step under way": (StepMemory, "uses", lambda *_: PageUses()),
    "kernels for a layer of an adapter": (CudaQueue, "before_kernels", lambda queue, mark: None),
    "kernels for transfers of KV": (HostPages, "_wait_for_copies", lambda pages: None),
    "a transfer for the kernels that fill its buffer": (Stream, "wait_stream", wait_of_kernels(Stream.wait_stream)),
    "a transfer for the kernels that empty its buffer": (Stream, "wait_event", wait_of_kernels(Stream.wait_event)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_found(tiny_llama, adapter_folders, name, monkeypatch):
    monkeypatch.setattr("engine.model.memory.host_pages.STAGING_BYTES", 4 * PAGE_BYTES)
    monkeypatch.setattr(*MUTANTS[name])
    traffic = Traffic(tiny_llama, adapter_folders, "swap")
    traffic.run(until_race=True)
    assert traffic.timeline.races
