"""The command line, as processes: one for each command or, where there are many, one for all."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from engine.demo import DEMO_ADAPTERS
from gateway.cli.main import app


def loralane(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["check"], ["chat"], ["adapters"], ["adapters", "load"], ["adapters", "ls"], ["usage"]]
)
def test_help_explains(command):
    done = CliRunner().invoke(app, [*command, "--help"])
    assert done.exit_code == 0
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
        (["--lora", "nodir"], "NAME=PATH"),
        (["--dtype", "int3"], "bfloat16"),
        (["--model", "no/such/folder/here"], "no/such/folder/here"),
    ],
)
def test_serve_refuses_what_cannot_be_served(tmp_path, arguments, words):
    done = loralane("serve", "--data-dir", str(tmp_path), "--http-port", "0", "--grpc-port", "0", *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


SHELL = """
import json, sys
from typer.testing import CliRunner
from gateway.cli.main import app
for line in sys.stdin:
    done = CliRunner().invoke(app, json.loads(line))
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), file=sys.__stdout__, flush=True)
"""
"""A program that runs command after command, without importing anew for each what commands of the same kind share."""


@pytest.fixture
def adapters(server):
    """Runs `loralane adapters` against the server; returns what it printed."""
    target, environment = ["--url", f"http://127.0.0.1:{server.http_port}"], {**os.environ, "COLUMNS": "200"}
    command, pipe = [sys.executable, "-c", SHELL], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as shell:

        def say(*arguments):
            print(json.dumps(["adapters", *arguments, *target]), file=shell.stdin, flush=True)
            return json.loads(shell.stdout.readline())

        async def run(*arguments, fails=False):
            code, out, err = await asyncio.to_thread(say, *arguments)
            assert (code != 0) == fails, err
            return err if fails else out + err

        yield run
        shell.stdin.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_what_an_operator_does_with_adapters(adapters):
    name, folder = next(iter(DEMO_ADAPTERS.items()))
    await adapters("load", "another", str(folder))
    listed = await adapters("ls")
    assert name in listed
    assert "another" in listed
    assert "has not changed" in await adapters("reload", "another")
    assert "spare" in await adapters("alias", "another", "spare")
    assert "acme" in await adapters("allow", "another", "acme")
    [shown] = json.loads(await adapters("ls", "spare", "--json"))
    assert (shown["name"], shown["aliases"], shown["tenants"]) == ("another", ["spare"], ["acme"])
    assert json.loads(await adapters("show", "spare", "--json"))["version"] == shown["version"]
    assert shown["version"] in await adapters("show", "another")
    assert "another" not in await adapters("ls", "--tier", "fetching")
    await adapters("unload", "another")
    assert "another" not in await adapters("ls", "--sort", "last-use")
    assert "does not exist" in await adapters("unload", "another", fails=True)
    assert "no adapter" in await adapters("show", "another", fails=True)
    assert "--tier" in await adapters("ls", "--tier", "heaven", fails=True)
    await adapters("ls", "--key", "sk-demo-acme", fails=True)
