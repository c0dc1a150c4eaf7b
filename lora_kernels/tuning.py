"""Which configuration a kernel is launched with: block sizes, warps and stages, as a dict of integers for each kernel.

Three places say it, and the first that does is followed: what was measured on this machine (a data directory), what was
measured on such a device and is shipped (`tuned/`), and the default, which is in the kernel's own code. A file is one
device's, under one version of Triton: another compiles other machine code, for which nothing was measured.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = Mapping[str, int]
"""What one launch is configured with, by name."""

SHIPPED = Path(__file__).parent / "tuned"


T = TypeVar("T", bound="DataclassInstance")


class TuningError(ValueError):
    """A file of configurations that cannot be used; the message names it, and what is wrong."""


def require_power_of_two(name: str, size: int) -> None:
    """Raises ValueError: the message names it."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"{name} must be a power of two, not {size}")


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """What a measurement holds for.

    Attributes:
        name: of the device, as its driver gives it.
        capability: compute capability, 90 for 9.0.
        triton: version.
    """

    name: str
    capability: int
    triton: str

    @property
    def file_name(self) -> str:
        name = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{name}-sm{self.capability}-triton-{self.triton}.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration that won. `us` and `default_us` are microseconds of one call with it, and with the default."""

    config: Config
    us: float
    default_us: float


Choices = Mapping[str, Mapping[str, Choice]]
"""Kernel -> key of a shape -> what won there."""


@dataclass(frozen=True, slots=True)
class Tunings:
    """What was chosen for one device; empty where nothing was measured."""

    choices: Choices = field(default_factory=dict)

    def find(self, kernel: str, shape: str, default: Config) -> dict[str, int]:
        """The configuration of a kernel for a shape, in the default's order of names."""
        choice = self.choices.get(kernel, {}).get(shape)
        return dict(default) | dict(choice.config if choice else {})

    def apply(self, kernel: str, shape: str, default: T) -> T:
        """The same of a dataclass of integers."""
        return replace(default, **self.find(kernel, shape, asdict(default)))


def load_tunings(
    device: DeviceKey, defaults: Mapping[str, Config], data_dir: Path | None = None, shipped: Path = SHIPPED
) -> Tunings:
    """Everything measured for a device.

    Args:
        defaults: every kernel that can be configured, with its default configuration.
        data_dir: where this machine's own measurements are kept; they come before shipped ones.

    Raises:
        TuningError: a file is damaged, is another device's, or names a kernel or a parameter that is not in `defaults`.
    """
    choices: dict[str, dict[str, Choice]] = {}
    for path in (shipped / device.file_name, *((tuned_path(data_dir, device),) if data_dir else ())):
        if path.is_file():
            choices = _merge(choices, _read(path, device, defaults))
    return Tunings(choices)


def save_choices(device: DeviceKey, choices: Choices, data_dir: Path, defaults: Mapping[str, Config]) -> Path:
    """Adds to what was measured on this machine before; returns the file.

    Raises:
        TuningError: what is there cannot be used, or `choices` would make it so. Nothing is written then.
    """
    path = tuned_path(data_dir, device)
    known = _read(path, device, defaults) if path.is_file() else {}
    document = {
        "device": asdict(device),
        "kernels": {
            kernel: {shape: asdict(choice) for shape, choice in sorted(shapes.items())}
            for kernel, shapes in sorted(_merge(known, choices).items())
        },
    }
    _check(document, path, device, defaults)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
    return path


def tuned_path(data_dir: Path, device: DeviceKey) -> Path:
    """Where a device's measurements are kept."""
    return data_dir / "tuned" / device.file_name


def _merge(first: Choices, second: Choices) -> dict[str, dict[str, Choice]]:
    """Both; the second's where both have one."""
    return {kernel: {**first.get(kernel, {}), **second.get(kernel, {})} for kernel in {**first, **second}}


def _read(path: Path, device: DeviceKey, defaults: Mapping[str, Config]) -> dict[str, dict[str, Choice]]:
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise TuningError(f"{path} is not JSON: {error}") from error
    _check(document, path, device, defaults)
    return {
        kernel: {shape: Choice(**choice) for shape, choice in shapes.items()}
        for kernel, shapes in document["kernels"].items()
    }


def _check(document: Any, path: Path, device: DeviceKey, defaults: Mapping[str, Config]) -> None:
    _has_keys(document, {"device", "kernels"}, path, "the file")
    if document["device"] != asdict(device):
        raise TuningError(f"{path} is of {document['device']}, not of {asdict(device)}")
    for kernel, shapes in document["kernels"].items():
        if kernel not in defaults:
            raise TuningError(f"{path} configures an unknown kernel {kernel!r}; known: {', '.join(sorted(defaults))}")
        for shape, choice in shapes.items():
            where = f"{kernel} at {shape}"
            _has_keys(choice, {"config", "us", "default_us"}, path, where)
            _has_keys(choice["config"], set(defaults[kernel]), path, where)
            for name, value in choice["config"].items():
                if type(value) is not int or value < 0:
                    raise TuningError(f"{path}: {name} of {where} must be a whole number, not {value!r}")


def _has_keys(found: Any, expected: set[str], path: Path, where: str) -> None:
    if not isinstance(found, dict) or set(found) != expected:
        names = sorted(found) if isinstance(found, dict) else found
        raise TuningError(f"{path}: {where} must have exactly {sorted(expected)}, not {names}")
