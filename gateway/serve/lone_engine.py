"""Runs one engine alone, for gateways on other machines: `loralane engine`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from engine.rpc.target import EngineTarget
from gateway.config.models import ModelSettings
from gateway.serve.engine_group import EngineGroup
from gateway.serve.launch import ENGINE
from gateway.serve.prepare import prepare, prepared_folder
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop, tell_stopping
from gateway.serve.supervisor import EngineSupervisor


async def serve_engine(
    settings: ModelSettings,
    target: EngineTarget,
    data_dir: Path,
    console: Console,
    bar: StartBar | None = None,
    program: tuple[str, ...] = ENGINE,
) -> bool:
    """Run one engine until a signal asks it to stop; returns whether the stop is hurried (Ctrl-C). A process that ends
    after it was ready is replaced by another.

    Args:
        settings: the base model to serve, and how its engine works.
        target: where the engine listens, and the certificates that it shows.
        data_dir: folder of prepared models, and of what engines learn about this machine.
        console: shows where the engine listens, and messages about a stop.
        bar: shows the progress of the start, and is closed when the engine is ready.
        program: the module that runs as the engine, followed by extra arguments for it.

    Raises:
        StoppedEarly: the signal came before the engine was ready.
        StartError: the model cannot be prepared, the TLS files or the address cannot be used, or the engine ends before
            it is ready.
    """
    bar, stop = bar or StartBar.hidden(), Stop()
    stop.listen(hangup=True)
    stop.on_force(lambda: console.show_cursor(True))
    with stop.starting():
        async with engine_listening(settings, target, data_dir, stop, bar, program):
            stop.started()
            bar.close()
            console.print(f"[bold green]the engine is ready[/bold green]: {target.address}", highlight=False)
            await stop.asked.wait()
            tell_stopping(stop, console)
    return stop.in_hurry


@asynccontextmanager
async def engine_listening(
    settings: ModelSettings,
    target: EngineTarget,
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
    with tempfile.TemporaryDirectory(prefix="loralane-engine-") as folder:
        stop.on_force(partial(shutil.rmtree, folder, ignore_errors=True))
        async with EngineSupervisor(config, Path(folder) / "socket", program, listen=target) as supervisor:
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
