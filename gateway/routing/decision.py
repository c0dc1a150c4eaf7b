"""What a router decides about a request: its replica, or both replicas of a split request, and why."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from gateway.routing.news import Ask, Replica
from gateway.routing.split import Placing


class Reason(Enum):
    """Why a request goes to its replica."""

    SESSION = "session"
    """Earlier requests of the session went there."""
    PREFIX = "prefix"
    """The replica holds the beginning of the prompt."""
    RESIDENT = "resident"
    """The replica holds the adapter on the device."""
    HOME = "home"
    """The adapter belongs to the replica, which does not hold it on the device and loads it for this request."""
    OVERFLOW = "overflow"
    """The replicas that the adapter belongs to are predicted to be slower than this one with the adapter's load, or
    have more than their share of the batch work."""
    LEAST_DELAY = "least_delay"
    """The request needs no adapter, and the replica is predicted to be the fastest."""
    LEAST_LOADED = "least_loaded"
    """Batch work without an adapter goes to the replica that has the least of it."""
    HOLDER = "holder"
    """The router's choice does not have the adapter at all, and this replica has it."""
    SPLIT = "split"
    """Another replica continues the answer than the one that computes the prompt."""
    STALE = "stale"
    """No replica has told anything for `STALE_S`: the choice is the adapter's rendezvous rank or, without an adapter,
    the replica with the fewest requests of this router."""


class Decision(NamedTuple):
    replica: Replica
    reason: Reason
    cached_tokens: int
    """Prompt tokens that the replica's prefix cache is believed to hold."""
    placing: Placing | None = None
    """Where the parts of the request run, if it is split."""

    @property
    def decode(self) -> Replica | None:
        """The replica that continues the answer of a split request after its first token. None means that the request
        is not split."""
        return None if self.placing is None else self.placing.second.replica

    def unsplit(self, ask: Ask) -> Decision:
        """Return the decision to use if the split cannot be carried out: the replica that was to compute the prompt
        serves the whole request. A decision without a split is returned unchanged."""
        if self.decode is None:
            return self
        reason = reason_for(ask, self.replica, self.cached_tokens, is_home=True)
        return Decision(self.replica, reason, self.cached_tokens)


class NoReplica(LookupError):
    """There is no replica that takes new requests."""


def reason_for(ask: Ask, replica: Replica, cached_tokens: int, *, is_home: bool) -> Reason:
    """Return why the fastest replica gets a request. `cached_tokens` are those of its prompt that the replica is
    believed to hold; `is_home` says that the adapter belongs to the replica."""
    if cached_tokens:
        return Reason.PREFIX
    if ask.adapter_hash is None:
        return Reason.LEAST_DELAY
    if replica.holds(ask.adapter_hash):
        return Reason.RESIDENT
    return Reason.HOME if is_home else Reason.OVERFLOW
