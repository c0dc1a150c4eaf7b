"""What an idle deployment consists of: its processes, their descriptors and their tasks."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from engine.grammar_check.pool import WORKERS
from tests.chaos.deployment import Deployment, Role
from tests.chaos.patience import Late, until

MAX_REDIS_CONNECTIONS = 40
"""Most connections of one gateway to Redis: those that its pool keeps, and its pipelined lines."""

SETTLE_SECONDS = 30.0
"""For what goes away by itself to do so, on a machine that is busy with other tests. A leak stays for longer."""
PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd, for which Python has no function."""
TCP_CLOSE = 7


@dataclass
class Quiet:
    """The descriptors and tasks of one idle process."""

    descriptors: Counter[str]
    """Descriptors by kind, without connections to Redis."""
    tasks: Counter[str] = field(default_factory=Counter)


class Census:
    """Compares every process with what it had when it was first seen idle."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._known: dict[int, Quiet] = {}

    async def complaints(self) -> list[str]:
        """Return what has grown, or is more than there should be, after a while in which it may still go away."""
        wrong: list[str] = []

        async def is_as_before() -> bool:
            wrong[:] = await self._look()
            return not wrong

        with suppress(Late):
            await until(is_as_before, SETTLE_SECONDS, "everything to be as before")
        return wrong

    async def _look(self) -> list[str]:
        found = self._deployment.processes()
        wanted: dict[Role, int] = {"server": 1, "store": 1, "gateway": 0, "other": 0}
        wanted["engine"] = self._deployment.kind.engines
        if self._deployment.kind.gateways > 1:
            wanted["gateway"] = self._deployment.kind.gateways
        wrong = [f"{len(found[role])} processes of kind {role}" for role in wanted if len(found[role]) != wanted[role]]
        watched: tuple[Role, ...] = ("server", "gateway", "engine")
        looks = [self._look_at(role, process) for role in watched for process in found[role]]
        return wrong + [text for texts in await asyncio.gather(*looks) for text in texts]

    async def _look_at(self, role: Role, process: psutil.Process) -> list[str]:
        try:
            return await self._compare(role, process)
        except (Late, psutil.NoSuchProcess) as error:
            return [f"{role} {process.pid} says nothing: {error}"]

    async def _compare(self, role: Role, process: psutil.Process) -> list[str]:
        serves = role == ("gateway" if self._deployment.kind.gateways > 1 else "server")
        is_complete = not serves or _grammar_workers(process) >= WORKERS  # counted before what the workers come with
        descriptors = _descriptors(process)
        links = process.net_connections("all")  # read last, so that a new connection to Redis is not taken for another
        redis = [link for link in links if link.raddr and getattr(link.raddr, "port", 0) == self._deployment.redis_port]
        connections = len(redis) + _reset_connections(process, links)
        now = Quiet(descriptors - Counter(socket=connections), await self._tasks(process))
        then = self._known.setdefault(process.pid, now) if is_complete else now
        who = f"{role} {process.pid}"
        wrong = [f"{who} has {connections} connections to Redis"] if connections > MAX_REDIS_CONNECTIONS else []
        more = now.descriptors - then.descriptors
        wrong += [
            f"{who} has {count} more descriptors of kind {kind} than {then.descriptors[kind]}"
            for kind, count in more.items()
        ]
        if more["socket"]:
            wrong.append(f"{who} has these sockets: {[_told(link) for link in links]}")
            others = [repr(found) for found in _unlisted_sockets(process, {link.fd for link in links})]
            wrong.append(f"{who} has these sockets that no table lists: {others}")
        tasks = {name: count for name, count in now.tasks.items() if count > max(_wanted_late(name), then.tasks[name])}
        wrong += [f"{who} has {count} tasks {name}, and had {then.tasks[name]}" for name, count in tasks.items()]
        return wrong

    async def _tasks(self, process: psutil.Process) -> Counter[str]:
        told = self._deployment.folder / f"tasks-{process.pid}"
        told.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)

        async def is_told() -> bool:
            return told.exists()

        await until(is_told, 5.0, f"process {process.pid} to tell its tasks")
        return Counter(json.loads(told.read_text()))


def _descriptors(process: psutil.Process) -> Counter[str]:
    """Count descriptors by kind: socket, pipe, eventpoll, or a file."""
    kinds: Counter[str] = Counter()
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            kinds[os.readlink(link).split(":[")[0]] += 1
    return kinds


def _told(link: Any) -> str:
    """Describe a socket, for a developer who looks for the one that stays."""
    return f"{link.fd} {link.family.name} {link.laddr} {link.raddr} {link.status}"


def _reset_connections(process: psutil.Process, links: list[Any]) -> int:
    """Count the TCP connections that a process opened, that are reset and that it has not closed. No table of the
    kernel lists them. redis-py keeps such connections in its pool, and replaces each when it is next used. They come
    from a restart of Redis: a minute after it, the kernel of its machine answers keepalive probes with resets."""
    served = {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
    listed = {link.fd for link in links}
    return sum(
        found.type == socket.SOCK_STREAM
        and found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
        and found.getsockname()[1] not in served
        for found in _unlisted_sockets(process, listed)
        if found.family in (socket.AF_INET, socket.AF_INET6)
    )


def _unlisted_sockets(process: psutil.Process, listed: set[int]) -> Iterator[socket.socket]:
    """Yield copies of the sockets of a process whose descriptors are not `listed`."""
    owner = os.pidfd_open(process.pid)
    try:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if int(link.name) not in listed and os.readlink(link).startswith("socket:"):
                    with _copied(owner, int(link.name)) as found:
                        yield found
    finally:
        os.close(owner)


def _copied(owner: int, descriptor: int) -> socket.socket:
    """Copy a socket of the process that the pidfd `owner` refers to."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, owner, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), "a socket cannot be copied from another process")
    return socket.socket(fileno=copy)


def _grammar_workers(process: psutil.Process) -> int:
    """A gateway starts them some seconds after it is ready, so a younger one has fewer descriptors than later."""
    return sum("engine.grammar_check.worker" in child.cmdline() for child in process.children())


def _wanted_late(task: str) -> int:
    """Some tasks are there only once they were of use: of lines to Redis, one for each that keeps books there."""
    return 4 if "Pipeline._read" in task else 1
