"""Runs the engines of a deployment on a Ray cluster: as many as the load needs, started by one of several `loralane
serve` with one Redis, and found by all gateways in the directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress

import structlog

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane
from engine.process.tasks import end_task
from gateway.cluster.lease import Lease
from gateway.cluster.model import ModelOnRay
from gateway.cluster.ray_process import RayProcess
from gateway.cluster.reports import Wanted
from gateway.core.errors import ApiError
from gateway.engines.directory import EngineDirectory
from gateway.redis.client import FAILURES

log = structlog.get_logger("cluster")

LOOK_SECONDS = 0.5
"""Seconds between two looks at what Ray reports."""


class RayEngines:
    """Async context manager that runs the engines of some base models on Ray until the block ends."""

    def __init__(self, process: RayProcess, models: list[ModelOnRay], directory: EngineDirectory, lease: Lease) -> None:
        """
        Args:
            process: the process that uses Ray. It must run while the block does.
            models: the base models whose engines Ray runs.
            directory: where gateways find the engines.
            lease: says if this process is the one that runs them.
        """
        self._process = process
        self._models = {model.name: model for model in models}
        self._directory = directory
        self._lease = lease
        self._is_owner = False
        self._is_published = True
        self._task: asyncio.Task[None] | None = None

    def set_goals(self, goals: Mapping[str, Mapping[Lane, LaneGoals]]) -> None:
        """Set the lanes' goals by the name of the base model, after a reload."""
        for name, model in self._models.items():
            model.scaler.goals = goals[name]

    async def __aenter__(self) -> RayEngines:
        self._task = asyncio.create_task(self._run(), name="ray-engines")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await end_task(self._task)
        if self._is_owner:
            with suppress(ApiError, *FAILURES):
                for name in self._models:
                    await self._publish(name, {})
                await self._lease.give_up()
        await self._forget()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                self._is_published = True
            except (ApiError, *FAILURES) as error:  # the engines go on, and gateways keep those that they know
                if self._is_published:
                    log.warning("engines_not_published", reason=str(error))
                self._is_published = False
            except Exception:  # a bug: without another look, no engine is replaced again
                log.exception("ray_engines_failed")
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        """Take or renew the lease. If this process holds it, update the engines that Ray should run and publish their
        addresses; if it has lost the lease, forget its engines."""
        was_owner, self._is_owner = self._is_owner, await self._lease.hold()
        if not self._is_owner:
            if was_owner:
                log.error("engines_given_up", reason="another gateway has taken the lease while Redis was away")
                await self._forget()
            return
        for model in self._models.values():
            await model.look(self._process.reports, time.monotonic())
        self._process.want(Wanted({key: one for model in self._models.values() for key, one in model.wanted.items()}))
        for name, model in self._models.items():
            await self._publish(name, model.addresses)

    async def _publish(self, model: str, addresses: Mapping[str, str]) -> None:
        """Update the directory so that a base model's engines on Ray are those at `addresses`, and remove what an
        earlier process left. Raises ApiError if Redis is away or an operator's engine conflicts."""
        ours = [member for member in self._directory.members if member.model == model and member.added_by == "ray"]
        known = {member.engine: member.address for member in ours}
        for name in (name for name, address in known.items() if addresses.get(name) != address):
            await self._directory.remove(model, name, "ray")
        for name in (name for name, address in addresses.items() if known.get(name) != address):
            await self._directory.add(model, name, addresses[name], "ray")

    async def _forget(self) -> None:
        self._process.want(Wanted({}))
        for model in self._models.values():
            await model.close()
