"""An adapter whose loading takes the engine process down is refused by name after a bound; others are loaded."""

import asyncio
import threading
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.process.load_attempts import MOST_LOST, LoadAttempts
from engine.rpc.api import AdapterRejected
from engine.rpc.client import EngineClient
from gateway.serve import supervisor
from gateway.serve.supervisor import EngineSupervisor

UNENDED = []
"""Loads that do not end during a test: Python would end them when nothing refers to them."""


@pytest.fixture(autouse=True)
def ended_at_last():
    yield
    while UNENDED:
        UNENDED.pop().__exit__(None, None, None)


def begin(attempts, path):
    UNENDED.append(attempts.counted(str(path)))
    UNENDED[-1].__enter__()


def die_while_loading(folder, path):
    """Leave behind what a process does that is killed while it loads an adapter."""
    begin(LoadAttempts(folder), path)


def load(folder, path):
    with LoadAttempts(folder).counted(str(path)):
        pass


def test_an_adapter_is_refused_when_too_many_of_its_loads_never_ended(tmp_path):
    counts, path = tmp_path / "counts", tmp_path / "adapter"
    for _ in range(MOST_LOST):
        die_while_loading(counts, path)
    with pytest.raises(ValueError, match=f"ended {MOST_LOST} times while it loaded this adapter"):
        load(counts, path)
    load(counts, tmp_path / "another")
    for count in counts.iterdir():
        count.unlink()
    load(counts, path)


@pytest.mark.parametrize("names", [("adapter_model.safetensors",), ("a.gguf",)])
def test_replaced_files_are_tried_again(tmp_path, names):
    counts, folder = tmp_path / "counts", tmp_path / "adapter"
    folder.mkdir()
    files = [folder / name for name in names]
    for path in (folder, *(file for file in files if file.suffix == ".gguf")):
        for file in files:
            file.write_bytes(b"deadly")
        for _ in range(MOST_LOST):
            die_while_loading(counts, path)
        with pytest.raises(ValueError, match=f"ended {MOST_LOST} times"):
            load(counts, path)
        for file in files:
            file.write_bytes(b"mended it")
        load(counts, path)


def test_a_load_that_ends_takes_its_count_back_however_it_ends(tmp_path):
    die_while_loading(tmp_path / "counts", "/adapter")
    with pytest.raises(OSError, match="unreadable"), LoadAttempts(tmp_path / "counts").counted("/adapter"):
        raise OSError("unreadable")
    assert not list((tmp_path / "counts").iterdir())


def test_new_files_begin_anew(tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"bad")
    for _ in range(MOST_LOST):
        die_while_loading(tmp_path / "counts", tmp_path)
    weights.write_bytes(b"better")
    load(tmp_path / "counts", tmp_path)


def test_a_process_that_is_told_to_stop_blames_no_load(tmp_path):
    attempts = LoadAttempts(tmp_path / "counts")
    begin(attempts, "/slow")
    assert list((tmp_path / "counts").iterdir())
    attempts.forget()
    assert not list((tmp_path / "counts").iterdir())


def test_one_path_loaded_by_two_gateways_is_no_suspect_and_counts_until_both_are_done(tmp_path):
    attempts = LoadAttempts(tmp_path / "counts")
    with attempts.counted("/adapter"):
        with attempts.counted("/adapter"):
            pass
        assert list((tmp_path / "counts").iterdir())
    assert not list((tmp_path / "counts").iterdir())


def test_a_suspect_is_loaded_alone(tmp_path):
    die_while_loading(tmp_path / "counts", "/suspect")
    attempts = LoadAttempts(tmp_path / "counts")
    order, loaded = [], threading.Event()

    def suspect():
        with attempts.counted("/suspect"):
            order.append("suspect")
        loaded.set()

    with attempts.counted("/other"):
        thread = threading.Thread(target=suspect)
        thread.start()
        order.append("other")
    assert loaded.wait(30)
    thread.join()
    with attempts.counted("/other"):
        order.append("other")
    assert order == ["other", "suspect", "other"]


@pytest.mark.slow
async def test_an_engine_is_ready_in_spite_of_an_adapter_that_kills_it(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{Path(__file__).parents[3]}")
    config = EngineConfig(model="fake", num_pages=100, block_size=4, state_dir=str(tmp_path / "state"))
    async with EngineSupervisor(config, tmp_path / "socket", ("deadly_engine", "--fake")) as running:
        client = EngineClient(running.address)
        tried, refused, lives = [], {}, set()

        async def load(name):
            tried.append(name)
            try:
                await client.load_adapter(str(tmp_path / name))
            except AdapterRejected as error:
                refused[name] = str(error)

        async def restore():
            lives.add(running.pid)
            await asyncio.gather(*(load(name) for name in ("poet", "venom", "pirate")))

        client.on_connect = restore
        await client.start()
        try:
            await asyncio.wait_for(client.wait_ready(), 120)
        finally:
            await client.close()
    assert refused.keys() == {"venom"} and "not loaded again" in refused["venom"]
    assert len(lives) == MOST_LOST + 1 and tried.count("venom") == MOST_LOST + 1
