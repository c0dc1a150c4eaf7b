"""Request ids, which callers and operators use to refer to one request. They work the same over every protocol."""

from __future__ import annotations

import random
import re

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_from(asked: str) -> str:
    """Return the caller's own id if it is safe in headers and logs, otherwise a new one."""
    return asked if SANE_ID.fullmatch(asked) else f"req-{new_id()}"


def new_id() -> str:
    """Return a unique id of 32 hex digits.

    The id is not secret, so it does not use the operating system's randomness, which costs more than everything else.
    """
    return f"{random.getrandbits(128):032x}"
