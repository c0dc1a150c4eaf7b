"""Adapters from disk, through host memory, to the device: a real model, and all that can go wrong with a folder."""

import json
import shutil
import time
from dataclasses import replace

import pytest
from tiny_adapters import save_adapter

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.memory.adapters import HostCopy
from engine.core.messages.commands import Abort, DropAdapter, Submit
from engine.core.messages.requests import ErrorCode, FinishReason, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.adapters import fetcher as fetcher_module
from engine.model.adapters.packing import Packer
from engine.model.adapters.peft.settings import AdapterError
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.rpc.snapshot import snapshot

RANK, PAGES, PAGE_BYTES = 5, 2, 2 * 2 * 16 * 2 * 16 * 4
"""Holds the pages of an adapter of rank RANK, and the bytes of a page: layers, K and V, tokens, heads, elements of a
head, and the bytes of an element."""
ADAPTER_BYTES = PAGES * PAGE_BYTES + 2 * 7 * (4 + 2 * 16 * 8 + 8)
"""Its bytes in host memory, with its layout: of each projection the rank, the offsets of tiles, and of the scales."""
MARGIN = 1e-3
"""A likeliest token this much (of a logprob) ahead of the next is beyond what rounding moves."""


class SteppedEngine:
    """An engine over a tiny model, stepped by hand; host memory for `host` adapters, pages for `resident`.

    Its time stands still but when a test moves it.
    """

    def __init__(self, model, host, resident, **core):
        config = EngineConfig(str(model), dtype="float32", device="cpu", num_pages=500, max_seqs=8, threads=1)
        config = replace(config, swap_gb=0, fetch_threads=3, host_adapter_gb=host * ADAPTER_BYTES / 2**30)
        self.runner = ModelRunner(load(config))
        self.runner.loaded.arena.pages[1:] = 1e4
        defaults = {"num_pages": 500, "max_seqs": 8, "max_model_len": 64, "token_budget": 64}
        core = CoreConfig(
            host_adapter_bytes=host * ADAPTER_BYTES, max_adapter_pages=resident * PAGES, **defaults | core
        )
        self.now = 0.0
        self.engine = Engine(EngineState.create(core), self.runner, clock=lambda: self.now)
        self.streams, self.ends = {}, {}

    @property
    def state(self):
        return self.engine.state

    def load(self, folder):
        return self.engine.load_adapter(str(folder)).adapter_hash

    def submit(self, name, adapter_hash, prompt=(5, 6, 7), max_tokens=4):
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
        self.streams[name] = []
        self.engine.inbox.put(Submit(Request(name, prompt, params, adapter_hash, arrival=self.engine.clock())))

    def step(self):
        for event in self.engine.step():
            self.streams[event.request_id] += zip(event.tokens, event.logprobs, strict=True)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event
        assert violations(self.state) == []
        held = self.runner.loaded.host_adapters.num_bytes
        assert held <= self.state.adapters.held.host_bytes <= self.state.config.host_adapter_bytes
        if self.state.steps.in_flight.is_empty:
            time.sleep(0.0005)

    def finish(self):
        deadline = time.monotonic() + 60
        while self.state.has_work or self.engine.inbox._commands or self.state.adapters.fetching:
            self.step()
            assert time.monotonic() < deadline, "it never came to that"
        assert leftovers(self.state) == []

    def run(self, name, adapter_hash):
        self.submit(name, adapter_hash)
        self.finish()
        return self.ends[name]

    def tokens(self, name):
        return [token for token, _ in self.streams[name]]


@pytest.fixture
def folders(tmp_path):
    for seed, name in enumerate("xyz"):
        save_adapter(tmp_path / name, RANK, seed)
    return {name: tmp_path / name for name in "xyz"}


@pytest.fixture
def stepped(tiny_llama):
    """Has host memory for one adapter."""
    return SteppedEngine(tiny_llama, host=1, resident=1)


def test_two_hundred_adapters_through_memory_for_few(tiny_llama, tmp_path):
    small, big = SteppedEngine(tiny_llama, host=20, resident=8), SteppedEngine(tiny_llama, host=200, resident=200)
    for number in range(200):
        save_adapter(tmp_path / str(number), RANK, number)
    for stepped in (small, big):
        adapters = [stepped.load(tmp_path / str(number)) for number in range(200)]
        for number, adapter_hash in enumerate((*adapters, *adapters[::-7])):
            stepped.submit(f"r{number}", adapter_hash, prompt=(4 + number % 90, 9, 11))
        stepped.finish()
    assert len({*adapters}) == 200 and len(big.streams) == 229
    decided = 0
    for name, stream in big.streams.items():
        for place, (token, logprobs) in enumerate(stream):
            if logprobs.top[0][1] - logprobs.top[1][1] < MARGIN:
                break
            assert small.tokens(name)[place] == token
            decided += 1
    assert decided > 0.9 * 4 * len(big.streams)
    counters = small.state.counters
    assert counters.adapters.fetches >= 200 and counters.adapters.host_evictions >= 180
    assert counters.adapters.loads >= 200 and counters.adapters.evictions >= 192
    assert big.state.counters.adapters.fetches == 200 and big.state.counters.adapters.evictions == 0


def test_what_host_memory_has_no_room_for_is_read_when_it_is_wanted(stepped, folders):
    kept, read = stepped.load(folders["x"]), stepped.load(folders["y"])
    assert [stepped.state.adapters[name].host for name in (kept, read)] == [HostCopy.PRESENT, HostCopy.ABSENT]
    assert stepped.run("r", read).finish_reason is FinishReason.LENGTH
    assert [stepped.state.adapters[name].host for name in (kept, read)] == [HostCopy.ABSENT, HostCopy.PRESENT]


def make_vanish(folder):
    shutil.rmtree(folder)


def make_change(folder):
    shutil.rmtree(folder)
    save_adapter(folder, RANK, seed=99)


def make_damaged(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (make_vanish, "is not a folder"),
        (make_change, "has changed since it was loaded"),
        (make_damaged, "has changed since it was loaded"),
    ],
)
def test_a_folder_that_is_not_what_it_was_fails_its_own_waiters_only(stepped, folders, tmp_path, harm, reason):
    stepped.load(folders["x"])
    y, z = stepped.load(folders["y"]), stepped.load(folders["z"])
    shutil.copytree(folders["y"], tmp_path / "backup")
    harm(folders["y"])
    for name, adapter in (("1", y), ("2", z), ("3", y), ("4", None)):
        stepped.submit(name, adapter)
    stepped.finish()
    for name in "13":
        refusal = stepped.ends[name].refusal
        assert refusal.code is ErrorCode.ADAPTER_UNAVAILABLE and str(tmp_path) not in refusal.message
        assert refusal.retry_after > 0
    assert reason in why(stepped, y), "the reason, with its path, is for operators"
    assert [stepped.ends[name].finish_reason for name in "24"] == [FinishReason.LENGTH] * 2
    assert stepped.state.counters.adapters.fetch_failures == 1, "one fetch for both"
    at_once = stepped.run("5", y)
    assert at_once.refusal.code is ErrorCode.ADAPTER_UNAVAILABLE
    assert stepped.state.counters.adapters.fetch_failures == 1, "not sooner than the backoff"
    shutil.rmtree(folders["y"], ignore_errors=True)
    shutil.copytree(tmp_path / "backup", folders["y"])
    stepped.now += at_once.refusal.retry_after
    assert stepped.run("6", y).finish_reason is FinishReason.LENGTH
    assert why(stepped, y) == ""


def why(stepped, adapter):
    """What the engine's statistics say of the last read of an adapter."""
    told = snapshot(stepped.state, 0.0, 0.0, check=False).adapters
    return next(stats.error for stats in told if stats.adapter == adapter)


def flaky(times, seen):
    """Reads that fail so many times before they succeed."""

    read_well = Packer.read

    def read(self, path):
        seen.append(path)
        if len(seen) <= times:
            raise AdapterError(f"{path} cannot be read: stale handle") from OSError(116, "Stale file handle")
        return read_well(self, path)

    return read


@pytest.mark.parametrize(("times", "end"), [(2, FinishReason.LENGTH), (3, FinishReason.ERROR)])
def test_a_disk_that_falters_is_asked_again(stepped, folders, monkeypatch, times, end):
    monkeypatch.setattr(fetcher_module, "RETRY_AFTER_S", (0.001, 0.001))
    stepped.load(folders["x"])
    adapter, seen = stepped.load(folders["y"]), []
    monkeypatch.setattr(Packer, "read", flaky(times, seen))
    event = stepped.run("r", adapter)
    assert (event.finish_reason, len(seen)) == (end, 3)
    if end is FinishReason.ERROR:
        assert "stale handle" in why(stepped, adapter)


def test_a_bug_in_the_fetcher_leaves_no_request_waiting(stepped, folders, monkeypatch):
    stepped.load(folders["x"])
    adapter = stepped.load(folders["y"])
    monkeypatch.setattr(Packer, "pack", lambda *_: 1 / 0)
    assert stepped.run("r", adapter).refusal.code is ErrorCode.ADAPTER_UNAVAILABLE
    assert "ZeroDivisionError" in why(stepped, adapter)


def test_a_fetch_no_request_waits_for_any_more_is_called_off(stepped, folders, monkeypatch):
    stepped.load(folders["x"])
    adapter, seen = stepped.load(folders["y"]), []
    monkeypatch.setattr(fetcher_module, "RETRY_AFTER_S", (30.0, 30.0))
    monkeypatch.setattr(Packer, "read", flaky(9, seen))
    stepped.submit("r", adapter)
    while not seen:
        stepped.step()
    stepped.engine.inbox.put(Abort("r"))
    stepped.finish()
    assert stepped.state.adapters[adapter].host is HostCopy.ABSENT
    assert stepped.state.counters.adapters.fetch_failures == 0 and len(seen) == 1
    assert stepped.runner.loaded.fetcher._called_off == {}


def test_unloading_frees_every_tier(stepped, folders):
    x, y = stepped.load(folders["x"]), stepped.load(folders["y"])
    stepped.run("1", y)
    for adapter in (x, y):
        stepped.engine.inbox.put(DropAdapter(adapter))
    stepped.finish()
    assert stepped.state.adapters == {} and stepped.runner.loaded.host_adapters.num_bytes == 0
    assert stepped.state.adapter_pages == 0 and stepped.runner.loaded.arena._adapter_slots == {}


def test_the_hash_covers_what_is_computed_and_not_how_it_is_written(stepped, folders):
    """Other whitespace in the configuration is the same adapter."""
    stepped.load(folders["x"])
    adapter = stepped.load(folders["y"])
    file = folders["y"] / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=4))
    assert stepped.run("r", adapter).finish_reason is FinishReason.LENGTH
