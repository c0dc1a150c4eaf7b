"""Where things live on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_data_dir(env: Mapping[str, str]) -> Path:
    """Converted models and the embedded store: $LORALANE_DATA_DIR, else `loralane` in the XDG data folder."""
    if env.get("LORALANE_DATA_DIR"):
        return Path(env["LORALANE_DATA_DIR"])
    return Path(env.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "loralane"
