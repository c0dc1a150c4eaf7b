"""The devices that come with the project, and how to name another."""

from __future__ import annotations

from pathlib import Path

from engine.executor.cost import DeviceSpec, read_device

FOLDER = Path(__file__).parent / "devices"


def device_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def find_device(name: str) -> DeviceSpec:
    """A device by the name of one that comes with the project, or by the path of a file.

    Raises:
        ValueError: there is no such device, or its file is wrong.
    """
    known = FOLDER / f"{name}.json"
    path = known if known.is_file() else Path(name)
    if not path.is_file():
        raise ValueError(f"no device {name!r}: give a JSON file or one of {', '.join(device_names())}")
    return read_device(path)
