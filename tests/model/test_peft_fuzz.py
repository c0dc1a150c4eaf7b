"""Spoiled adapters against the whole engine: refused with a reason, they load nothing and leak nothing.

Every example is a sequence of sound and spoiled folders. A refusal must leave host memory, pages, known adapters and
open files as they were; a folder that a flipped bit left sound may load, and is unloaded again.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gguf_adapters import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft_folders import CONVERTED, TARGETS, base_model, save_adapter
from peft_spoils import CONFIG, FIELDS, PICKLE, SPOILS, WEIGHTS, rewrite

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.messages.commands import Submit
from engine.core.messages.requests import AdapterHash, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner

NUM_PAGES = 120
KINDS = {
    "plain": {"target_modules": list(TARGETS)},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True},
    **{name: CONVERTED[name] for name in ("vera", "lokr", "ia3")},
}


def adapter_files_open() -> list[str]:
    """Return the open files of adapters; what tests before this one left behind is closed whenever it is collected."""
    links = [f"/dev/fd/{entry}" for entry in os.listdir("/dev/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    return sorted(name for name in names if name.endswith((WEIGHTS, CONFIG, ".gguf")))


@dataclass
class Server:
    """An engine in a thread of its own, as in life."""

    engine: Engine
    events: list
    ended: threading.Event

    def footprint(self) -> tuple[object, ...]:
        """What a refused adapter may not change."""
        known = self.engine.inspect(lambda state: (sorted(state.adapters), len(state.pool.free), state.adapter_pages))
        return (*known, self.engine.executor.loaded.host_adapters.num_bytes, adapter_files_open())

    def unload_all(self) -> None:
        for adapter in self.engine.inspect(lambda state: list(state.adapters)):
            self.engine.unload_adapter(adapter, 1.0)

    def answer(self, adapter_hash: AdapterHash) -> tuple[int, ...]:
        """Six greedy tokens."""
        self.events.clear()
        self.ended.clear()
        params = SamplingParams(6, temperature=0.0, ignore_eos=True)
        self.engine.inbox.put(Submit(Request("r", (5, 9, 33, 7), params, adapter_hash)))
        assert self.ended.wait(20)
        return tuple(token for event in self.events for token in event.tokens)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    base_model().save_pretrained(folder)
    runner = ModelRunner(
        load(EngineConfig(str(folder), dtype="float32", device="cpu", num_pages=NUM_PAGES, max_seqs=2, threads=1))
    )
    core = CoreConfig(NUM_PAGES, runner.facts.config.block_size, max_seqs=2, max_model_len=64, prefix_caching=False)
    running = Server(Engine(EngineState.create(core), runner), [], threading.Event())

    def deliver(events):
        running.events.extend(events)
        if any(event.finish_reason for event in events):
            running.ended.set()

    thread = threading.Thread(target=running.engine.run, args=(deliver,), daemon=True)
    thread.start()
    yield running
    running.engine.stop()
    thread.join(20)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in KINDS}
    for seed, (name, folder) in enumerate(folders.items()):
        save_adapter(folder, seed=seed, size=0.3, **KINDS[name])
    return folders


NAMED = (CONFIG, WEIGHTS, PICKLE, ".gguf", "lora_", "vera_", "base_model", "model.layers.", *FIELDS)
"""Files, tensors, modules and fields that a reason may point to; or the reason begins with an unknown key."""


def is_good(reason: str) -> bool:
    return "\n" not in reason and len(reason) < 1000 and (reason[0] in "'\"" or any(name in reason for name in NAMED))


def load_spoiled(server: Server, folder: Path) -> str | None:
    """The reason of the refusal; None if it was no refusal, and then nothing of it is left either."""
    before = server.footprint()
    try:
        loaded = server.engine.load_adapter(str(folder))
    except ValueError as error:
        reason = str(error)
        assert server.footprint() == before
        assert is_good(reason), reason
        return reason
    if loaded.adapter_hash not in before[0]:
        server.engine.unload_adapter(loaded.adapter_hash, 1.0)
    assert server.footprint() == before
    return None


ALWAYS_REFUSED = {"truncate", "drop_key", "huge_header", "link_out", "only_a_pickle", "not_a_file"}


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_spoiled_folders_leave_nothing_behind(data, server, sound, tmp_path_factory):
    empty = server.footprint()
    try:
        for kind in data.draw(st.lists(st.sampled_from((*KINDS, *SPOILS)), min_size=1, max_size=5)):
            if kind in KINDS:
                server.engine.load_adapter(str(sound[kind]))
                continue
            folder = tmp_path_factory.mktemp("spoiled") / "adapter"
            shutil.copytree(sound[data.draw(st.sampled_from(sorted(KINDS)))], folder)
            SPOILS[kind](folder, data)
            reason = load_spoiled(server, folder)
            assert reason is not None or kind not in ALWAYS_REFUSED
            shutil.rmtree(folder.parent)
    finally:
        server.unload_all()
    assert server.footprint() == empty


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_spoiled_gguf_files_leave_nothing_behind(data, server, sound, tmp_path_factory):
    file = write_gguf(sound["plain"], tmp_path_factory.mktemp("spoiled") / "adapter.gguf")
    content = bytearray(file.read_bytes())
    reach = data.draw(st.sampled_from((200, 2000, len(content))))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, reach - 1))] ^= 1 << data.draw(st.integers(0, 7))
    length = data.draw(st.just(len(content)) | st.integers(0, len(content) - 1))
    file.write_bytes(content[:length])
    assert load_spoiled(server, file) is not None or length == len(content)
    shutil.rmtree(file.parent)


def test_sound_adapters_answer_the_same_after_spoiled_ones(server, sound, tmp_path):
    loaded = {name: server.engine.load_adapter(str(folder)).adapter_hash for name, folder in sound.items()}
    first = {name: server.answer(adapter) for name, adapter in loaded.items()}
    assert len(set(first.values())) > 1
    shutil.copytree(sound["plain"], tmp_path / "adapter")
    rewrite(tmp_path / "adapter", lambda tensors: tensors[sorted(tensors)[-1]].view(-1)[0].fill_(float("nan")))
    assert "NaN or infinite" in load_spoiled(server, tmp_path / "adapter")
    assert {name: server.answer(adapter) for name, adapter in loaded.items()} == first
    server.unload_all()
