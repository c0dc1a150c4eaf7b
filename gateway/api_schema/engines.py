"""Engines: what operators send and get, and the operations."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gateway.api_schema.common import INVALID, ONE_MODEL, Deleted
from gateway.api_schema.operation import Operation, admin
from gateway.core.errors import Fault

ENGINES = "/admin/v1/engines"
ENGINE = ENGINES + "/{engine}"
MAX_RESTART_SECONDS = 3600
"""Maximum seconds that a restart may wait for requests that no other engine can take over."""
RESTART_SECONDS = 60
"""Default of the seconds that a restart waits for such requests."""


class NewEngineBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /admin/v1/engines, which adds an engine for all gateways. `model` names the base model that it
    serves, and may be left out if there is one."""

    name: str
    address: str
    model: str = ""
    role: str = ""
    """The part of split requests that the engine computes: prefill, decode or both, which is the default."""


class EngineOverview(Struct, frozen=True):
    """One engine of a pool, for operators."""

    name: str
    address: str
    state: str
    """`connecting`, `hanging`, `mismatched`, `draining` or `serving`."""
    problem: str
    """Why the engine cannot serve in this pool; empty unless it is `mismatched`."""
    model: str
    """Folder or file of the model that the engine has loaded; empty until it was reached."""
    device: str
    life: str
    """Id of the engine process, which differs after a restart."""
    running: int
    waiting: int
    streams: int
    """Answers of this gateway that the engine has not finished."""
    free_pages: int
    total_pages: int
    adapters_on_device: int
    predicted_wait_seconds: float
    """Predicted time until the first token of an interactive request that arrives now, without its own prompt."""
    base_model: str = ""
    """Name of the base model that the pool serves."""
    added_by: str = "configuration"
    """`configuration`, `operator` or `ray`. Only engines of the latter two can be removed."""
    notice: str = ""
    """What the operator who has just changed the engine should know; empty otherwise."""
    weights: str = ""
    """Format of the weights, such as Q4_K+Q6_K, gptq-4bit-g128, int8 or bf16; empty until the engine was reached."""
    tensor_parallel: int = 0
    """Number of processes of each stage that compute the model together; 0 until the engine was reached."""
    pipeline_parallel: int = 0
    """Number of stages of consecutive layers; 0 until the engine was reached."""
    role: str = "both"
    """The part of split requests that the engine computes: `prefill`, `decode` or `both`."""


class EngineOverviews(Struct):
    engines: list[EngineOverview]


class EngineStatus(Struct, frozen=True):
    """State of the engine. Pages are pages of its pool; steps and tokens are totals since the engine started."""

    served_name: str
    """Name by which callers ask for the base model."""
    model: str
    """Folder or file that the engine has loaded."""
    device: str
    tokens_per_second: float | None
    """Generated tokens per second between the last two samples, five seconds apart; None if there are none."""
    steps: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    total_pages: int
    free_pages: int
    kv_pages: int
    cached_pages: int
    adapter_pages: int


class Violations(Struct):
    violations: list[str]


CHANGED = INVALID | {Fault.ENGINE_UNAVAILABLE}
MEMBERS = INVALID | {Fault.ENGINE_CONFLICT, Fault.REGISTRY_UNAVAILABLE}
SECONDS = {"type": "integer", "minimum": 0, "maximum": MAX_RESTART_SECONDS, "default": RESTART_SECONDS}
QUERY = {**ONE_MODEL, "seconds": {**SECONDS, "description": "Wait of a restart for requests that cannot move."}}


def _change(action: str, summary: str) -> Operation[EngineOverview]:
    return admin("POST", f"{ENGINE}/{action}", summary, EngineOverview, CHANGED, query=QUERY)


LIST = admin("GET", ENGINES, "List engines.", EngineOverviews, INVALID, query=ONE_MODEL)
ADD = admin(
    "POST",
    ENGINES,
    "Add an engine for all gateways, also for those that start later.",
    EngineOverview,
    MEMBERS,
    body=NewEngineBody,
    status=201,
)
REMOVE = admin(
    "DELETE",
    ENGINE,
    "Remove an engine that was added: its requests move to other engines, and its process goes on.",
    Deleted,
    MEMBERS,
    query=ONE_MODEL,
)
DRAIN = _change("drain", "Drain an engine: its requests move to other engines, and it gets no new ones.")
RESUME = _change("resume", "Let a draining engine serve again.")
RESTART = _change("restart", "Drain an engine, and end its process, which is then started again.")
CHECK = admin("GET", "/admin/v1/check", "Check engine integrity.", Violations, frozenset({Fault.ENGINE_UNAVAILABLE}))

OPERATIONS: tuple[Operation[Any], ...] = (LIST, ADD, REMOVE, DRAIN, RESUME, RESTART)
