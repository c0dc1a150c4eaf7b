"""Runs one engine alone, for gateways on other machines: `loralane engine`."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from engine.rpc.target import UNIX, EngineTarget, EngineTls, check_address
from engine.rpc.transport import read_tls
from gateway.config.models import ModelSettings
from gateway.serve.addresses import bind_socket
from gateway.serve.engine_group import EngineGroup
from gateway.serve.launch import ENGINE, StartError
from gateway.serve.prepare import prepare, prepared_folder
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop, tell_stopping
from gateway.serve.supervisor import EngineSupervisor
from gateway.terminal.console import Console


async def serve_engine(
    settings: ModelSettings,
    listen: str,
    data_dir: Path,
    console: Console,
    bar: StartBar | None = None,
    program: tuple[str, ...] = ENGINE,
    drain_seconds: float = 0.0,
) -> bool:
    """Run one engine until a signal asks it to stop; returns whether the stop is hurried (Ctrl-C, or a second SIGTERM).
    A process that ends after it was ready is replaced by another.

    Args:
        settings: the base model to serve, and how its engine works.
        listen: where the engine listens, `host:port`. The system chooses a free port for port 0, which each engine
            process then gets.
        data_dir: folder of prepared models, and of what engines learn about this machine.
        console: shows where the engine listens, and messages about a stop.
        bar: shows the progress of the start, and is closed when the engine is ready.
        program: the module that runs as the engine, followed by extra arguments for it.
        drain_seconds: time that requests have after SIGTERM to end in the engine, or to move to other engines.

    Raises:
        StoppedEarly: the signal came before the engine was ready.
        StartError: the TLS files or the address cannot be used, which is noticed first, the model cannot be prepared,
            or the engine ends before it is ready.
    """
    bar, stop = bar or StartBar.hidden(), Stop(drain_seconds)
    stop.listen(hangup=True)
    stop.on_force(lambda: console.show_cursor(True))
    with stop.starting():
        async with engine_listening(settings, listen, data_dir, stop, bar, program) as supervisor:
            stop.started()
            bar.close()
            console.print(f"[bold green]the engine is ready[/bold green]: {supervisor.address}", highlight=False)
            await stop.asked.wait()
            tell_stopping(stop, console)
    return stop.in_hurry


@asynccontextmanager
async def engine_listening(
    settings: ModelSettings,
    listen: str,
    data_dir: Path,
    stop: Stop,
    bar: StartBar,
    program: tuple[str, ...] = ENGINE,
    state_dir: Path | None = None,
) -> AsyncIterator[EngineSupervisor]:
    """Run one engine, with its supervisor, until the block ends; yields the supervisor when the engine is ready. The
    arguments and errors are those of `serve_engine`; `state_dir` is the folder of what the engine learns about this
    machine, which engines must not share. None means `engine` in the data directory."""
    prepared = prepared_folder(settings.model.source, data_dir)
    config = settings.engine_config(prepared, state_dir or data_dir / "engine")
    with (
        reserve_address(listen, settings.engines.tls) as target,
        tempfile.TemporaryDirectory(prefix="loralane-engine-") as folder,
    ):
        stop.on_force(partial(shutil.rmtree, folder, ignore_errors=True))
        supervising = EngineSupervisor(
            config, Path(folder) / "socket", program, listen=target, drain_seconds=stop.drain_seconds
        )
        async with supervising as supervisor:
            supervisor.hurried = stop.hurried
            stop.on_force(supervisor.kill)
            group = EngineGroup({"engine": supervisor})
            following = asyncio.create_task(bar.follow(group), name="start-bar")
            try:
                if prepared is None:
                    work = prepare(settings.model.source, data_dir, stop, bar)
                    supervisor.name_model(await group.unless_it_ends(work))
                await group.unless_it_ends(supervisor.wait_until_it_runs())
                yield supervisor
            finally:
                following.cancel()
                with suppress(asyncio.CancelledError):
                    await following
                supervisor.stop_seconds = stop.time_limit(supervisor.stop_seconds)


@contextmanager
def reserve_address(listen: str, tls: EngineTls | None) -> Iterator[EngineTarget]:
    """Check where an engine is to listen, and its TLS files, before its model is loaded, which may take minutes. Yields
    the target, which has a free port in place of port 0. Raises StartError if the engine could not listen there.

    The port stays bound, without listening, until the block ends: no program gets it by chance while the model is
    loaded or the engine is started again. Only Linux lets another process listen at a port that is bound like this.
    """
    with ExitStack() as stack:
        try:
            target = _reserved(stack, listen, tls)
        except ValueError as error:
            raise StartError(str(error)) from error
        yield target


def _reserved(stack: ExitStack, listen: str, tls: EngineTls | None) -> EngineTarget:
    check_address(listen, any_port=True)
    if tls is not None:
        read_tls(tls)
    if listen.startswith(UNIX):
        folder = Path(listen.removeprefix(UNIX)).parent
        if not folder.is_dir():
            raise ValueError(f"cannot listen on {listen}: there is no folder {folder}")
        return EngineTarget(listen, tls)
    host, _, port = listen.rpartition(":")
    reserved = stack.enter_context(bind_socket(host.strip("[]"), int(port)))
    target = EngineTarget(f"{host}:{reserved.getsockname()[1]}", tls)
    if not sys.platform.startswith("linux"):
        reserved.close()
    return target
