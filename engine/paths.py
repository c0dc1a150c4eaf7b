"""Where things live on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_data_dir(env: Mapping[str, str]) -> Path:
    """Converted models and the embedded store: $LORALANE_DATA_DIR, else `loralane` in the XDG data folder."""
    if env.get("LORALANE_DATA_DIR"):
        return Path(env["LORALANE_DATA_DIR"])
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "loralane"


def partial_prefix(name: str, pid: int) -> str:
    """How the name of a folder begins that process `pid` is filling, before it becomes the model folder `name`."""
    return f".{name}-{pid}-"


def partials(data_dir: Path, pid: int) -> list[Path]:
    """Model folders that process `pid` has not finished."""
    return sorted((data_dir / "models").glob(f".*-{pid}-*"))
