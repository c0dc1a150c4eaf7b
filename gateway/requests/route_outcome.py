"""How a request for a virtual model ended: which member answered, what all members computed, and what that costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from engine.core.messages.requests import Lane
from gateway.core.billing import BillingConfig
from gateway.core.lanes import lane_name
from gateway.core.usage import today
from gateway.requests.charge import Charge
from gateway.requests.member_run import MemberRun
from gateway.requests.types import DiscardedRun
from gateway.virtual_models.cost import Costs, Spent, costs


class MemberTokens(Struct, frozen=True):
    """Tokens of one run of a member."""

    member: str
    prompt: int
    completion: int


class RouteOutcome(Struct, frozen=True):
    """The end of one request for a virtual model, or of one shadow copy of such a request."""

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
    runs: Sequence[MemberRun],
    answering: MemberRun | None,
    billing: BillingConfig | None = None,
    members: Collection[str] = (),
    lane: Lane = Lane.BATCH,
) -> RouteOutcome:
    """Return the outcome of the runs of one request. `members` are the names of all members, as in usage; no `billing`
    means that no costs are computed."""
    computed = [MemberTokens(run.member, *_tokens(run)) for run in runs]
    found = None
    if billing is not None and answering is not None:
        spent = [Spent(run.record.served_name, run.record.counts()) for run in runs if run.record.served_name]
        found = costs(billing, spent, answering.record.counts(), members, lane_name(lane), today())
    member, reason = (answering.member, answering.reason) if answering else ("", "failed")
    return RouteOutcome(model, member, reason, computed, found)


def discarded_runs(runs: Sequence[MemberRun], answering: MemberRun, model: str) -> tuple[DiscardedRun, ...]:
    """Return the runs that computed something, except the answering one. Those that the policy needed have the name of
    the virtual `model` in place of a member's, which the tenant may not know."""
    others = [run for run in runs if run is not answering and any(_tokens(run))]
    return tuple(DiscardedRun(model if run.for_policy else run.member, *_tokens(run)) for run in others)


def _tokens(run: MemberRun) -> tuple[int, int]:
    """Return the numbers of prompt and completion tokens that a run computed. They are 0 if it was never submitted, or
    if its charge was waived. A shadow copy, which is never charged, counts in full."""
    record = run.record
    if record.times.submitted is None or (run.terms.is_charged and record.charge is not Charge.DUE):
        return 0, 0
    return record.prompt_tokens, record.completion_tokens
