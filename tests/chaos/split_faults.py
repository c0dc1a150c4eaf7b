"""Faults of engines that split requests: of a prefill engine, a decode engine, and the KV on its way between them.

A third engine computes both parts, so that none of these faults may cost a request.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tests.chaos.deployment import Deployment
from tests.chaos.faults import BadLine, Fault, KillGateway, Scene, strike
from tests.chaos.patience import Late, until
from tests.chaos.proxy import Proxy

ROLES = ("prefill", "decode", "both")
PASSED_BYTES = {"tcp": 400, "mtls": 3500}
"""Bytes of a transfer that pass before an engine is killed during it, by the kind of line: the sender's hello, and less
than all pages. Of TLS, the handshake is some 3,100 bytes more."""
TRANSFER_SECONDS = 10.0
"""How long a fault waits for the transfer at which it kills an engine."""

Moment = Literal["before", "during", "after"]


@dataclass
class KillPart(Fault):
    """Kill the engine of one part before any byte of a transfer has arrived, in the middle of it, or after it.
    Transfers in shared memory pass no proxy: the moment is random."""

    role: str
    moment: Moment

    async def begin(self, scene: Scene) -> None:
        lines = scene.deployment.kv_lines
        with suppress(Late):
            if lines:
                await self._wait(lines, PASSED_BYTES[scene.deployment.kind.kv_line])
            else:
                await asyncio.sleep(scene.random.random() / 2)
        strike(scene.deployment.engines(self.role), signal.SIGKILL)
        for line in lines:
            line.limit = None
            if self.moment == "during":
                line.cut()  # or what the proxy has read already would arrive
            line.resume()

    async def _wait(self, lines: list[Proxy], passed_bytes: int) -> None:
        """Wait for the moment: during a transfer, until `passed_bytes` of it have passed. If transfers are to stand
        still at it, their lines hold from then on."""
        begun, ended = (sum(line.num_begun for line in lines), sum(line.num_ended for line in lines))
        for line in lines:
            if self.moment == "before":
                line.hold()
            elif self.moment == "during":
                line.limit = passed_bytes

        async def has_come() -> bool:
            if self.moment == "before":
                return sum(line.num_begun for line in lines) > begun
            if self.moment == "during":
                return any(line.limit is None for line in lines)
            return sum(line.num_ended for line in lines) > ended

        await until(has_come, TRANSFER_SECONDS, f"the moment {self.moment} a transfer")

    def __str__(self) -> str:
        return f"kill-{self.role}-{self.moment}"


@dataclass
class PausePart(Fault):
    """Stop the engine of one part, and let it go on if it was not killed for hanging."""

    role: str

    async def begin(self, scene: Scene) -> None:
        strike(scene.deployment.engines(self.role), signal.SIGSTOP)

    async def end(self, scene: Scene) -> None:
        strike(scene.deployment.engines(self.role), signal.SIGCONT)

    def __str__(self) -> str:
        return f"pause-{self.role}"


class CorruptMemory(Fault):
    """Let a byte of each page be wrong that engines send in shared memory."""

    async def begin(self, scene: Scene) -> None:
        scene.deployment.corrupt_kv.touch()

    async def end(self, scene: Scene) -> None:
        scene.deployment.corrupt_kv.unlink()

    def __str__(self) -> str:
        return "corrupt-memory"


def split_catalogue(deployment: Deployment) -> list[Fault]:
    """Return one fault of each kind that engines which exchange KV as this deployment's do can have."""
    moments: tuple[Moment, ...] = ("before", "during", "after")
    faults: list[Fault] = [KillPart(role, moment) for role in ("prefill", "decode") for moment in moments]
    faults += [*(PausePart(role) for role in ("prefill", "decode")), KillGateway()]
    if deployment.kind.kv_line == "memory":
        return [*faults, CorruptMemory()]
    return [*faults, *(BadLine("kv", manner) for manner in ("cut", "refusing", "silent", "slow", "corrupt"))]
