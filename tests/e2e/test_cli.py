"""The command line, as processes."""

import subprocess
import sys

import pytest


def loralane(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


@pytest.mark.parametrize("command", [[], ["serve"], ["check"], ["chat"], ["adapters"], ["adapters", "load"]])
def test_help_explains(command):
    done = loralane(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_check_accepts_and_names_what_is_wrong(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("http: {port: 8001}\n")
    bad.write_text("http: {prot: 8001}\n")
    assert loralane("check", str(good)).returncode == 0
    done = loralane("check", str(bad))
    assert done.returncode == 1
    assert "http.prot" in done.stderr
    assert "port" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora", "nodir"], "NAME=DIR"),
        (["--dtype", "int3"], "bfloat16"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
    ],
)
def test_serve_refuses_what_cannot_be_served(tmp_path, arguments, words):
    done = loralane("serve", "--data-dir", str(tmp_path), *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.asyncio(loop_scope="session")
async def test_adapters_can_be_listed_loaded_and_unloaded(server):
    import asyncio

    from engine.demo import DEMO_ADAPTERS

    name, folder = next(iter(DEMO_ADAPTERS.items()))
    target = ["--target", f"127.0.0.1:{server.grpc_port}"]
    loaded = await asyncio.to_thread(loralane, "adapters", "load", "another", str(folder), *target)
    assert loaded.returncode == 0, loaded.stderr
    listed = await asyncio.to_thread(loralane, "adapters", "ls", *target)
    assert name in listed.stdout
    assert "another" in listed.stdout
    removed = await asyncio.to_thread(loralane, "adapters", "unload", "another", *target)
    assert removed.returncode == 0, removed.stderr
    assert "another" not in (await asyncio.to_thread(loralane, "adapters", "ls", *target)).stdout
    denied = await asyncio.to_thread(loralane, "adapters", "ls", *target, "--key", "sk-demo-acme")
    assert denied.returncode == 1
