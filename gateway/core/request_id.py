"""The id by which a caller and an operator speak of one request, the same over every protocol."""

from __future__ import annotations

import random
import re

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_from(asked: str) -> str:
    """The caller's own id where it is fit for headers and logs, else a new one."""
    return asked if SANE_ID.fullmatch(asked) else f"req-{new_id()}"


def new_id() -> str:
    """Unique, and no secret: without the operating system's randomness, which costs more than the rest of it."""
    return f"{random.getrandbits(128):032x}"
