"""Reload on SIGHUP: reads the configuration file again, prints the changes, and applies those that need no restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import structlog

from gateway.config.changes import changes, leftovers, merge_live_sections, need_restart
from gateway.config.whole import Config
from gateway.terminal.console import Console

log = structlog.get_logger("reload")

Read = Callable[[], Config]
"""Returns the configuration of the file and the options of the command line. Raises ValueError if it cannot be used."""
ApplyConfig = Callable[[Config], Awaitable[Mapping[str, str]]]
"""Applies a configuration to the running gateways; returns adapter -> reason for adapters that cannot be served."""


@asynccontextmanager
async def reloading(
    asked: asyncio.Event, read: Read | None, running: Config, apply: ApplyConfig, console: Console
) -> AsyncIterator[None]:
    """Call `reload` in a task whenever `asked` is set, which is then cleared, until the block ends. If `read` is None,
    there is no file, and nothing is done. `running` is the configuration in force when the block begins."""
    task = asyncio.create_task(_keep_reloading(asked, read, running, apply, console)) if read else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))


async def _keep_reloading(
    asked: asyncio.Event, read: Read, running: Config, apply: ApplyConfig, console: Console
) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            running = await reload(read, running, apply, console)
        except Exception:  # a bug must not end this task: later reloads still work
            log.exception("reload_failed")


async def reload(read: Read, running: Config, apply: ApplyConfig, console: Console) -> Config:
    """Read the file, apply the sections that need no restart, and print the changes, what needs a restart and what
    failed. Returns the configuration then in force: `running`, after printing the error, if the file cannot be used."""
    try:
        found = await asyncio.to_thread(read)  # YAML takes seconds for a megabyte
        config = merge_live_sections(running, found)
    except ValueError as error:
        _tell(console, f"not reloaded: {error}")
        return running
    told = changes(running, config) + leftovers(running, config)
    told += [f"! {name}: differs, and needs a restart" for name in need_restart(running, found)]
    for line in told:
        _tell(console, line)
    for name, reason in (await apply(config)).items():
        _tell(console, f"! {config.preload_place(name)}: {reason}")
    _tell(console, "reloaded" if told else "reloaded: the file says what it said before")
    return config


def _tell(console: Console, line: str) -> None:
    """Print a line without wrapping, because the output may be a log."""
    console.print(line, soft_wrap=True, markup=False, highlight=False)
