"""Finds device descriptions: JSON files that come with the project by their names, and other files by their paths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from engine.core.config import CoreConfig
from lab.devices.cost import TERMS, DeviceSpec, LinearCost, RooflineCost, read_device

FOLDER = Path(__file__).parent / "profiles"
DIVISORS = ("memory_bytes_per_s", "memory_reached", "flop_per_s", "flop_reached", "copy_bytes_per_s", "expert_reached")
"""Fields of a `RooflineCost` that durations are divided by, so that they must not be 0."""


def device_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find_device(name: str) -> DeviceSpec:
    """Read the description of a device that the simulator runs an engine on, by its name if it comes with the project,
    else by its file's path. Raises ValueError if there is none, or it is not valid."""
    known = FOLDER / f"{name}.json"
    path = known if known.is_file() else Path(name)
    if not path.is_file():
        raise ValueError(f"no device {name!r}: give a JSON file or one of {', '.join(device_names())}")
    spec = read_device(path)
    try:
        _check(spec)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a device: {error}") from error
    return spec


def copy_bytes_per_s(spec: DeviceSpec) -> float:
    """Return the rate, in bytes per second, at which adapters are copied from host memory to the device; for a measured
    device, which has no such figure, the rate of its disk."""
    return spec.cost.copy_bytes_per_s if isinstance(spec.cost, RooflineCost) else spec.disk_bytes_per_s


def _check(spec: DeviceSpec) -> None:
    """Raise ValueError or TypeError if a figure of a device description is out of range or not a number, or if its
    `engine` is not a CoreConfig."""
    for name in ("page_bytes", "adapter_bytes_per_rank", "disk_bytes_per_s"):
        if not getattr(spec, name) > 0:
            raise ValueError(f"{name} must be positive, not {getattr(spec, name)}")
    for name, value in _figures(spec):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, not {value}")
    if isinstance(spec.cost, RooflineCost):
        for name in DIVISORS:
            if not getattr(spec.cost, name):
                raise ValueError(f"{name} must not be 0")
    if isinstance(spec.cost, RooflineCost | LinearCost) and spec.cost.chosen > 1:
        raise ValueError(f"chosen must be at most 1, not {spec.cost.chosen}")
    CoreConfig(**spec.engine)


def _figures(spec: DeviceSpec) -> Iterator[tuple[str, float]]:
    yield "noise_sigma", spec.noise_sigma
    if isinstance(spec.cost, RooflineCost):
        yield from asdict(spec.cost).items()
    elif isinstance(spec.cost, LinearCost):
        yield from zip(TERMS, spec.cost.coefficients, strict=True)
        yield from ((f"beyond {knot}", price) for knot, price in spec.cost.beyond)
        yield from (("chosen", spec.cost.chosen), ("experts", spec.cost.experts))
