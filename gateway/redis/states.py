"""Errors with which Redis answers because of a state it is in, such as that of a replica, whatever the call was."""

from __future__ import annotations

import re

from redis.exceptions import RedisClusterException, ResponseError

ELSEWHERE = frozenset(("READONLY", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED"))
"""States in which another connection to the same address may lead to a server that serves: a failover has demoted this
one, or has cut it off. UNBLOCKED ends calls that wait in a server that is demoted. LOADING closes the connection too:
redis-py takes it for a ConnectionError."""
_IN_SCRIPT = re.compile(r"(?<!\S)-([A-Z]+) ([^\n]*)")
"""An error in a script as Redis before 7 words it: `Error running script (...): @user_script: 3: -READONLY You ...`."""


def answer_of(error: BaseException | None) -> str:
    """Return the error with which Redis answered, such as `READONLY You can't write against a read only replica.`.
    Empty if `error` is another failure, such as a connection that broke."""
    if isinstance(error, RedisClusterException) and "not covered" in str(error):
        return "CLUSTERDOWN no node serves some of the slots"
    code = getattr(error, "status_code", None) or ""
    if not code and not isinstance(error, ResponseError):
        return ""
    if match := _IN_SCRIPT.search(str(error)):
        return match[0][1:]
    return f"{code} {error}".strip()


def elsewhere_of(error: ResponseError) -> str:
    """Return the state of ELSEWHERE that an error of Redis is about; empty if it is about none."""
    state = answer_of(error).partition(" ")[0]
    return state if state in ELSEWHERE else ""
