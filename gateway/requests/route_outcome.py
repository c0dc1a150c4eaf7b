"""How a request for a virtual model ended: which member answered, what all members computed, and what that costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from engine.core.types import Lane
from gateway.core.billing import BillingConfig
from gateway.core.lanes import lane_name
from gateway.core.usage import today
from gateway.requests.placement import Placement
from gateway.requests.types import DiscardedRun
from gateway.routes.cost import Costs, Spent, costs


class MemberTokens(Struct, frozen=True):
    """Tokens of one run of a member."""

    member: str
    prompt: int
    completion: int


class RouteOutcome(Struct, frozen=True):
    """The end of one request for a virtual model, or of one copy."""

    model: str
    """Name of the virtual model."""
    member: str
    """The member that answered; empty if none did."""
    reason: str
    """Why that member answered, or `failed`."""
    runs: Sequence[MemberTokens]
    costs: Costs | None
    """None means that there are no prices, or no answer."""


def outcome_of(
    model: str,
    places: Sequence[Placement],
    answering: Placement | None,
    billing: BillingConfig | None = None,
    members: Collection[str] = (),
    lane: Lane = Lane.BATCH,
) -> RouteOutcome:
    """Return the outcome of the runs of one request. `members` are the names of all members, as in usage; no `billing`
    means that no costs are computed."""
    runs = [MemberTokens(place.member, *_tokens(place)) for place in places]
    record = answering.record if answering else None
    found = None
    if billing is not None and record is not None:
        spent = [Spent(place.record.served_name, place.record.counts()) for place in places if place.record]
        found = costs(billing, spent, record.counts(), members, lane_name(lane), today())
    member, reason = (answering.member, answering.reason) if answering else ("", "failed")
    return RouteOutcome(model, member, reason, runs, found)


def discarded_runs(places: Sequence[Placement], answering: Placement, model: str) -> tuple[DiscardedRun, ...]:
    """Return the runs that computed something, except the answering one. Those that the policy needed have the name of
    the virtual `model` in place of a member's, which the tenant may not know."""
    others = [place for place in places if place is not answering and any(_tokens(place))]
    return tuple(DiscardedRun(model if place.for_policy else place.member, *_tokens(place)) for place in others)


def _tokens(place: Placement) -> tuple[int, int]:
    """Return the numbers of prompt and completion tokens that a run computed; a refunded run of a tenant has none."""
    record = place.record
    if record is None or record.submitted is None or (record.refund and place.is_charged):
        return 0, 0
    return record.prompt_tokens, record.completion_tokens
