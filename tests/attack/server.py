"""The server under attack: its processes, their memory, and what it has counted."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import yaml

from benchmarks.server import Command, free_port

MODEL = "smollm2-135m-instruct"
ADMIN_KEY = "sk-attack-admin"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
TEMPLATE = Path(__file__).parents[2] / "engine/demo/chat_template.jinja"
CONFIG = {
    "model": {"source": "embedded", "name": MODEL, "chat_template": str(TEMPLATE)},
    "engine": {"memory_gb": 0.5, "swap_gb": 0.1, "threads": 1},
    "lanes": {"interactive": {"itl_s": 0.04}},
    "admin": {"keys": ["${ATTACK_ADMIN}"]},
}
"""Configuration of the server: the demo's model with a small page pool, which fills within seconds, so that the
engine's memory is constant after that."""
ROLES = (("engine.serve.server", "engine"), ("valkey-server", "valkey"), ("grammar_check", "grammar workers"))
"""Pairs of a part of a command line and the role of that process; one that matches none is the gateway."""
LASTING = ("gateway", "engine", "valkey")
"""Roles whose processes live as long as the server."""
FIGURES = ("requests", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server on this machine."""

    pid: int
    url: str
    grpc_target: str = ""

    def memory(self) -> dict[str, int]:
        """Return the RSS in bytes of all processes of each role."""
        sizes: Counter[str] = Counter()
        for role, process in self._processes():
            with suppress(psutil.NoSuchProcess):
                sizes[role] += process.memory_info().rss
        return dict(sizes)

    def processes(self) -> dict[str, list[int]]:
        """Return the process ids of each role whose processes must live as long as the server."""
        return {wanted: sorted(one.pid for role, one in self._processes() if role == wanted) for wanted in LASTING}

    async def usage(self, tenant: str) -> Counter[str]:
        """Return what is counted for a tenant."""
        async with httpx.AsyncClient(base_url=self.url, headers=ADMIN, timeout=60) as admin:
            report = (await admin.get("/admin/v1/usage", params={"tenant": tenant})).raise_for_status().json()
        return Counter({name: report["total"][name] for name in FIGURES})

    async def miscounted(self, before: Counter[str], told: Counter[str], seconds: float) -> list[str]:
        """Wait up to `seconds` until the neighbour's usage has grown from `before` by what its answers told. Returns
        what is wrong then."""
        deadline = time.monotonic() + seconds
        while (counted := await self.usage("neighbour") - before) != told:
            if time.monotonic() > deadline:
                return [f"the neighbour's usage grew by {dict(counted)}, its answers say {dict(told)}"]
            await asyncio.sleep(0.5)
        return []

    def _processes(self) -> list[tuple[str, psutil.Process]]:
        found, root = [], psutil.Process(self.pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                found.append((next((role for part, role in ROLES if part in words), "gateway"), process))
        return found


def command(folder: Path) -> tuple[Command, str]:
    """Write the server's configuration to a folder. Returns the command that starts it, and its gRPC address."""
    http_port, grpc_port = free_port(), free_port()
    path = folder / "loralane.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "http": {"port": http_port}, "grpc": {"port": grpc_port}}))
    words = [sys.executable, "-m", "gateway", "serve", "--config", str(path), "--data-dir", str(folder / "data")]
    return Command(
        words, f"http://127.0.0.1:{http_port}", "/ready", {"ATTACK_ADMIN": ADMIN_KEY}
    ), f"127.0.0.1:{grpc_port}"


async def make_tenant(admin: httpx.AsyncClient, name: str) -> str:
    """Create a tenant without limits, and return a key of it."""
    (await admin.post("/admin/v1/tenants", json={"name": name})).raise_for_status()
    made = (await admin.post("/admin/v1/keys", json={"tenant": name})).raise_for_status()
    key: str = made.json()["key"]
    return key
