"""Files that are written when all the work is done: looked at before it begins."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(path: Path, option: str) -> None:
    """Whether a file could be written there now. Raises ValueError: the message names the option."""
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: this file cannot be written")
