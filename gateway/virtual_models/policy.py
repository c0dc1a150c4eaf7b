"""Protocol of the policies of virtual models: what they know about a request, and the steps that they plan for it."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from engine.core.messages.requests import Lane
from gateway.virtual_models.acceptance import Acceptance
from gateway.virtual_models.features import PromptFacts

Vector = npt.NDArray[np.float32]


class NoVector(Exception):
    """A prompt's vector cannot be computed now."""


class MemberState(Struct, frozen=True):
    """State of a member at the moment, as far as this gateway knows it."""

    ready: bool = True
    """False means that no engine, or no upstream, takes requests for the member now."""
    wait_s: float = 0.0
    """Predicted seconds until the first token of an interactive request with an empty prompt."""
    ttft_s: float = 0.5
    """TTFT goal of the member's interactive lane, in seconds."""


class Asked(Struct, frozen=True):
    """A request for a virtual model, as policies see it."""

    tenant: str
    lane: Lane
    session: str
    """Text that is equal in all requests of one conversation."""
    request: str
    """Id that is unique to the request."""
    members: Sequence[str]
    """The members that the tenant may use in this lane, in the order of the configuration; never empty."""
    state: Callable[[str], MemberState]
    facts: Callable[[], PromptFacts]
    """Returns what the features of the prompt's text need."""
    vector: Callable[[str, str], Awaitable[Vector]]
    """Computes the prompt's vector by a model and a kind of pooling. Raises NoVector."""


class Step(Struct, frozen=True):
    """One try to answer a request. If it fails before its first token, or its answer is not accepted, the next step of
    the plan follows."""

    member: str
    reason: str
    """Why this member was chosen, in one word."""
    accept: Acceptance | None = None
    """The answer is held back until it passes these tests. None means that it is streamed as it comes."""
    patience_s: float | None = None
    """Seconds after which a stream that is held back goes to the next step. None means no such limit."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """Copies of requests that another member answers, too, in the batch lane. Their answers are dropped, and no tenant
    is charged for them. Raises ValueError for a share that is not from 0 to 1, or if `at_once` is below 1."""

    member: str
    share: float = 1.0
    """Share of requests that are copied, from 0 to 1."""
    at_once: int = 4
    """Maximum number of copies that run at the same time in one gateway process; further ones are left out."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"shadow.share must be from 0 to 1, not {self.share}")
        if self.at_once < 1:
            raise ValueError(f"shadow.at_once must be at least 1, not {self.at_once}")

    def copies(self, request: Asked) -> bool:
        """Return whether a request is copied. The choice depends on its id only."""
        return fraction(f"shadow {request.request}") < self.share


class Policy(Protocol):
    """Chooses the members that answer the requests of one virtual model. A policy is a frozen dataclass, whose fields
    are the settings of its section and whose creation raises ValueError for settings that contradict each other."""

    policy: ClassVar[str]
    """Value of the setting `policy`."""

    @property
    def members(self) -> Sequence[str]:
        """Return the names of all members: base models, adapters, `base:adapter` or upstreams."""

    @property
    def shadow(self) -> Shadow | None:
        """Return which requests are copied; None means none."""

    async def plan(self, request: Asked) -> Sequence[Step]:
        """Return the steps to take, in order. An empty plan means that no member may answer the request."""

    def explain(self) -> str:
        """Return a sentence for operators that says which member answers which requests."""


def fraction(text: str) -> float:
    """Return a number from 0 to below 1 that depends on the text alone, evenly distributed over texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def check_members(members: Sequence[str], least: int = 1) -> None:
    """Raise ValueError if there are fewer than `least` members, or one of them twice."""
    if len(members) < least:
        raise ValueError(f"members must name at least {least}")
    if len(set(members)) < len(members):
        raise ValueError("members names one twice")
