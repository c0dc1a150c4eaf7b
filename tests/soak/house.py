"""The server under test: `loralane serve` with a small model and so little memory that it constantly evicts."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import yaml

from benchmarks.server import Command, free_port
from lab.random_adapters import write_adapters

KEYS = {name: f"sk-soak-{name}-key" for name in ("acme", "small", "attacker", "neighbour")}
ADMIN_KEY = "sk-soak-admin-key"
MODEL = "base"
RESIDENTS = 6
"""Number of adapters that stay loaded."""
VISITORS = 4
"""Number of adapter names that are loaded, replaced and unloaded while they are used."""
RANK = 4
SMALL = {"memory_gb": 0.125, "max_seqs": 12, "max_model_len": 1024, "host_adapter_gb": 0.02, "swap_gb": 0.03}
"""Engine settings that keep pages, host memory for adapters and swap space scarce at all times."""
REQUESTS_PER_MINUTE = 60
"""Limit of the tenant `small`, which sends more."""


@dataclass(frozen=True, slots=True)
class House:
    """The running server's addresses, files and adapters."""

    url: str
    grpc: str
    folder: Path
    """Folder that holds the server's configuration, data and adapters."""
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
        """Return the next visitor name and a new folder with an adapter of different content: a copy of the template
        except for its last weights. The folder made six calls ago is deleted."""
        number = next(self._number)
        root = self.folder / "adapters"
        shutil.rmtree(root / f"visit-{number - 6}", ignore_errors=True)
        folder = shutil.copytree(self._template, root / f"visit-{number}")
        with (folder / "adapter_model.safetensors").open("r+b") as weights:
            weights.seek(-8, os.SEEK_END)
            weights.write(number.to_bytes(8, "little"))
        return next(self._names), folder


def prepare(folder: Path, model: Path, *, gateways: int, threads: int) -> tuple[House, Command]:
    """Write the server's adapters and configuration; returns its description and the command that starts it."""
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
            "attacker": {"keys": ["${SOAK_ATTACKER}"]},
            "neighbour": {"keys": ["${SOAK_NEIGHBOUR}"]},
        },
        "admin": {"keys": ["${SOAK_ADMIN}"]},
    }
