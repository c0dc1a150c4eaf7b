"""Spoiled adapter folders against the whole engine: refused with a reason, they load nothing and leak nothing.

Every example is a sequence of sound and spoiled folders. A refusal must leave host memory, pages, known adapters and
open files as they were; a folder that a flipped bit left sound may load, and is unloaded again.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft_folders import TARGETS, base_model, save_adapter
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.state import EngineState
from engine.core.types import AdapterId, Request, SamplingParams, Submit
from engine.engine import Engine
from engine.model.runner import ModelRunner

NUM_PAGES = 120
CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
KINDS = {
    "plain": {"target_modules": list(TARGETS)},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "patterns": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True},
}
DTYPES = {"I32": 4, "U8": 1, "F8_E4M3": 1, "BOOL": 1, "C64": 8, "F64": 8, "NONSENSE": 4}

Spoil = Callable[[Path, st.DataObject], None]


@dataclass
class Server:
    """An engine in a thread of its own, as in life."""

    engine: Engine
    events: list
    ended: threading.Event

    def footprint(self) -> tuple[object, ...]:
        """What a refused adapter may not change."""
        known = self.engine.inspect(lambda state: (sorted(state.adapters), len(state.pool.free), state.adapter_pages))
        return (*known, self.engine.executor._host.num_bytes, len(os.listdir("/dev/fd")))

    def unload_all(self) -> None:
        for adapter in self.engine.inspect(lambda state: list(state.adapters)):
            self.engine.unload_adapter(adapter, 1.0)

    def answer(self, adapter: AdapterId) -> tuple[int, ...]:
        """Six greedy tokens."""
        self.events.clear()
        self.ended.clear()
        params = SamplingParams(6, temperature=0.0, ignore_eos=True)
        self.engine.inbox.put(Submit(Request("r", (5, 9, 33, 7), params, adapter)))
        assert self.ended.wait(20)
        return tuple(token for event in self.events for token in event.tokens)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    base_model().save_pretrained(folder)
    runner = ModelRunner(
        EngineConfig(str(folder), dtype="float32", device="cpu", num_pages=NUM_PAGES, max_seqs=2, threads=1)
    )
    core = CoreConfig(NUM_PAGES, runner.block_size, max_seqs=2, max_model_len=64, prefix_caching=False)
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


# --- what can be wrong with a folder ------------------------------------------------------------------------------


def truncate(folder: Path, data: st.DataObject) -> None:
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])


def flip_bits(folder: Path, data: st.DataObject) -> None:
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    content = bytearray(file.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0] if file.name == WEIGHTS else len(content)
    reach = data.draw(st.sampled_from((8, header, len(content))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(reach, len(content)) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def rename_key(folder: Path, data: st.DataObject) -> None:
    def change(tensors):
        key = data.draw(st.sampled_from(sorted(tensors)))
        part = data.draw(st.sampled_from(("lora_A", "lora_B", "lora_", "layers.1", "base_model.", "weight", "q_proj")))
        tensors[key.replace(part, data.draw(st.text(max_size=12)))] = tensors.pop(key)

    rewrite(folder, change)


def drop_key(folder: Path, data: st.DataObject) -> None:
    rewrite(folder, lambda tensors: tensors.pop(data.draw(st.sampled_from(sorted(tensors)))))


def reshape(folder: Path, data: st.DataObject) -> None:
    def change(tensors):
        key = data.draw(st.sampled_from(sorted(tensors)))
        tensors[key] = torch.zeros(data.draw(st.lists(st.integers(0, 40), max_size=4)))

    rewrite(folder, change)


def break_numbers(folder: Path, data: st.DataObject) -> None:
    def change(tensors):
        key = data.draw(st.sampled_from(sorted(tensors)))
        tensors[key].view(-1)[0] = data.draw(st.sampled_from((float("nan"), float("inf"), 3e38)))

    rewrite(folder, change)


def write_header(folder: Path, header: bytes, body: bytes = b"", length: int | None = None) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)


def change_header(folder: Path, data: st.DataObject) -> None:
    """Wrong dtypes, shapes and offsets over the same bytes."""
    content = (folder / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    entry = header[data.draw(st.sampled_from(sorted(key for key in header if key != "__metadata__")))]
    field = data.draw(st.sampled_from(("dtype", "shape", "data_offsets")))
    numbers = st.lists(st.integers(-1, 2**65), max_size=4)
    entry[field] = data.draw(st.sampled_from(sorted(DTYPES)) if field == "dtype" else numbers)
    write_header(folder, json.dumps(header).encode(), body)


def huge_header(folder: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(("length", "padding", "nesting", "tensors")))
    if kind == "length":
        write_header(folder, b"{}", length=data.draw(st.integers(3, 2**64 - 1)))
    elif kind == "padding":
        write_header(folder, b"{" + b" " * (17 << 20) + b"}")
    elif kind == "nesting":
        write_header(folder, b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    else:
        entries = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
        write_header(folder, json.dumps(entries).encode())


def link_out(folder: Path, data: st.DataObject) -> None:
    """A file that is a link to one outside, or in circles."""
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    outside = folder.parent / "outside"
    if data.draw(st.booleans()):
        shutil.move(file, outside)
        file.symlink_to(data.draw(st.sampled_from((outside, Path("..") / "outside"))))
    else:
        file.unlink()
        file.symlink_to(file.name)


def only_a_pickle(folder: Path, data: st.DataObject) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / PICKLE)  # opening it would hang


def not_a_file(folder: Path, data: st.DataObject) -> None:
    file = folder / data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    file.unlink()
    kind = data.draw(st.sampled_from(("absent", "folder", "fifo", "sparse")))
    if kind == "folder":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "sparse":
        with file.open("wb") as empty:
            empty.truncate(1 << 42)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)
FIELDS = (
    "peft_type",
    "r",
    "lora_alpha",
    "target_modules",
    "rank_pattern",
    "use_dora",
    "modules_to_save",
    "bias",
    "new",
)


def change_config(folder: Path, data: st.DataObject) -> None:
    fields = json.loads((folder / CONFIG).read_text())
    changes = data.draw(st.dictionaries(st.sampled_from(FIELDS), JUNK, min_size=1, max_size=3))
    (folder / CONFIG).write_text(json.dumps(fields | changes))


SPOILS: dict[str, Spoil] = {
    spoil.__name__: spoil
    for spoil in (
        truncate,
        flip_bits,
        rename_key,
        drop_key,
        reshape,
        break_numbers,
        change_header,
        huge_header,
        link_out,
        only_a_pickle,
        not_a_file,
        change_config,
    )
}


# --- what must follow ---------------------------------------------------------------------------------------------


NAMED = (CONFIG, WEIGHTS, PICKLE, "lora_", "base_model", "model.layers.", *FIELDS)
"""Files, tensors, modules and fields that a reason may point to; or it begins with a key that nobody knows."""


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
    if loaded.id not in before[0]:
        server.engine.unload_adapter(loaded.id, 1.0)
    assert server.footprint() == before
    return None


ALWAYS_REFUSED = {"truncate", "drop_key", "huge_header", "link_out", "only_a_pickle", "not_a_file"}


@given(data=st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
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


def test_sound_adapters_answer_the_same_after_spoiled_ones(server, sound, tmp_path):
    loaded = {name: server.engine.load_adapter(str(folder)).id for name, folder in sound.items()}
    first = {name: server.answer(adapter) for name, adapter in loaded.items()}
    assert len(set(first.values())) > 1
    shutil.copytree(sound["plain"], tmp_path / "adapter")
    rewrite(tmp_path / "adapter", lambda tensors: tensors[sorted(tensors)[-1]].view(-1)[0].fill_(float("nan")))
    assert "NaN or infinite" in load_spoiled(server, tmp_path / "adapter")
    assert {name: server.answer(adapter) for name, adapter in loaded.items()} == first
    server.unload_all()
