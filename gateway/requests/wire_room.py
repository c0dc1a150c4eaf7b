"""Bounds the bytes that requests hold in a gateway process at both ends of their lives: bodies and messages while they
arrive, and answers that their callers have not read yet. No other limit applies to either."""

from __future__ import annotations

from types import TracebackType

from gateway.core.errors import ApiError, Fault, unavailable
from gateway.core.tenants import Tenant

STRANGERS = ""
"""Name under which callers are counted that have not authenticated. No tenant has an empty name."""
BODY_BYTES = 8 * 2**20
"""Bytes of one of the longest bodies, as the HTTP API allows them by default."""
TENANT_BYTES = 8 * BODY_BYTES
"""Maximum bytes of one tenant: eight of the longest bodies."""
STRANGERS_BYTES = 32 * 2**20
"""Maximum bytes of all callers together that have not authenticated. What every request may send before it
authenticates, such as the first KiB of its headers, is not to be counted, so that strangers cannot keep it out."""
PROCESS_BYTES = 8 * TENANT_BYTES
"""Maximum bytes of all callers, 512 MiB: eight tenants that use all of their room."""
GRANTED_BYTES = 2**20
"""Bytes that each tenant gets however much the others hold, so that these cannot keep its small requests out. 200,000
tokens of English are some 0.8 MB."""
REQUEST_BYTES = 4 * 2**10
"""Bytes as which a request itself counts (its task, headers and buffers), so that the bodies of a few bytes that one
tenant has in arrival are bounded, too: to 16,384."""


class WireRoom:
    """Counts the bytes that callers hold at the gateway's ports, by tenant and in all, and refuses what would exceed
    the bounds. One object serves all protocols of a process. Used from the event loop's thread only."""

    def __init__(
        self,
        *,
        tenant_bytes: int = TENANT_BYTES,
        strangers_bytes: int = STRANGERS_BYTES,
        process_bytes: int = PROCESS_BYTES,
        granted_bytes: int = GRANTED_BYTES,
    ) -> None:
        """`granted_bytes` is what each tenant gets beyond `process_bytes`."""
        self.total = 0
        """Bytes that all callers hold."""
        self._held: dict[str, int] = {}
        self.tenant_bytes = tenant_bytes
        self.strangers_bytes = strangers_bytes
        self.process_bytes = process_bytes
        self.granted_bytes = granted_bytes

    def hold(self, tenant: Tenant | None = None) -> WireHold:
        """Return an empty hold for a request of a tenant. None means that its caller has not authenticated yet."""
        hold = WireHold(self)
        if tenant is not None:
            hold.identify(tenant)
        return hold

    def held(self, name: str) -> int:
        """Return the bytes that the tenant of that name holds, or all STRANGERS."""
        return self._held.get(name, 0)

    def bound(self, tenant: Tenant) -> int:
        """Return the maximum bytes of a tenant: no more of the longest bodies than it may have requests at once."""
        slots = tenant.limits.concurrent_requests
        return self.tenant_bytes if slots is None else min(self.tenant_bytes, slots * BODY_BYTES)

    def check_stranger(self, more: int) -> None:
        """Raise ApiError (OVERLOADED) if `more` bytes of a caller that has not authenticated exceed the bound."""
        if self.held(STRANGERS) + more > self.strangers_bytes:
            message = "callers that have not authenticated send too many bytes at the same time; try again later"
            raise unavailable(Fault.OVERLOADED, message)

    def check(self, tenant: str, bound: int, more: int, own: int) -> None:
        """Raise ApiError if `more` bytes of a tenant's request that holds `own` exceed a bound: RATE_LIMIT_EXCEEDED,
        the tenant's other requests and answers leave no room (a single request may exceed `bound`); OVERLOADED, those
        of all callers leave none, and the tenant holds more than is granted."""
        held = self.held(tenant)
        if held > own and held + more > bound:
            message = (
                f"your requests that arrive and your answers that wait to be read have {held:,} bytes here, of at most "
                f"{bound:,}; read your answers, and send this request again when fewer requests are under way"
            )
            raise ApiError(Fault.RATE_LIMIT_EXCEEDED, message, retry_after=1.0, limit_kind="requests")
        if held + more > self.granted_bytes and self.total + more > self.process_bytes:
            message = "the requests and unread answers of all callers leave no room for this request; try again later"
            raise unavailable(Fault.OVERLOADED, message)

    def count(self, name: str, more: int) -> None:
        """Count bytes as held or, if `more` is negative, as held no longer."""
        self.total += more
        if held := self.held(name) + more:
            self._held[name] = held
        else:
            del self._held[name]


class WireHold:
    """The bytes that one request holds in a `WireRoom`, first for a caller that has not authenticated. As a context
    manager, it frees them after the block."""

    __slots__ = ("_bound", "_room", "num_bytes", "tenant")

    def __init__(self, room: WireRoom) -> None:
        self._room = room
        self._bound = 0
        self.tenant = STRANGERS
        """Name of the tenant that the bytes count for, or STRANGERS."""
        self.num_bytes = 0

    def identify(self, tenant: Tenant) -> None:
        """Count the bytes for a tenant, which has authenticated, from now on."""
        num_bytes = self.num_bytes
        self.free()
        self.tenant, self._bound = tenant.name, self._room.bound(tenant)
        self.count(num_bytes)

    def take(self, num_bytes: int) -> None:
        """Hold more bytes, which are about to arrive or have just arrived. Raises what `WireRoom.check` raises; then
        the hold stays as it was."""
        if self.tenant == STRANGERS:
            self._room.check_stranger(num_bytes)
        else:
            self._room.check(self.tenant, self._bound, num_bytes, self.num_bytes)
        self.count(num_bytes)

    def count(self, num_bytes: int) -> None:
        """Hold more bytes that cannot be refused any more, such as an answer's. The tenant's further requests are
        refused while there is no room for them."""
        if num_bytes:
            self._room.count(self.tenant, num_bytes)
            self.num_bytes += num_bytes

    def free(self) -> None:
        """Hold nothing any more. Calling it again has no effect."""
        self.count(-self.num_bytes)

    def __enter__(self) -> WireHold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()
