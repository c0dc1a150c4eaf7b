"""Paths of the data directory and of the model folders in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_data_dir(env: Mapping[str, str]) -> Path:
    """Return the folder of converted models and the embedded store: $LORALANE_DATA_DIR, or `loralane` in the XDG data
    folder."""
    if env.get("LORALANE_DATA_DIR"):
        return Path(env["LORALANE_DATA_DIR"])
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "loralane"


def partial_prefix(name: str, pid: int) -> str:
    """Return the name prefix of the temporary folder that process `pid` fills before it becomes the folder `name`."""
    return f".{name}-{pid}-"


def partials(data_dir: Path, pid: int) -> list[Path]:
    """Return the unfinished model folders of process `pid`."""
    return sorted((data_dir / "models").glob(f".*-{pid}-*"))
