"""Logs the outages of one engine, as a gateway sees them, with a hint for the operator."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from engine.rpc.target import UNIX, EngineTarget

log = structlog.get_logger("engine.rpc.link")


class Cause(NamedTuple):
    """A known reason why an engine cannot be reached."""

    mark: str
    """Text by which the cause is recognized in gRPC's description of the failure."""
    hint: str
    """The likely mistake, told to the operator."""
    lasts: bool = False
    """True means that only a change of files or configurations helps, so that the gateway may retry less often."""


OTHER = Cause("", "")
CAUSES = (
    Cause(
        "Hostname Verification Check failed",
        "the engine's certificate is not for this name or IP address; use a name that the certificate has, or issue one"
        " for this name",
        lasts=True,
    ),
    Cause("certificate has expired", "the engine's certificate has expired", lasts=True),
    Cause("certificate is not yet valid", "the engine's certificate is not valid yet; check the clocks", lasts=True),
    Cause(
        "CERTIFICATE_VERIFY_FAILED",
        "the engine's certificate is of none of the authorities in this gateway's engine.tls.ca",
        lasts=True,
    ),
    Cause("WRONG_VERSION_NUMBER", "the engine was started without engine.tls", lasts=True),
    Cause("Connection refused", "nothing listens there: the engine has not loaded its model yet, or has another port"),
    Cause("errors resolving", "the name resolver does not know this name"),
    OTHER,
)
"""The known causes; the first whose mark is found applies."""
CLOSED = "Socket closed"
"""gRPC's description of a connection that the other side closed at once, as an engine does after a failed handshake."""
DISTRUSTED = Cause(
    CLOSED,
    "the engine closed the connection; if it does so each time, then it does not accept this gateway's"
    " engine.tls.certificate, which its standard error shows",
    lasts=True,
)
PLAIN = Cause(
    CLOSED, "the engine closed the connection; if it has engine.tls, then this gateway needs it, too", lasts=True
)


class OutageLog:
    """Logs each outage of the engine at `target` once for each cause, and the end of an outage.

    Outages of an engine on a Unix socket are not logged: its supervisor on the same machine logs when the engine ends.
    """

    def __init__(self, target: EngineTarget) -> None:
        self._target = target
        self._is_silent = target.address.startswith(UNIX)
        self._told: set[Cause] = set()

    def note(self, reason: str) -> Cause:
        """Record that an attempt to reach the engine failed, and log it unless this cause was logged before in this
        outage. `reason` is gRPC's description of the failure. Return the cause."""
        cause = cause_of(reason, is_secure=self._target.is_secure)
        if cause not in self._told and not self._is_silent:
            log.warning("engine_unreachable", address=self._target.address, reason=reason, hint=cause.hint)
        self._told.add(cause)
        return cause

    def end(self) -> None:
        """Record that the engine was reached, and log that an outage has ended if there was one."""
        if self._told and not self._is_silent:
            log.info("engine_reached", address=self._target.address)
        self._told.clear()


def cause_of(reason: str, *, is_secure: bool) -> Cause:
    """Return the cause of a failure to connect, with or without TLS, from gRPC's description of it."""
    closed = DISTRUSTED if is_secure else PLAIN
    return next(cause for cause in (closed, *CAUSES) if cause.mark in reason)
