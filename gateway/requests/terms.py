"""How a run is limited, charged and awaited."""

from __future__ import annotations

from msgspec import Struct


class RunTerms(Struct, frozen=True):
    """How a run of a request is limited, charged and awaited. The defaults are those of a request that names its model
    itself; a run of a virtual model's member may have others."""

    engine_wait: float | None = None
    """Seconds that the run waits for an engine before its first token. None means as long as the settings say."""
    reserved_runs: int = 1
    """Number of runs to reserve tokens for: this one and those that may follow it, each as large as this one, so that
    they fit the limits."""
    is_counted: bool = False
    """True means that this run does not count in the requests per minute of the caller's tenant and key, because an
    earlier one does."""
    is_charged: bool = True
    """False means that the run is a shadow copy, which no tenant asked for: it is not limited, charged or counted in
    usage."""


ORDINARY = RunTerms()
"""The terms of a request that names its model itself."""
