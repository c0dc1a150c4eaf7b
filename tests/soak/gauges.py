"""Reads everything that could grow: memory, descriptors and threads of each process, tasks, pages, adapters, Redis."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
from prometheus_client.parser import text_string_to_metric_families

from gateway.redis.server import socket_for

MIB = 2**20
SERVER = {
    "tasks": "loralane_asyncio_tasks",
    "adapters known": "loralane_adapters",
    "kv pages": "loralane_kv_pages",
    "running": "loralane_requests_running",
    "waiting": "loralane_requests_waiting",
    "adapter pages": "loralane_adapter_pages",
    "cached pages": "loralane_cached_pages",
    "free pages": "loralane_free_pages",
    "undelivered tokens": "loralane_usage_undelivered_tokens",
}
"""Series -> the Prometheus metric whose samples are summed for it."""
PAGES = ("kv pages", "adapter pages", "cached pages", "free pages")
ROLES = (("engine.serve.server", "engine"), ("valkey-server", "valkey"), ("gateway.serve.worker", "worker"))
"""Pairs of a part of a command line and the role of that process; a process that matches none is the gateway."""
Reading = dict[str, float]


class Gauges:
    """Reads the processes, metrics and store of a server on this machine."""

    def __init__(self, pid: int, url: str, data_dir: Path, admin_key: str) -> None:
        self._root = psutil.Process(pid)
        self._client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {admin_key}"}, timeout=60)
        self._redis: Any = redis.Redis(unix_socket_path=str(socket_for((data_dir / "valkey").resolve())))

    def read(self) -> Reading:
        """Return the current value of every series, by name. Names of process series begin with the process's role."""
        return self._processes() | self.server() | self._store()

    def server(self) -> Reading:
        """Return the series that come from the server's own /metrics."""
        text = self._client.get("/metrics").raise_for_status().text
        sums: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return {name: sums[metric] for name, metric in SERVER.items()}

    def close(self) -> None:
        self._client.close()
        self._redis.close()

    def _processes(self) -> Reading:
        found: Reading = {}
        seen: Counter[str] = Counter()
        for process in (self._root, *self._root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                role = _role(process)
                seen[role] += 1
                name = role if seen[role] == 1 else f"{role} {seen[role]}"
                found |= {f"{name} {what}": value for what, value in _process(process)}
        return found | {"processes": float(seen.total())}

    def _store(self) -> Reading:
        """Return the series of the store. Keys with an expiry are counted separately, as their lifetime bounds them."""
        keys = list(self._redis.scan_iter(count=1000))
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pttl(key)
            lasting = pipe.execute().count(-1)
        leases = sum(key.split(b":")[1] == b"lease" for key in keys)
        memory = self._redis.info("memory")["used_memory"] / MIB
        return {"keys": lasting, "keys that expire": len(keys) - lasting, "leases": leases, "redis MiB": memory}

    def kinds_of_keys(self) -> Mapping[str, int]:
        """Return the number of keys by kind, which is the word after the prefix."""
        return Counter(key.decode().split(":")[1] for key in self._redis.scan_iter(count=1000))


def _role(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((role for part, role in ROLES if part in words), "gateway")


def _heap(pid: int) -> int:
    """Return a process's anonymous memory in bytes. It includes swapped pages, so memory pressure does not lower it."""
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(row[1]) for row in rows if row[0] in ("Anonymous:", "Swap:")) * 1024


def _process(process: psutil.Process) -> Iterator[tuple[str, float]]:
    memory = process.memory_full_info()
    yield "PSS MiB", memory.pss / MIB
    yield "RSS MiB", memory.rss / MIB
    yield "heap MiB", _heap(process.pid) / MIB
    yield "descriptors", float(process.num_fds())
    yield "threads", float(process.num_threads())
