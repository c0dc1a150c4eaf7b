"""Messages from rank 0 to the other ranks of an engine, and their replies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.core.messages.commands import FetchAnswer
from engine.core.messages.requests import AdapterHash
from engine.core.messages.step import AdapterFetch, StepPlan


@dataclass(frozen=True, slots=True)
class Step:
    """Message of rank 0 to the other ranks: collect the results of the `collected` oldest steps, append `tokens`
    (request id, token id), which rank 0 has learnt since its last message, and then submit `plan`."""

    plan: StepPlan
    tokens: tuple[tuple[str, int], ...]
    collected: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Message of rank 0 to another rank: read an adapter into host memory, and reply with a `FetchAnswer`, whether that
    succeeded."""

    fetch: AdapterFetch


@dataclass(frozen=True, slots=True)
class Drop:
    """Message of rank 0 to another rank: free the copy of an adapter in host memory, because not all ranks could read
    the adapter."""

    adapter_hash: AdapterHash


@dataclass(frozen=True, slots=True)
class Joining:
    """Reply to rank 0: the rank's process has started and joins the others now."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Reply to rank 0: the rank has loaded its part of the model."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Reply to rank 0: the rank cannot serve the model, for a reason that concerns the operator."""

    reason: str


Message = Step | Fetch | Drop
Reply = Joining | Ready | Refused | FetchAnswer


def for_followers(plan: StepPlan) -> StepPlan:
    """Return the part of a plan that is sent to ranks other than 0: only rank 0 samples, and so needs grammars."""
    admitted = tuple(
        replace(admission, params=admission.params._replace(grammar=None)) if admission.params.grammar else admission
        for admission in plan.admitted
    )
    return replace(plan, admitted=admitted, prepared=(), prepared_for=(), forgotten=(), masks=(), saved_keys=())
