"""Runs one gateway process with its own store and engine: `loralane serve`.

The engine's process is started before the gateway's modules are imported, which takes two seconds on another core.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.config.whole import Config
from gateway.serve.addresses import Listening
from gateway.serve.backends import started_backends
from gateway.serve.engine_group import ModelEngines
from gateway.serve.launch import Launch
from gateway.serve.process import freeze_memory, reload_requested
from gateway.serve.reload import Read, reloading
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop, tell_stopping
from gateway.terminal.console import Console

if TYPE_CHECKING:
    from gateway.engines.pool import EnginePool
    from gateway.limiter.failover import FailoverLimiter
    from gateway.requests.service import Gateway
    from gateway.serve.banner import Banner
    from gateway.serve.reload_target import ReloadTarget


@dataclass(frozen=True, slots=True)
class Running(Listening):
    """A gateway that serves requests in this process, with its own engine. `running` yields it."""

    gateway: Gateway
    engine: EnginePool
    """The engines of the first base model."""
    engines: ModelEngines
    limiter: FailoverLimiter
    banner: Banner
    reload_target: ReloadTarget

    async def apply(self, config: Config) -> Mapping[str, str]:
        self.engines.promise_all(config)
        return await self.reload_target.apply(config)


async def serve(launch: Launch, console: Console, read: Read | None = None, bar: StartBar | None = None) -> bool:
    """Run a gateway until a signal asks it to stop (see `stopping`); returns whether the stop is hurried (Ctrl-C).

    Args:
        console: shows the banner, and messages about a stop or about a configuration that was read again.
        read: reads the configuration again on SIGHUP. None means that there is no file: SIGHUP stops the gateway.
        bar: shows the progress of the start, and is closed when the gateway is ready.

    Raises:
        StoppedEarly: the signal came before the gateway was ready.
        StartError, StoreStartError, ConfigError: what `running` raises.
    """
    bar = bar or StartBar.hidden()
    stop, asked = Stop(launch.config.http.drain), reload_requested() if read else asyncio.Event()
    stop.listen(hangup=read is None)
    stop.on_force(lambda: console.show_cursor(True))
    with stop.starting():
        async with running(launch, stop, bar) as app:
            stop.started()
            bar.close()
            freeze_memory()
            app.banner.print(console)
            async with reloading(asked, read, launch.config, app.apply, console):
                await stop.asked.wait()
            tell_stopping(stop, console)
    return stop.in_hurry


@asynccontextmanager
async def running(launch: Launch, stop: Stop | None = None, bar: StartBar | None = None) -> AsyncIterator[Running]:
    """Run a store, an engine and a gateway that listens on its ports, until the block ends; then stop them in reverse
    order. Yields the gateway when it accepts requests.

    Args:
        stop: decides how long running requests may take at the end. None means the grace period of an unhurried stop.
        bar: shows the progress of the start. None means that it is not shown.

    Raises:
        StoreStartError: the store does not start.
        StartError: a port, the model, an adapter or the chat template is not usable, or the engine does not start.
        ConfigError: the configuration needs a package that is not installed, or names an unusable certificate.
    """
    stop, bar = stop or Stop(launch.config.http.drain), bar or StartBar.hidden()
    async with started_backends(launch, stop, bar, _import_gateway) as (backends, group):
        from gateway.serve.app import built_gateway
        from gateway.serve.endpoints import listening

        async with (
            built_gateway(launch, backends, bar, group) as app,
            listening(app.servers, stop, shared=False) as ports,
        ):
            yield Running(
                app.gateway,
                next(iter(app.engines.values())),
                group,
                app.limiter,
                app.banner(ports),
                app.reload_target,
                ports=ports,
            )


async def _import_gateway() -> None:
    """Import the gateway's modules in a thread, while the event loop handles signals, and return when they are
    imported. Raises what the import raises. The thread is a daemon: a process that stops need not wait for it."""
    loop, imported = asyncio.get_running_loop(), asyncio.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            import gateway.serve.app  # noqa: F401
        except BaseException as error:
            errors.append(error)
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(imported.set)

    threading.Thread(target=work, name="import", daemon=True).start()
    await imported.wait()
    if errors:
        raise errors[0]
