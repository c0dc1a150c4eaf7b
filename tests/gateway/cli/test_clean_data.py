"""`make clean-data` shows and asks, removes what is loralane's and nothing else, and never under a running gateway."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.rpc.client import EngineClient
from gateway.cli import clean_data
from gateway.redis.server import embedded_valkey
from gateway.serve.supervisor import EngineSupervisor

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def data_dir(tmp_path):
    folder = tmp_path / "data"
    for name in clean_data.CONTENTS:
        (folder / name).mkdir(parents=True)
        (folder / name / "content").write_bytes(b"x" * 2048)
    return folder


def clean(data_dir, *arguments):
    return clean_data.main(["--data-dir", str(data_dir), *arguments])


def test_it_shows_what_goes_and_needs_a_yes(data_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert clean(data_dir) == 1, "there is no terminal, so nothing was asked"
    told = capsys.readouterr()
    assert "YES=1" in told.err and all(f"2.0 KiB  {name}/" in told.out for name in clean_data.CONTENTS)
    assert len(list(data_dir.iterdir())) == len(clean_data.CONTENTS)
    assert clean(data_dir, "--yes") == 0
    assert not data_dir.exists()
    assert clean(data_dir, "--yes") == 0 and "nothing of loralane's" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "is_removed"), [("y", True), ("yes", True), ("", False), ("n", False)])
def test_a_terminal_is_asked(data_dir, monkeypatch, answer, is_removed):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{answer}\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert clean(data_dir) == int(not is_removed)
    assert data_dir.exists() != is_removed


def test_what_is_not_loralanes_stays_and_links_are_not_followed(data_dir, tmp_path, capsys):
    mine = tmp_path / "my-adapters"
    mine.mkdir()
    (mine / "weights").write_text("precious")
    (data_dir / "notes.txt").write_text("mine")
    (data_dir / "models" / "linked").symlink_to(mine)
    for path in (data_dir / "adapters").iterdir():
        path.unlink()
    (data_dir / "adapters").rmdir()
    (data_dir / "adapters").symlink_to(mine)
    assert clean(data_dir, "--yes") == 0
    assert "It leaves alone: notes.txt" in capsys.readouterr().out
    assert [entry.name for entry in data_dir.iterdir()] == ["notes.txt"]
    assert (mine / "weights").read_text() == "precious"


async def test_it_refuses_while_a_gateway_keeps_its_store_there(data_dir, capsys):
    (data_dir / "valkey" / "content").unlink()
    async with embedded_valkey(data_dir / "valkey"):
        assert clean(data_dir, "--yes") == 1
    assert "stop it first" in capsys.readouterr().err
    assert clean(data_dir, "--yes") == 0


@pytest.mark.slow
async def test_it_refuses_while_an_engine_runs_there_though_redis_is_elsewhere(data_dir, tmp_path, capsys):
    config = EngineConfig(model="fake", num_pages=100, block_size=4, state_dir=str(data_dir / "engine"))
    async with EngineSupervisor(config, tmp_path / "socket", ("engine.serve.server", "--fake")) as running:
        client = EngineClient(running.address)
        await client.start()
        await client.wait_ready()
        assert clean(data_dir, "--yes") == 1
        await client.close()
    assert "stop it first" in capsys.readouterr().err
    assert clean(data_dir, "--yes") == 0


def test_make_finds_the_data_directory_as_the_gateway_does(data_dir):
    environment = {"PATH": os.environ["PATH"], "LORALANE_DATA_DIR": str(data_dir)}
    command = ["make", "-s", "clean-data", f"PYTHON={sys.executable}"]

    def made(*words):
        return subprocess.run([*command, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False)

    assert made().returncode != 0 and data_dir.exists()
    assert made("YES=1").returncode == 0 and not data_dir.exists()
