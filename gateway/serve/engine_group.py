"""The engine processes of one `loralane serve`: as many supervisors as the configuration asks for replicas.

On a machine with GPUs each process gets one of its own, in order. On a CPU they share the cores: each gets an equal
part of the threads and of the memory that a single engine would take by default.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.core.config import LaneGoals
from engine.process.cores import usable_cores
from engine.process.pulse import Loading
from engine.rpc.target import EngineTarget
from gateway.cluster.engines import RayEngines
from gateway.config.whole import Config
from gateway.serve.launch import StartError
from gateway.serve.stopping import Stop
from gateway.serve.supervisor import NOT_STARTED, EngineSupervisor

T = TypeVar("T")

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


class EngineGroup:
    """The supervisors of the engine processes that this process has started, by the names of the engines; none if the
    engines run elsewhere."""

    def __init__(self, supervisors: dict[str, EngineSupervisor]) -> None:
        self.supervisors = supervisors

    @property
    def targets(self) -> dict[str, EngineTarget]:
        """Where the engines listen, by their names."""
        return {name: supervisor.target for name, supervisor in self.supervisors.items()}

    @property
    def loading(self) -> Loading | None:
        """Progress of the engine whose start is the least advanced. None means that an engine has not reported any yet,
        or that the group has no engines."""
        reports = [supervisor.loading for supervisor in self.supervisors.values()]
        known = [report for report in reports if report is not None]
        if not reports or len(known) < len(reports):
            return None
        return min(known, key=lambda report: report.done / max(report.total, 1))

    def promise(self, interactive: LaneGoals, batch: LaneGoals) -> None:
        """Set the lanes' latency goals in the configuration of the engine processes that are started from now on. The
        running processes get the goals from the gateways instead."""
        for supervisor in self.supervisors.values():
            supervisor.promise(interactive, batch)

    def name_model(self, folder: Path) -> None:
        """Send the folder of the prepared model to all engines, which wait for it."""
        for supervisor in self.supervisors.values():
            supervisor.name_model(folder)

    def limit_stop(self, stop: Stop) -> None:
        """Shorten the time that each engine may take to stop, if `stop` is a hurried one."""
        for supervisor in self.supervisors.values():
            supervisor.stop_seconds = stop.time_limit(supervisor.stop_seconds)

    async def wait_first_exit(self) -> None:
        """Wait for the first time that a process of any engine ends for another reason than the end of the group."""
        exits = [asyncio.create_task(supervisor.wait_first_exit()) for supervisor in self.supervisors.values()]
        try:
            if exits:
                await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.Event().wait()
        finally:
            for task in exits:
                task.cancel()

    async def unless_it_ends(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` and return its result. If a process of any engine has ended or ends before that, cancel `work`
        and raise StartError, because the next process would end, too."""
        working, ended = asyncio.create_task(work), asyncio.create_task(self.wait_first_exit())
        try:
            await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise StartError(NOT_STARTED)
            return working.result()
        finally:
            working.cancel()
            ended.cancel()
            await asyncio.wait((working, ended))


class ModelEngines(EngineGroup):
    """The engine processes of all base models, as one group: their names begin with the model's if there are
    several models."""

    ray: RayEngines | None = None
    """The engines on a Ray cluster, which are no processes of this group. None means that there are none."""

    def __init__(self, groups: Mapping[str, EngineGroup]) -> None:
        """`groups` are those of the base models, by the model's name."""
        several = len(groups) > 1
        super().__init__(
            {
                f"{model}/{name}" if several else name: supervisor
                for model, group in groups.items()
                for name, supervisor in group.supervisors.items()
            }
        )
        self.groups = groups

    def promise_all(self, config: Config) -> None:
        """Set the goals of each model's lanes for the next engine processes, as `promise` does, and for the scaler that
        chooses the number of engines on a Ray cluster."""
        for name, settings in config.served.items():
            if name in self.groups:
                self.groups[name].promise(settings.lanes.interactive.goals(), settings.lanes.batch.goals())
        if self.ray is not None:
            self.ray.set_goals({name: settings.lanes.goals() for name, settings in config.served.items()})


@asynccontextmanager
async def engines_running(
    config: EngineConfig, replicas: int, folder: Path, program: Sequence[str], stop: Stop
) -> AsyncIterator[EngineGroup]:
    """Run `replicas` engine processes until the block ends; yields their group when they were started.

    Args:
        config: the configuration of a single engine, which is divided among the replicas.
        folder: a temporary folder for the engines' sockets, which other users cannot enter.
        program: the module to run, followed by extra arguments for it.
        stop: kills the engines at a forced stop.
    """
    async with AsyncExitStack() as stack:
        group = EngineGroup({})
        for number, (own, env) in enumerate(divided(config, replicas)):
            place = folder / str(number)  # each in a folder of its own, because the pulse files are beside the sockets
            place.mkdir(parents=True)
            supervisor = EngineSupervisor(own, place / "socket", program, env)
            group.supervisors[f"engine-{number}"] = await stack.enter_async_context(supervisor)
            stop.on_force(supervisor.kill)
        yield group


def divided(config: EngineConfig, replicas: int) -> Iterator[tuple[EngineConfig, Mapping[str, str]]]:
    """Yield the configuration of each of several engines on this machine, and the environment variables that differ
    from the gateway's. A single engine takes `config` as it is. On GPUs each engine sees one of its own; on a CPU each
    gets its part of the threads and memory, unless `config` says how much one engine gets. Raises StartError if there
    are fewer GPUs than replicas."""
    if replicas == 1:
        yield config, {}
    if replicas < 2:
        return
    gpus = visible_gpus(os.environ) if config.device != "cpu" else ()
    each = config.ranks
    if gpus and len(gpus) < replicas * each:
        raise StartError(f"engine.replicas is {replicas}, and there are {len(gpus)} GPUs: each engine takes {each}")
    threads = config.threads or max(1, usable_cores() // replicas)
    for number in range(replicas):
        folder = f"{config.state_dir}-{number}" if config.state_dir and number else config.state_dir
        own = replace(config, state_dir=folder)
        if gpus:
            yield own, {VISIBLE_GPUS: ",".join(gpus[number * each : (number + 1) * each])}
        else:
            yield replace(own, threads=threads, machine_share=1 / replicas), {}


def visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the NVIDIA GPUs that processes with this environment may use: those it lists, or all that the
    driver lists. The gateway does not import torch to find out."""
    if VISIBLE_GPUS in env:
        return tuple(part.strip() for part in env[VISIBLE_GPUS].split(",") if part.strip())
    listed = Path("/proc/driver/nvidia/gpus")
    return tuple(map(str, range(len(list(listed.iterdir()))))) if listed.is_dir() else ()
