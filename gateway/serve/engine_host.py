"""The actor that runs one engine on a node of a Ray cluster. Ray starts it; tokens never pass through it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import EngineConfig
from engine.process.cores import usable_cores
from gateway.config.models import ModelSettings
from gateway.serve.launch import StartError, decode, encode
from gateway.serve.lone_engine import engine_listening
from gateway.serve.start_bar import StartBar
from gateway.serve.stopping import Stop

RETRY_SECONDS = 10.0
"""Seconds before an engine that could not be started is tried again."""


@dataclass(frozen=True, slots=True)
class HostOrders:
    """Parameters with which a Ray actor runs its engine. The actor gets them as text."""

    settings: ModelSettings
    data_dir: Path
    """Folder on the node for prepared models, and for what engines learn about the machine."""
    engine: str
    """Name of the engine, which is unique in the deployment."""
    program: tuple[str, ...]
    """The module that runs as the engine, followed by extra arguments for it."""
    cores: float | None
    """Number of cores that Ray reserves for the engine. None means that the engine has a GPU, and its use of cores is
    not limited."""

    def to_text(self) -> str:
        """Return the orders as text for `EngineHost`."""
        return encode(self).hex()


class EngineHost:
    """Runs one engine with its supervisor on this node, at an address that other machines reach."""

    def __init__(self, orders: str) -> None:
        """`orders` is the text of a HostOrders."""
        self._orders = decode(bytes.fromhex(orders), HostOrders)
        self._task: asyncio.Task[None] | None = None
        self._address, self._problem = "", ""

    async def address(self) -> tuple[str, str]:
        """Return the engine's address, empty until it listens, and why it could not be started, empty if it could. The
        first call starts the engine."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-host")
        return self._address, self._problem

    async def stop(self) -> None:
        """Stop the engine, and return when it has ended."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        """Run the engine until the call is cancelled. If it cannot be started, try again every RETRY_SECONDS, because
        what is missing on this node may be provided later."""
        while True:
            try:
                await self._serve()
            except (StartError, ValueError, OSError) as error:
                self._address, self._problem = "", str(error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _serve(self) -> None:
        orders, host = self._orders, node_address()
        settings = replace(orders.settings, engine=self._divided())
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        state = orders.data_dir / "engine" / orders.engine.replace("/", "-")
        listening = engine_listening(
            settings, listen, orders.data_dir, Stop(0.0), StartBar.hidden(), orders.program, state_dir=state
        )
        async with listening as supervisor:
            self._address, self._problem = supervisor.address, ""
            await asyncio.Event().wait()

    def _divided(self) -> EngineConfig:
        """Return the engine's configuration on this node. An engine without a GPU gets the part of the node's cores and
        memory that Ray reserves for it, unless the configuration says how much an engine gets."""
        engine, cores = self._orders.settings.engine, self._orders.cores
        if cores is None:
            return engine
        share = min(1.0, cores / usable_cores())
        return replace(engine, threads=engine.threads or max(1, int(cores)), machine_share=share)


def node_address() -> str:
    """Return the IP address by which Ray knows this node."""
    import ray.util

    return str(ray.util.get_node_ip_address())
