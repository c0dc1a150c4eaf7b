"""The configuration of a deployment's gateways, and their tenants."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.core.tenants import hash_key

ADMIN_KEY = "sk-chaos-admin-0123456789"
ADAPTERS = ("red", "green", "blue")
MODEL = "chaos"
LEASE_SECONDS = 2
PORTS = range(10_000, 32_000)
"""Below those that the kernel gives to outgoing connections, which would take a port while its gateway is dead."""


@dataclass(frozen=True)
class Caller:
    """A tenant with one key."""

    name: str
    limits: dict[str, Any]

    @property
    def key(self) -> str:
        return f"sk-chaos-{self.name}-0123456789"


FREE = Caller("free", {})
TIGHT = Caller("tight", {"tokens_per_minute": 60_000, "concurrent_requests": 4})
STRICT = Caller("strict", {"requests_per_minute": 3000, "when_redis_is_away": {"requests_per_minute": "closed"}})
CALLERS = (FREE, TIGHT, STRICT)


def write_config(
    folder: Path, *, http_port: int, redis_port: int, gateways: int, load_format: str, roles: Sequence[str] = ()
) -> Path:
    """`roles` are the parts of split requests, one for each engine; none means one engine that splits nothing."""
    document = {
        "model": {"name": MODEL},
        "engine": {
            "load_format": load_format,
            "num_pages": 160,
            "max_seqs": 16,
            "max_model_len": 2048,
            "token_budget": 256,
            "threads": 1,
            "device": "cpu",
            "dtype": "float32",
            **({"replicas": len(roles), "roles": list(roles), "split": "always", "kv_listen": "auto"} if roles else {}),
        },
        "adapters": {"preload": {name: str(folder / "adapters" / name) for name in ADAPTERS}, "drain_seconds": 1},
        "tenants": {caller.name: {"keys": [hashed(caller.key)], "limits": caller.limits} for caller in CALLERS},
        "limits": {"lease_seconds": LEASE_SECONDS},
        # Not 50 ms: where everything shares a few cores with other tests, a store that is there takes that long, too.
        "redis": {"url": f"redis://127.0.0.1:{redis_port}", "timeout_ms": 100},
        "http": {"port": http_port, "request_timeout_s": 30 if load_format == "auto" else 50},  # a model is slower
        "grpc": {"port": 0},
        "batches": {"lease_s": LEASE_SECONDS},
        "admin": {"keys": [hashed(ADMIN_KEY)]},
        "gateways": gateways,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def hashed(key: str) -> str:
    return f"sha256:{hash_key(key)}"


def free_port() -> int:
    """Return a port that stays free while no process listens on it."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
