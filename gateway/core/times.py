"""Times and durations as people write them, on command lines and in the configuration."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime

DURATION = re.compile(r"(\d{1,7}(?:\.\d{1,3})?)([smhd])")
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def unix_time(value: object) -> float:
    """Return a date (its beginning), a time, or the text of either in ISO 8601, in Unix seconds. Without a time zone it
    is in UTC. Raises ValueError for anything else."""
    if isinstance(value, str):
        text = value
        try:
            value = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"{text[:40]!r} is no time: write one such as 2027-01-31 or 2027-01-31T12:00Z") from None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC).timestamp()
    raise ValueError("must be a time such as 2027-01-31 or 2027-01-31T12:00Z")


def duration_s(text: str) -> float:
    """Return a duration such as 90s, 30m, 1h or 90d in seconds. Raises ValueError for other text."""
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:40]!r} is no duration: write one such as 90s, 30m, 1h or 90d")
    return float(match[1]) * UNIT_SECONDS[match[2]]
