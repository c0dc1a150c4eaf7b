"""Chooses each kernel's launch configuration, a dict of integers: measured on this machine, else shipped for the same
kind of device (`tuned/`), else the kernel's default. A file holds for one device and one version of Triton."""

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
"""The parameters of one kernel launch: name -> value."""

LEAST_SEQS = 64
"""Minimum number of sequences for which kernels that find them on the device are compiled. Each power of two above it
is a kernel of its own."""
SHIPPED = Path(__file__).parent / "tuned"


T = TypeVar("T", bound="DataclassInstance")


class TuningError(ValueError):
    """Raised for a file of configurations that cannot be used. The message names the file and what is wrong."""


def require_power_of_two(name: str, size: int) -> None:
    """Raises ValueError, with a message that names the parameter, unless `size` is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"{name} must be a power of two, not {size}")


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """Identifies the device and Triton version for which measurements are valid."""

    name: str
    """Device name as the driver reports it."""
    capability: int
    """Compute capability, times ten: 90 for 9.0."""
    triton: str
    """Triton version."""

    @property
    def file_name(self) -> str:
        name = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{name}-sm{self.capability}-triton-{self.triton}.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration chosen by measurement. `us` and `default_us` are the microseconds of one call with this
    configuration and with the default."""

    config: Config
    us: float
    default_us: float


Choices = Mapping[str, Mapping[str, Choice]]
"""Kernel -> key of a shape -> the configuration chosen for it."""


@dataclass(frozen=True, slots=True)
class Tunings:
    """The configurations chosen for one device, by kernel and shape; none if nothing was measured."""

    choices: Choices = field(default_factory=dict)

    def find(self, kernel: str, shape: str, default: Config) -> dict[str, int]:
        """Return a copy of `default`, with the values replaced that were chosen for this kernel and shape."""
        choice = self.choices.get(kernel, {}).get(shape)
        return dict(default) | dict(choice.config if choice else {})

    def apply(self, kernel: str, shape: str, default: T) -> T:
        """Return a copy of `default`, whose fields are integers, with the values chosen for this kernel and shape."""
        return replace(default, **self.find(kernel, shape, asdict(default)))


def load_tunings(
    device: DeviceKey, defaults: Mapping[str, Config], data_dir: Path | None = None, shipped: Path = SHIPPED
) -> Tunings:
    """Return the configurations measured for a device, from the shipped file and, with precedence, from that in
    `data_dir`. `defaults` has every kernel. Raises TuningError for a file that is damaged, of another device, or does
    not fit `defaults`."""
    choices: dict[str, dict[str, Choice]] = {}
    for path in (shipped / device.file_name, *((tuned_path(data_dir, device),) if data_dir else ())):
        if path.is_file():
            choices = _merge(choices, _read(path, device, defaults))
    return Tunings(choices)


def save_choices(device: DeviceKey, choices: Choices, data_dir: Path, defaults: Mapping[str, Config]) -> Path:
    """Add `choices` to the device's file in `data_dir`, replacing earlier ones of the same kernel and shape,
    atomically, and return its path. Raises TuningError, and writes nothing, if the existing or the new file cannot be
    used."""
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
    """Return the path of the file with a device's measurements, below `data_dir`. The file need not exist."""
    return data_dir / "tuned" / device.file_name


def _merge(first: Choices, second: Choices) -> dict[str, dict[str, Choice]]:
    """Merge two sets of choices. Where both have an entry, `second` takes precedence."""
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
