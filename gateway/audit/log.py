"""Writes and reads the audit log. An entry is there before its change begins, and is replaced when the change ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from gateway.api_schema.admins import PAGE, AuditEntry, AuditPage
from gateway.audit.redaction import redacted, redacted_text
from gateway.audit.store import AuditStore
from gateway.core.administrators import CONFIGURATION
from gateway.core.errors import MAX_QUOTED, Fault, unavailable
from gateway.registry.store import StoreAway

CHUNK = 500
"""Entries that are read from the store at once."""
MOST_CHUNKS = 20
"""Maximum number of such reads for one page. A filter that finds few entries then ends the page early."""
MOST_SKEW_S = 300.0
"""Seconds by which the clocks of the gateways and the store may differ without hiding entries from `since`."""
MOST_BYTES = 8192
"""Maximum size of an entry as JSON."""
CUTS = (MAX_QUOTED, 64, 16)
"""Maximum characters of a text in what changed. The next is taken if the entry is too large with the one before."""
TOO_LARGE = {"…": "too large for the audit log"}
"""Stands for what changed if no cut is enough."""
UNKNOWN = "unknown"

log = structlog.get_logger("audit")


class AuditQuery(Struct, frozen=True, kw_only=True):
    """Which entries are asked for. Empty texts and a `since` of 0 mean any."""

    since: float = 0.0
    """Unix time in seconds."""
    by: str = ""
    object: str = ""
    limit: int = PAGE
    before: str = ""
    after: str = ""
    """Id of the entry after which the page begins; it then has the oldest entries first."""

    def fits(self, entry: AuditEntry) -> bool:
        """Return whether an entry passes the filters. A change under way is not among those that follow another."""
        is_of_object = not self.object or f"{entry.object}/".startswith(f"{self.object}/")
        is_settled = not self.after or entry.result != UNKNOWN
        return entry.at >= self.since and self.by in ("", entry.by) and is_of_object and is_settled


class AuditLog:
    """The audit log of all gateways. Secrets in entries are redacted here, in one place for all that is recorded."""

    def __init__(self, store: AuditStore, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns the Unix time in seconds."""
        self._store = store
        self._clock = clock

    def now(self) -> float:
        return self._clock()

    async def begin(self, entry: AuditEntry) -> str:
        """Record that a change begins, and return the id of its entry, for `end`. Raises ApiError (AUDIT_UNAVAILABLE),
        because what cannot be recorded must not be changed."""
        try:
            return await self._store.add(_encoded(entry), self._clock(), of_tenant=bool(entry.tenant))
        except StoreAway as error:
            raise unavailable(
                Fault.AUDIT_UNAVAILABLE, f"changes cannot be recorded, and are refused: {error}"
            ) from error

    async def end(self, pending: str, entry: AuditEntry) -> None:
        """Replace the entry of a change that ended, and write it to the log as a line. If the store is away by now, the
        log's line is the only record of the result, and the stored entry stays `unknown`."""
        text = _encoded(entry)
        line = msgspec.json.decode(text)
        log.info("audit", **{name: value for name, value in line.items() if name != "id"})
        try:
            await self._store.add(text, self._clock(), pending, of_tenant=bool(entry.tenant))
        except StoreAway as error:
            log.error("audit_result_not_stored", pending=pending, request_id=entry.request_id, reason=str(error))

    async def configured(self, object_name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Record a change that the configuration made. Like `end`, it does not fail: the change has been made."""
        entry = AuditEntry(
            at=self._clock(), by=CONFIGURATION, action="configuration.apply", object=object_name, result="ok"
        )
        await self.end("", msgspec.structs.replace(entry, before=dict(before), after=dict(after)))

    async def page(self, query: AuditQuery) -> AuditPage:
        """Return the entries that a query asks for. Raises ApiError (AUDIT_UNAVAILABLE)."""
        try:
            return await self._page(query)
        except StoreAway as error:
            raise unavailable(Fault.AUDIT_UNAVAILABLE, f"the audit log cannot be read: {error}") from error

    async def _page(self, query: AuditQuery) -> AuditPage:
        found: list[AuditEntry] = []
        place = query.after or query.before
        for _ in range(MOST_CHUNKS):
            rows = await self._rows(query, place)
            for place, text in rows:
                entry = msgspec.json.decode(text, type=AuditEntry)
                entry.id = place
                if query.fits(entry):
                    found.append(entry)
                if len(found) == query.limit:
                    return AuditPage(found, place)
                if not query.after and _added(place) < query.since - MOST_SKEW_S:
                    return AuditPage(found, None)
            if len(rows) < CHUNK:
                return AuditPage(found, None)
        return AuditPage(found, place)

    async def _rows(self, query: AuditQuery, place: str) -> Sequence[tuple[str, bytes]]:
        return await (self._store.newer if query.after else self._store.older)(place, CHUNK)


def _added(place: str) -> float:
    """Return the Unix time at which the entry of this id was added. It is later than the beginning of its change."""
    return int(place.partition("-")[0]) / 1000


def _encoded(entry: AuditEntry) -> bytes:
    """Return an entry as JSON of at most MOST_BYTES, without secrets."""
    for most in CUTS:
        text = msgspec.json.encode(_safe(entry, redacted(entry.before, most), redacted(entry.after, most)))
        if len(text) <= MOST_BYTES:
            return text
    return msgspec.json.encode(_safe(entry, TOO_LARGE, TOO_LARGE))


def _safe(entry: AuditEntry, before: dict[str, Any], after: dict[str, Any]) -> AuditEntry:
    texts = {"object": redacted_text(entry.object), "request_id": redacted_text(entry.request_id)}
    return msgspec.structs.replace(entry, **texts, before=before, after=after)
