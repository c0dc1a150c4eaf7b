"""The server that is used: `loralane serve` over a small model, with so little memory that everything is in motion."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import yaml

from benchmarks.server import Command, free_port
from benchmarks.workload import write_adapters

KEYS = {"acme": "sk-soak-acme-key", "small": "sk-soak-small-key"}
ADMIN_KEY = "sk-soak-admin-key"
MODEL = "base"
RESIDENTS = 6
"""Adapters that stay."""
VISITORS = 4
"""Names that are loaded, replaced and unloaded while they are used."""
RANK = 4
SMALL = {"memory_gb": 0.125, "max_seqs": 12, "max_model_len": 1024, "host_adapter_gb": 0.02, "swap_gb": 0.03}
"""So that pages, adapters and swapped KV are short at any moment."""
REQUESTS_PER_MINUTE = 60
"""That the tenant `small` may send; it wants more."""


@dataclass(frozen=True, slots=True)
class House:
    """Where the server listens, and what can be asked of it."""

    url: str
    grpc: str
    folder: Path
    """Below which its configuration, its data and its adapters lie."""
    residents: tuple[str, ...]
    _template: Path
    _number: count[int] = field(default_factory=count)
    _names: cycle[str] = field(default_factory=lambda: cycle(f"visitor-{i}" for i in range(VISITORS)))

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def visitors(self) -> list[str]:
        return [f"visitor-{i}" for i in range(VISITORS)]

    def next_visitor(self) -> tuple[str, Path]:
        """A name whose turn it is, and a folder with an adapter that nobody has seen before: another's but for its last
        weights. The folder that is six turns old goes."""
        number = next(self._number)
        root = self.folder / "adapters"
        shutil.rmtree(root / f"visit-{number - 6}", ignore_errors=True)
        folder = shutil.copytree(self._template, root / f"visit-{number}")
        with (folder / "adapter_model.safetensors").open("r+b") as weights:
            weights.seek(-8, os.SEEK_END)
            weights.write(number.to_bytes(8, "little"))
        return next(self._names), folder


def prepare(folder: Path, model: Path, *, gateways: int, threads: int) -> tuple[House, Command]:
    """Writes what the server needs, and says how it is started."""
    port, grpc = free_port(), free_port()
    adapters = write_adapters(model, folder / "adapters", [RANK] * (RESIDENTS + 1))
    *residents, template = adapters
    preload = {name: str(adapters[name]) for name in residents}
    house = House(
        f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc}", folder, tuple(residents), _template=adapters[template]
    )
    ports = {"http": {"port": port}, "grpc": {"port": grpc}, "gateways": gateways}
    path = folder / "loralane.yaml"
    path.write_text(yaml.safe_dump(_config(model, folder / "adapters", preload, threads) | ports))
    words = [sys.executable, "-m", "gateway", "serve", "--config", str(path), "--data-dir", str(house.data_dir)]
    env = {f"SOAK_{name.upper()}": key for name, key in KEYS.items()} | {"SOAK_ADMIN": ADMIN_KEY}
    return house, Command(words, house.url, "/ready", env)


def _config(model: Path, root: Path, preload: dict[str, str], threads: int) -> dict[str, object]:
    return {
        "model": {"source": str(model), "name": MODEL},
        "engine": {**SMALL, "threads": threads},
        "adapters": {"roots": [str(root)], "preload": preload, "drain_seconds": 1},
        "tenants": {
            "acme": {"keys": ["${SOAK_ACME}"], "limits": {"requests_per_minute": 1_000_000}},
            "small": {"keys": ["${SOAK_SMALL}"], "limits": {"requests_per_minute": REQUESTS_PER_MINUTE}},
        },
        "admin": {"keys": ["${SOAK_ADMIN}"]},
    }
