"""The id by which a caller and an operator speak of one request, the same over every protocol."""

from __future__ import annotations

import re
from secrets import token_hex

SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_from(asked: str) -> str:
    """The caller's own id where it is fit for headers and logs, else a new one."""
    return asked if SANE_ID.fullmatch(asked) else f"req-{token_hex(16)}"
