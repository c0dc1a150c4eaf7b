"""What all commands share: one address, one message where no gateway answers, all errors at once; and the chat."""

from __future__ import annotations

import inspect
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from served import served
from typer.core import TyperGroup
from typer.testing import CliRunner

from gateway.cli.chat import ChatClient, ChatError, checked_model
from gateway.cli.main import app, imported
from gateway.cli.subcommands import SUBCOMMANDS
from gateway.terminal.tls import CHOSEN, TlsFiles

AWAY = "Start one with `loralane serve`, or name another with --url or LORALANE_URL."
COMMANDS = [
    ["chat"],
    ["adapters", "ls"],
    ["limits", "get"],
    ["lanes", "ls"],
    ["engines", "ls"],
    ["requests", "ls"],
    ["tenants", "ls"],
    ["usage"],
    ["batch", "list"],
    ["bench", "serve", "--warmup", "0"],
]


@pytest.fixture
def nowhere():
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_takes_the_address_from_the_environment_and_says_what_to_do(command, nowhere):
    done = CliRunner().invoke(app, command, env={"LORALANE_URL": nowhere, "COLUMNS": "500"})
    assert done.exit_code == 1
    assert f"No gateway answers at {nowhere}. {AWAY}" in " ".join(done.output.split())


@pytest.mark.parametrize("key", ["sk-one\n-two", "sk-\x07bell", "sk-schlüssel"])
@pytest.mark.parametrize("command", [["tenants", "ls"], ["batch", "list"]])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(command, key):
    result = CliRunner(env={"COLUMNS": "500"}).invoke(app, [*command, "--key", key])
    assert result.exit_code == 2
    assert "characters that no API key has" in result.output
    assert "sk-" not in result.output


def test_white_space_around_a_key_is_left_out(nowhere):
    result = CliRunner(env={"LORALANE_ADMIN_KEY": "sk-secret\n"}).invoke(app, ["tenants", "ls", "--url", nowhere])
    assert "No gateway answers" in result.output
    assert "sk-secret" not in result.output


def test_the_flag_comes_before_the_environment(nowhere):
    env = {"LORALANE_URL": "http://127.0.0.1:1", "COLUMNS": "500"}
    for command in (["chat"], ["lanes", "ls"]):
        assert f"at {nowhere}. " in CliRunner().invoke(app, [*command, "--url", nowhere], env=env).output


def leaves(command: Any) -> Iterator[Any]:
    """Yield the commands that take options: those below a command, or the command itself."""
    if not isinstance(command, TyperGroup):
        yield command
        return
    for below in command.commands.values():
        yield from leaves(below)


def test_help_says_of_each_command_what_the_command_says_itself():
    for name, entry in SUBCOMMANDS.items():
        assert inspect.cleandoc(imported(name).help).split("\n\n")[0].split() == entry.summary.split()


def test_no_command_ignores_unknown_options():
    found = [leaf for name in SUBCOMMANDS for leaf in leaves(imported(name))]
    assert len(found) > 40
    assert not [each.name for each in found if each.ignore_unknown_options or each.allow_extra_args]
    assert not [
        each.name for each in found if {"ignore_unknown_options", "allow_extra_args"} & each.context_settings.keys()
    ]


def test_help_lists_the_commands_without_importing_them():
    code = """if True:
        import sys
        from gateway.cli.main import app
        app(["--help"], standalone_mode=False)
        print(sorted(name for name in sys.modules if name.startswith(("gateway.cli.", "httpx", "grpc", "numpy"))))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f" {name} " in done.stdout for name in SUBCOMMANDS)
    assert done.stdout.splitlines()[-1] == "['gateway.cli.main', 'gateway.cli.subcommands']"


class Root(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(self.server.answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_what_is_no_gateway_is_said_to_be_none():
    with ThreadingHTTPServer(("127.0.0.1", 0), Root) as server:
        server.answer = {"hello": "world"}
        Thread(target=server.serve_forever).start()
        done = CliRunner().invoke(app, ["lanes", "ls", "--url", f"http://127.0.0.1:{server.server_port}"])
        server.shutdown()
    assert "is no answer of a gateway" in " ".join(done.output.split())
    assert done.exit_code == 1


def test_an_address_without_a_scheme_is_refused():
    done = CliRunner().invoke(app, ["lanes", "ls", "--url", "gateway:50051"])
    assert done.exit_code == 1
    assert "name it as http://HOST:PORT" in " ".join(done.output.split())


def test_a_name_that_no_path_can_have_is_refused_before_a_call(nowhere):
    done = CliRunner().invoke(app, ["adapters", "pin", "a/../b", "--url", nowhere])
    assert done.exit_code == 1
    assert "is no name of an adapter" in " ".join(done.output.split())


WRONG = """
model: {name: 7up, sauce: embedded}
lanes: {interactive: {max_requests: none}}
http: {prot: 1}
tenants:
  acme: {keys: [sk-in-the-file], weight: heavy, limits: {tokens_per_minute: "${ABSENT}"}}
  globex: {keyz: []}
  initech: {limits: "${ALSO_ABSENT}"}
nothing: {}
"""


def test_check_tells_everything_that_is_wrong(tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text(WRONG)
    done = CliRunner().invoke(app, ["check", str(file)], env={"COLUMNS": "500"})
    assert done.exit_code == 1
    for words in (
        "model.sauce: unknown key; did you mean source?",
        "lanes.interactive.max_requests: ",
        "http.prot: unknown key; did you mean port?",
        "tenants.acme.keys[0]: write ${VARIABLE}",
        "tenants.acme.weight: Expected ",
        "tenants.acme.limits.tokens_per_minute: the environment variable ABSENT is not set",
        "tenants.globex.keyz: unknown key; did you mean keys?",
        "tenants.initech.limits: the environment variable ALSO_ABSENT is not set",
        "nothing: unknown key",
    ):
        assert words in done.output, words
    assert "sk-in-the-file" not in done.output


# --- the chat -------------------------------------------------------------------------------------------------------


class Typed(Console):
    """A terminal at which these lines are typed."""

    def __init__(self, *lines: str) -> None:
        super().__init__(file=io.StringIO(), width=200)
        self._lines = iter(lines)

    def input(self, *_args, **_kwargs) -> str:
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with served(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def talk(gateway, *lines: str, model: str | None = None) -> str:
    CHOSEN.set(TlsFiles())
    console = Typed(*lines)
    ChatClient(gateway.url, "sk-acme", model, None).run(console)
    return console.file.getvalue()


def test_a_chat_answers_and_knows_its_commands(gateway):
    base = gateway.gateway_app.gateway.models.default.name
    told = talk(gateway, "Hi", "/help", "/lane batch", "Again", "/lane", "/model", f"/model {base}", "/exit", "unheard")
    assert told.count("Hello, world!") == 2
    assert "/lane NAME" in told
    assert told.count("lane: batch") == 2
    assert f"now {base}" in told
    assert [request.lane.name for request in gateway.gateway_app.engine.requests[-2:]] == ["INTERACTIVE", "BATCH"]


def test_a_chat_refuses_what_there_is_not(gateway):
    base = gateway.gateway_app.gateway.models.default.name
    told = talk(gateway, "/model pirat", "/lane express", "/halp", "Hi")
    assert f"there is no model 'pirat'; there are: {base}" in told or "there is no model 'pirat'; did you mean" in told
    assert "there is no lane 'express'; there are: interactive, batch" in told
    assert "there is no command /halp; /help lists" in told
    assert "Hello, world!" in told, "the conversation goes on"
    with pytest.raises(ChatError, match="there is no model 'gpt-5'; there are: "):
        talk(gateway, model="gpt-5")


def test_the_nearest_model_is_named():
    assert checked_model("pirate", ["base", "pirate"]) == "pirate"
    with pytest.raises(ChatError, match=r"did you mean pirate\? there are: base, pirate"):
        checked_model("pirat", ["base", "pirate"])


def test_grpc_says_nothing_of_forks():
    """Without this setting, gRPC writes a line to standard error for each process that a busy gateway starts."""
    calls = (
        "import os, sys, gateway.__main__ as command; sys.argv[1:] = ['--version']\n"
        "try:\n    command.main()\nexcept SystemExit:\n    print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    )
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run([sys.executable, "-c", calls], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "0"
