"""How an engine uses processors: how many it may use, which in a container or under taskset are fewer than the machine
has, and how long its OpenMP threads spin at a barrier before they sleep."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

CGROUP = Path("/proc/self/cgroup")
MOUNTS = Path("/sys/fs/cgroup")
SPINS = 500
"""Iterations for which an OpenMP thread of the engine spins at a barrier before it sleeps (GOMP_SPINCOUNT). The default
of libgomp is some millions. A spinning thread occupies the core that the thread it waits for needs. With two busy
processes beside an engine on two cores, ITL p50 was 59 to 370 ms with the default, 33 with 2,000, 20.8 with 500 and
17.9 with 100; for an engine alone it was 12.1, 12.2, 11.4 and 13.6 ms."""
WAIT_SETTINGS = frozenset(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
"""If the environment has one of these variables, `SPINS` is not applied."""


def usable_cores(cgroup: Path = CGROUP, mounts: Path = MOUNTS) -> int:
    """Return the number of threads that can compute at once, at least one: the processors of this process or, if lower,
    the CPU quota of its control groups, rounded down. `cgroup` and `mounts` are Linux's files, replaced in tests."""
    # All threads spend a quota together, and stop once it is spent: one thread more would stop every step.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas(cgroup, mounts))]))


def _quotas(cgroup: Path, mounts: Path) -> Iterator[float]:
    """Yield the CPU quotas, in processors, of this process's control groups (version 1 and 2) and of all groups above
    them. Yield none if the file `cgroup` cannot be read."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for folder in _upward(path):
            if not controllers:
                yield from _version_2(mounts / folder / "cpu.max")
            elif "cpu" in controllers.split(","):
                yield from _version_1(mounts / controllers / folder)


def _upward(path: str) -> Iterator[str]:
    """Yield a control group's path and those of all groups above it, without leading slash; the root is ""."""
    parts = [part for part in path.split("/") if part]
    for count in range(len(parts), -1, -1):
        yield "/".join(parts[:count])


def _version_2(file: Path) -> Iterator[float]:
    quota, _, period = _read(file).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        yield int(quota) / int(period)


def _version_1(folder: Path) -> Iterator[float]:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit() and int(period):  # -1 means that there is no quota
        yield int(quota) / int(period)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def wait_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that limit how long the engine's OpenMP threads spin at a barrier before they
    sleep, to be added to `env`. They are read when OpenMP is loaded. Empty if `env` has such a setting."""
    return {} if env.keys() & WAIT_SETTINGS else {"GOMP_SPINCOUNT": str(SPINS)}


def load_torch() -> None:
    """Import torch so that its OpenMP threads spin only briefly at a barrier: the variables of `wait_settings` are in
    the environment during the import. Changes nothing if torch is loaded already."""
    added = wait_settings(os.environ)
    os.environ.update(added)
    try:
        import torch  # noqa: F401
    finally:
        for name in added:
            os.environ.pop(name, None)
