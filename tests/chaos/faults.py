"""Faults of a deployment: each begins, lasts as long as a trial lets it, and ends. Its `harm` says what it may cost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Flag, auto
from random import Random

import psutil

from tests.chaos.deployment import Deployment, Role
from tests.chaos.load import Load


class Harm(Flag):
    """What a fault may cost, whatever the code does."""

    NONE = 0
    CONNECTIONS = auto()
    """Callers' connections, because their gateway is gone."""
    BOOKS = auto()
    """All that Redis knew."""
    AWAY = auto()
    """Redis, so that a gateway that dies takes settlements with it."""
    LOG = auto()
    """Lines of the request log: there is nowhere to write them."""


@dataclass
class Scene:
    """What a fault acts on: the deployment, its load and a source of randomness."""

    deployment: Deployment
    load: Load
    random: Random


class Fault:
    """A fault, which lasts from `begin` to `end`. After `end` the system must recover by itself."""

    harm = Harm.NONE
    strikes_store = False

    async def begin(self, scene: Scene) -> None:
        """Start the fault."""

    async def end(self, scene: Scene) -> None:
        """Undo the fault, if there is anything to undo."""

    def __str__(self) -> str:
        return type(self).__name__


class Calm(Fault):
    """Nothing goes wrong."""


class KillGateway(Fault):
    """Kill one gateway of several. If there is only one, kill the server."""

    harm = Harm.CONNECTIONS

    async def begin(self, scene: Scene) -> None:
        gateways = scene.deployment.gateways()
        if gateways and scene.deployment.kind.gateways > 1:
            strike([scene.random.choice(gateways)], signal.SIGKILL)
        else:
            scene.deployment.kill_server()


class KillServer(Fault):
    """Kill the process that a user has started. All processes that it has started end with it."""

    harm = Harm.CONNECTIONS

    async def begin(self, scene: Scene) -> None:
        scene.deployment.kill_server()


class KillEngine(Fault):
    async def begin(self, scene: Scene) -> None:
        strike(scene.deployment.processes()["engine"], signal.SIGKILL)


class EngineOutOfMemory(Fault):
    """Let the engine run out of memory in the middle of its next step. Without another step nothing happens."""

    async def begin(self, scene: Scene) -> None:
        scene.deployment.out_of_memory.touch()

    async def end(self, scene: Scene) -> None:
        scene.deployment.out_of_memory.unlink(missing_ok=True)


class KillStore(Fault):
    """Kill Valkey and start it again with the data that it had on disk."""

    harm = Harm.AWAY
    strikes_store = True

    async def begin(self, scene: Scene) -> None:
        scene.deployment.store.kill()

    async def end(self, scene: Scene) -> None:
        await scene.deployment.store.start()


class LoseStore(KillStore):
    """Kill Valkey and start it again without its data."""

    harm = Harm.AWAY | Harm.BOOKS

    async def end(self, scene: Scene) -> None:
        scene.deployment.store.forget()
        await super().end(scene)


class WipeStore(Fault):
    """Delete all keys with FLUSHALL while gateways use them."""

    harm = Harm.BOOKS
    strikes_store = True

    async def begin(self, scene: Scene) -> None:
        await scene.deployment.store.wipe()


class FillStoreDisk(Fault):
    harm = Harm.AWAY
    strikes_store = True

    async def begin(self, scene: Scene) -> None:
        await scene.deployment.store.fill_disk()

    async def end(self, scene: Scene) -> None:
        await scene.deployment.store.free_disk()


class FillDisk(Fault):
    """Let no file of the gateways and the engine grow any more, nor of processes that replace them."""

    harm = Harm.LOG

    async def begin(self, scene: Scene) -> None:
        _limit_files(scene.deployment, 0)

    async def end(self, scene: Scene) -> None:
        _limit_files(scene.deployment, psutil.RLIM_INFINITY)


@dataclass
class Pause(Fault):
    """A process that stands still, as under a debugger, a full cgroup or a host that moves it."""

    role: Role
    stopped: list[psutil.Process] = field(default_factory=list)

    @property
    def strikes_store(self) -> bool:
        return self.role == "store"

    @property
    def harm(self) -> Harm:
        return Harm.AWAY if self.strikes_store else Harm.NONE

    async def begin(self, scene: Scene) -> None:
        found = scene.deployment.gateways() if self.role == "gateway" else scene.deployment.processes()[self.role]
        self.stopped = found[:1]
        strike(self.stopped, signal.SIGSTOP)

    async def end(self, scene: Scene) -> None:
        strike(self.stopped, signal.SIGCONT)

    def __str__(self) -> str:
        return f"Pause-{self.role}"


@dataclass
class BadLine(Fault):
    """What a network does: to the line to Redis, to those between gateways and engines, or to those over which engines
    fetch KV."""

    line: str
    manner: str
    """`cut`: connections are cut once. `refusing`: no connection gets through. `silent`: nothing arrives, and neither
    end is told. `slow`: what arrives is late. `corrupt`: some of it is wrong."""

    @property
    def harm(self) -> Harm:
        return Harm.AWAY if self.line == "redis" else Harm.NONE

    async def begin(self, scene: Scene) -> None:
        for line in scene.deployment.lines[self.line]:
            line.refusing, line.delay = self.manner == "refusing", 0.08 if self.manner == "slow" else 0.0
            line.flipping = self.manner == "corrupt"
            if self.manner == "silent":
                line.hold()
            elif self.manner in ("cut", "refusing"):
                line.cut()

    async def end(self, scene: Scene) -> None:
        for line in scene.deployment.lines[self.line]:
            line.refusing, line.delay, line.flipping = False, 0.0, False
            line.resume()

    def __str__(self) -> str:
        return f"{self.manner}-{self.line}"


@dataclass
class WrongClock(Fault):
    """The wall clock of gateways and engine jumps, and back."""

    seconds: float

    async def begin(self, scene: Scene) -> None:
        scene.deployment.clock.write_text(str(self.seconds))

    async def end(self, scene: Scene) -> None:
        scene.deployment.clock.unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"clock{self.seconds:+g}s"


@dataclass
class Herd(Fault):
    """Let many more callers send a request at the same moment."""

    size: int
    coming: asyncio.Task[None] | None = None

    async def begin(self, scene: Scene) -> None:
        self.coming = asyncio.create_task(scene.load.herd(self.size))

    async def end(self, scene: Scene) -> None:
        assert self.coming is not None
        await self.coming

    def __str__(self) -> str:
        return f"herd-of-{self.size}"


@dataclass
class Together(Fault):
    """Several faults that begin shortly one after the other, and end in the same order."""

    faults: Sequence[Fault]
    apart: float = 0.2

    @property
    def harm(self) -> Harm:
        harm = Harm.NONE
        for fault in self.faults:
            harm |= fault.harm
        return harm

    async def begin(self, scene: Scene) -> None:
        for fault in self.faults:
            await fault.begin(scene)
            await asyncio.sleep(self.apart * scene.random.random())

    async def end(self, scene: Scene) -> None:
        for fault in self.faults:
            await fault.end(scene)

    def __str__(self) -> str:
        return "+".join(map(str, self.faults))


def catalogue() -> list[Fault]:
    """Return one fault of each kind."""
    return [
        KillGateway(),
        KillServer(),
        KillEngine(),
        EngineOutOfMemory(),
        KillStore(),
        LoseStore(),
        WipeStore(),
        FillStoreDisk(),
        FillDisk(),
        *(Pause(role) for role in ("gateway", "engine", "store")),
        *(BadLine(line, manner) for line in ("redis", "engine") for manner in ("cut", "refusing", "silent", "slow")),
        WrongClock(7200.0),
        WrongClock(-7200.0),
        Herd(200),
    ]


def strike(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those of these processes that still exist."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _limit_files(deployment: Deployment, size: int) -> None:
    found = deployment.processes()
    for process in (*found["server"], *found["gateway"], *found["engine"]):
        with suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))
