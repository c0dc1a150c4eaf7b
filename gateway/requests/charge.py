"""The states of a request's charge."""

from __future__ import annotations

from enum import Enum


class Charge(Enum):
    """State of a request's charge, which says whether the tenant pays for tokens. It goes from PENDING to DUE, back to
    PENDING if the work that was begun early is dropped, and from each of them to WAIVED, where it stays."""

    PENDING = "pending"
    """Nothing is charged, because no engine and no upstream has had the request, or its work no longer counts."""
    DUE = "due"
    """The prompt and the tokens that have come are charged."""
    WAIVED = "waived"
    """Nothing is charged, because the engine or the upstream failed or refused the request, or because it is a shadow
    copy, which no tenant asked for."""
