"""Readiness of a gateway for load balancers and health checks: which of its base models can serve requests now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.core.errors import MAX_QUOTED, ApiError, Fault
from gateway.core.lifecycle import DRAINING
from gateway.limiter.base import Limiter
from gateway.requests.served_model import ServedModels

CLOSED = "limits cannot be checked while Redis is away"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Which base models can serve requests now, and whether the limits can be checked."""

    troubles: Mapping[str, str]
    """Why the engine of a base model cannot serve requests, by the model's name; empty where it can."""
    closed: str
    """Why requests for every model are refused. Empty means that they are not."""

    @property
    def engines(self) -> bool:
        """True if the engines of all base models can serve requests."""
        return not any(self.troubles.values())

    @property
    def status(self) -> Literal["ready", "degraded", "not_ready"]:
        """`degraded` means that some base models can be served and others cannot."""
        if self.closed or all(self.troubles.values()):
            return "not_ready"
        return "ready" if self.engines else "degraded"

    @property
    def serves(self) -> bool:
        """True if requests for at least one base model can be served."""
        return self.status != "not_ready"

    @property
    def reason(self) -> str:
        """Message for operators: what cannot be served now, and why. Empty means that everything can."""
        if self.closed == DRAINING:
            return DRAINING
        if len(self.troubles) == 1:
            found = list(self.troubles.values())
        else:
            found = [f"{name}: {trouble}" for name, trouble in self.troubles.items() if trouble]
        return "; ".join(reason for reason in (*found, self.closed) if reason)


def readiness(models: ServedModels, limiter: Limiter, model: str = "", *, draining: bool = False) -> Readiness:
    """Return the readiness of a gateway or, if a base model is named, for requests of that one. A gateway that drains
    is not ready. Raises ApiError (MODEL_NOT_FOUND) if there is no base model of that name."""
    asked = [one for one in models if not model or model in one.names]
    if not asked:
        names = ", ".join(one.name for one in models)
        message = f"there is no base model {model[:MAX_QUOTED]!r}; there are {names}"
        raise ApiError(Fault.MODEL_NOT_FOUND, message, "model")
    closed = DRAINING if draining else CLOSED if limiter.modes == {"closed"} else ""
    return Readiness({one.name: one.heartbeat.trouble for one in asked}, closed)
