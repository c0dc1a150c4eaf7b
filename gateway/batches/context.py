"""What all work on batches in one gateway process needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.batches.gate import Gate
from gateway.batches.quarantine import Quarantine
from gateway.batches.route_gate import RouteGate
from gateway.batches.store import BatchStore
from gateway.core.tenants import KeyHolders
from gateway.files.service import Files
from gateway.requests.service import Gateway
from gateway.responses.service import Responses


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Dependencies of all work on batches in one gateway process."""

    store: BatchStore
    files: Files
    gateway: Gateway
    holders: KeyHolders
    gates: Mapping[str, Gate | RouteGate]
    """The gates that admit lines to the engines: one for each base model, in the order of the configuration, then one
    for each virtual model, by the model's name."""
    count: Callable[[str], None]
    """Called for every answered line with its result, "completed" or "failed", for metrics."""
    wasted: Callable[[int], None] = lambda tokens: None
    """Called with the tokens of each run of a line that no tenant is charged for, because the line runs again."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    responses: Responses | None = None
    """Stores and continues responses. None means that lines that need that are refused."""
