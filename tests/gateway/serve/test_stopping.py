"""How a gateway stops: what signals ask for, what becomes of running requests, and what is checked before a start."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from contextlib import closing
from dataclasses import replace

import httpx
import pytest
from fakes import BASE, GatewayApp, build_gateway_app, principal
from records import make_request

from engine.model.folders.prepare import NoSpace, prepare_model
from engine.process.files import filling, partial_prefix, partials, remove_abandoned
from gateway.config.sections import GrpcConfig, HttpConfig, RedisConfig, TlsConfig
from gateway.config.whole import demo_config
from gateway.core.errors import ApiError, Fault
from gateway.redis.server import created_folder, locked_folder
from gateway.requests.types import GenerateRequest
from gateway.serve import backends, checks, prepare, stopping
from gateway.serve.checks import check_start
from gateway.serve.launch import Launch, StartError
from gateway.serve.listeners import HttpServer
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import HURRY_SECONDS, INTERRUPTED, Stop, StoppedEarly
from tests.model.tiny_gguf import header


@pytest.fixture
async def gateway_app(tmp_path) -> GatewayApp:
    return await build_gateway_app(tmp_path)


class Ended(BaseException):
    """Raised in place of ending this process."""


@pytest.fixture
def exits(monkeypatch):
    """Statuses that the process would have ended with, and no timer that ends it later."""
    statuses = []

    def end(status):
        statuses.append(status)
        raise Ended

    monkeypatch.setattr(stopping.os, "_exit", end)
    monkeypatch.setattr(stopping.threading.Timer, "start", lambda self: None)
    return statuses


async def test_sigterm_drains_ctrl_c_hurries_and_the_second_one_kills(exits):
    stop, killed = Stop(45.0), []
    stop.on_force(lambda: 1 / 0)
    stop.on_force(lambda: killed.append("engine"))
    assert stop.grace == 45.0
    stop.terminate()
    assert stop.asked.is_set()
    assert stop.grace == 45.0
    stop.interrupt()
    assert stop.grace == HURRY_SECONDS
    assert stop.time_limit(10.0) == HURRY_SECONDS
    assert not killed
    with pytest.raises(Ended):
        stop.interrupt()
    assert (killed, exits) == (["engine"], [INTERRUPTED])


async def test_a_second_sigterm_hurries_and_no_further_one_kills(exits):
    stop = Stop()
    stop.terminate()
    assert not stop.in_hurry
    stop.terminate()
    assert stop.in_hurry
    stop.terminate()
    assert exits == []


async def test_sigterm_that_a_parent_passes_on_as_well_hurries_nobody(exits):
    stop = Stop()
    stop.listen(hangup=False, has_parent=True)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(30):
                await stop.asked.wait()
            await asyncio.sleep(0.01)
        assert not stop.in_hurry
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_what_has_not_ended_some_time_after_ctrl_c_is_killed(monkeypatch):
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(stopping, "FORCE_SECONDS", 0.01)
    monkeypatch.setattr(stopping.os, "_exit", lambda status: loop.call_soon_threadsafe(ended.set))
    Stop().interrupt()
    await asyncio.wait_for(ended.wait(), 30)


async def test_a_start_is_given_up_when_told_to_stop(exits):
    stop, cleaned = Stop(), []
    asyncio.get_running_loop().call_soon(stop.interrupt)

    async def start():
        try:
            await asyncio.sleep(600)
        finally:
            cleaned.append(True)

    with pytest.raises(StoppedEarly), stop.starting():
        await start()
    assert cleaned == [True]
    await asyncio.sleep(0)  # nothing of the cancellation is left
    with pytest.raises(StoppedEarly), stop.starting():
        pytest.fail("it was told before")


async def test_a_gateway_that_has_started_is_not_cancelled(exits):
    stop = Stop()
    with stop.starting():
        stop.started()
        stop.interrupt()
        await asyncio.sleep(0)
        await stop.asked.wait()


def request() -> GenerateRequest:
    return make_request(BASE, "Say hello")


async def test_requests_end_with_an_error_and_are_settled(gateway_app):
    gateway_app.engine.admit = asyncio.Event()  # no token ever comes
    chat = {"model": BASE, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    async with gateway_app.client() as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=chat))
        while not gateway_app.engine.open:
            await asyncio.sleep(0.01)
        gateway_app.gateway.end_requests()
        response = await asyncio.wait_for(asking, 30)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the gateway is stopping; try again"
    await gateway_app.assert_empty()
    with pytest.raises(ApiError) as caught:
        async with gateway_app.gateway.generate(principal(), request()):
            pytest.fail("it takes no more")
    assert caught.value.fault is Fault.ENGINE_UNAVAILABLE
    await gateway_app.assert_empty()


async def test_a_stream_that_has_begun_ends_with_an_error(gateway_app):
    async def read():
        async with gateway_app.gateway.generate(principal(), request()) as generation:
            async for _ in generation:
                gateway_app.gateway.end_requests()
                await asyncio.sleep(600)

    with pytest.raises(ApiError, match="the gateway is stopping"):
        await read()
    assert asyncio.current_task().cancelling() == 0
    await gateway_app.assert_empty()


async def test_a_request_that_never_ends_is_cut_without_a_traceback(caplog):
    begun = asyncio.Event()

    async def app(scope, receive, send):
        begun.set()
        await asyncio.sleep(600)

    server = HttpServer(app, "127.0.0.1", 0)
    port = await server.start()
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(timeout=60) as client:
            asking = asyncio.create_task(client.get(f"http://127.0.0.1:{port}/"))
            await begun.wait()
            await asyncio.wait_for(server.stop(0.05), 30)
            with pytest.raises(httpx.RemoteProtocolError):
                await asking
    assert not [record for record in caplog.records if record.exc_info]


# --- before a start -------------------------------------------------------------------------------------------------


def config(**fields):
    base = replace(demo_config(), http=HttpConfig(port=0), grpc=GrpcConfig(port=0))
    return replace(base, **fields)


def test_a_sound_configuration_passes_and_its_folder_is_made(tmp_path):
    check_start(config(), tmp_path / "new" / "data")
    assert (tmp_path / "new" / "data" / "adapters").is_dir()


def test_everything_that_is_wrong_is_told_at_once(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        wrong = config(
            http=HttpConfig(port=port),
            grpc=GrpcConfig(port=0, tls=TlsConfig(tmp_path / "absent.pem", tmp_path / "absent.key")),
        )
        with pytest.raises(StartError) as caught:
            check_start(wrong, tmp_path)
    one, two = str(caught.value).splitlines()
    assert one.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert two.startswith("grpc.tls.cert: cannot read ")


def test_one_port_cannot_serve_both_protocols(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
        check_start(config(http=HttpConfig(port=port), grpc=GrpcConfig(port=port)), tmp_path)


def test_a_data_directory_that_cannot_be_made_is_told_in_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"data directory .*/file/data cannot be created: Not a directory; use --data"):
        check_start(config(), tmp_path / "file" / "data")


def test_a_data_directory_in_use_is_told_before_the_model_is_loaded(tmp_path):
    with locked_folder(created_folder(tmp_path / "valkey")), pytest.raises(StartError, match="is in use by process"):
        check_start(config(), tmp_path)
    check_start(config(), tmp_path)


def test_a_full_disk_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 2**80)
    with pytest.raises(StartError, match="MiB of free disk"):
        check_start(config(), tmp_path)


def test_no_folder_is_made_of_a_gguf_file_where_there_is_no_room(tmp_path, monkeypatch):
    from rich.console import Console

    (tmp_path / "model.gguf").write_bytes(header([(64, 64)]))
    monkeypatch.setattr("engine.model.folders.prepare.SPACE_BYTES", 2**80)
    with pytest.raises(NoSpace, match="--data-dir"):
        prepare_model(str(tmp_path / "model.gguf"), tmp_path / "data", Console())


def test_a_place_of_temporary_folders_that_is_not_there_is_told_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StartError, match=r"no temporary folder can be made: .*nowhere.*TMPDIR"):
        check_start(config(redis=RedisConfig(url="redis://127.0.0.1:1")), tmp_path)


def test_what_a_process_has_not_finished_is_found_by_its_number(tmp_path):
    folder = tmp_path / "models"
    (folder / f"{partial_prefix('m', 17)}abc").mkdir(parents=True)
    (folder / f"{partial_prefix('m', 18)}abc").mkdir()
    assert [path.name for path in partials(tmp_path, 17)] == [".m-17-abc"]


@pytest.mark.parametrize("moment", ["being started", "running"])
async def test_a_preparation_does_not_outlive_an_interrupted_start(tmp_path, monkeypatch, moment):
    real, born = asyncio.create_subprocess_exec, []
    models = tmp_path / "models"

    async def start(*command, **options):
        process = await real(sys.executable, "-c", "import time; time.sleep(600)", **options)
        born.append(process)
        (models / f"{partial_prefix('m', process.pid)}abc").mkdir(parents=True)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    preparing = asyncio.create_task(prepare.prepare("model", tmp_path, Stop(), StartBar.hidden()))
    while moment == "running" and not born:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert [process.returncode for process in born] in ([], [-signal.SIGKILL])
    assert not models.exists() or list(models.iterdir()) == []


async def test_a_forced_stop_kills_the_preparation(tmp_path, monkeypatch):
    real, kills = asyncio.create_subprocess_exec, []

    async def start(*command, **options):
        return await real(sys.executable, "-c", "import time; time.sleep(600)", **options)

    class Forced(Stop):
        def on_force(self, kill):
            kill()
            kills.append(kill)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(StartError, match="cannot be served: the preparation of the model was killed by signal 9"):
        await prepare.prepare("model", tmp_path, Forced(), StartBar.hidden())
    for kill in kills:
        kill()  # the process has ended, and its number may be another one's by now


async def test_an_engine_that_ends_while_the_model_is_prepared_ends_the_start(tmp_path, monkeypatch):
    started = []

    async def never(model, data_dir, stop, bar):
        started.append(model)
        await asyncio.sleep(3600)

    monkeypatch.setattr(backends, "prepare", never)
    launch = Launch(demo_config(), None, tmp_path, ("engine_that_does_not_exist",))
    with pytest.raises(StartError, match="the engine did not start; the reason is above"):
        async with backends.started_backends(launch, Stop(), StartBar.hidden()):
            pass
    assert started == ["embedded"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_preparation_that_is_killed_from_outside_leaves_nothing(tmp_path, monkeypatch, number):
    real = asyncio.create_subprocess_exec

    async def start(*command, **options):
        process = await real(sys.executable, "-c", "import time; time.sleep(600)", **options)
        (tmp_path / "models" / f"{partial_prefix('m', process.pid)}abc").mkdir(parents=True)
        os.kill(process.pid, number)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(StartError, match=f"the preparation of the model was killed by signal {number:d}"):
        await prepare.prepare("model", tmp_path, Stop(), StartBar.hidden())
    assert list((tmp_path / "models").iterdir()) == []


def test_abandoned_folders_are_removed_and_those_in_work_are_not(tmp_path, monkeypatch):
    for name in (".a-1-x", ".b-2-x", "finished-1-x", ".new-3-x"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0) if name != ".new-3-x" else None)
    with filling(tmp_path / ".b-2-x"):
        remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".b-2-x", ".new-3-x", "finished-1-x"]
    remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new-3-x", "finished-1-x"]
