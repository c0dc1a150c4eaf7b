"""All operations of the HTTP API, with their request bodies, responses and errors."""

from __future__ import annotations

from typing import Any

from gateway.adapters.record import MAX_DRAIN_SECONDS
from gateway.adapters.status import AdapterStatus
from gateway.core.errors import Fault
from gateway.engines.replica import EngineOverview
from gateway.http import operations as live
from gateway.http.admin_answers import Deleted
from gateway.http.console import CONSOLE, FILE
from gateway.http.invocations import Invocation
from gateway.http.openapi import answers
from gateway.http.openapi.accounts import ACCOUNT_OPERATIONS
from gateway.http.openapi.batches import BATCH_OPERATIONS
from gateway.http.openapi.embeddings import embeddings_operations
from gateway.http.openapi.files import FILE_OPERATIONS
from gateway.http.openapi.messages import message_operations
from gateway.http.openapi.operation import TEXT, Operation, admin
from gateway.http.openapi.responses import response_operations
from gateway.observe.history import MAX_MINUTES, HistoryPoints
from gateway.observe.live import LaneStatus, LiveRequests
from gateway.observe.model_operations import MAX_RESTART_SECONDS, RESTART_SECONDS
from gateway.observe.recent import KEPT
from gateway.openai import schema as bodies

MODEL = frozenset({Fault.MODEL_NOT_FOUND})
GENERATION = MODEL | {
    Fault.CONTEXT_LENGTH_EXCEEDED,
    Fault.UNSUPPORTED_PARAMETER,
    Fault.RATE_LIMIT_EXCEEDED,
    Fault.INSUFFICIENT_QUOTA,
    Fault.LANE_QUEUE_FULL,
    Fault.QUEUE_TIMEOUT,
    Fault.PREEMPTED,
    Fault.CANCELLED,
    Fault.ADAPTER_UNAVAILABLE,
    Fault.LIMITER_UNAVAILABLE,
    Fault.ENGINE_UNAVAILABLE,
    Fault.UPSTREAM_UNAVAILABLE,
    Fault.DEADLINE_EXCEEDED,
}
ENGINE = frozenset({Fault.ENGINE_UNAVAILABLE})
LANE = ENGINE | {Fault.INVALID_REQUEST}
REQUEST = LANE | {Fault.REQUEST_NOT_FOUND}
ONE_MODEL = {"model": {"type": "string", "description": "Name of a base model."}}
SECTIONS = {"sections": {"type": "string", "examples": ["engine,lanes,requests,tenants,adapters"]}, **ONE_MODEL}

INVALID = frozenset({Fault.INVALID_REQUEST})
HISTORY_QUERY = {"minutes": {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES}, **ONE_MODEL}
RECENT_QUERY = {
    "which": {"enum": list(live.WHICH), "description": "failed: status 400 or above, except 499."},
    "limit": {"type": "integer", "minimum": 1, "maximum": KEPT},
}
SUMMARIES = {
    "pause": "Pause a lane: running requests continue, and new ones wait.",
    "drain": "Drain a lane: accepted requests are completed, and new ones are refused.",
    "resume": "Resume a paused or drained lane.",
}

ENGINE_SUMMARIES = {
    "drain": "Drain an engine: its requests move to other engines, and it gets no new ones.",
    "resume": "Let a draining engine serve again.",
    "restart": "Drain an engine, and end its process, which is then started again.",
}
ADD = "Add an engine for all gateways, also for those that start later."
REMOVE = "Remove an engine that was added: its requests move to other engines, and its process goes on."
MEMBERS = frozenset({Fault.INVALID_REQUEST, Fault.ENGINE_CONFLICT, Fault.REGISTRY_UNAVAILABLE})
SECONDS = {"type": "integer", "minimum": 0, "maximum": MAX_RESTART_SECONDS, "default": RESTART_SECONDS}
ENGINE_QUERY = {**ONE_MODEL, "seconds": {**SECONDS, "description": "Wait of a restart for requests that cannot move."}}

LIVE_OPERATIONS: tuple[Operation, ...] = (
    admin("GET", live.ENGINES, "List engines.", live.EngineOverviews, INVALID, query=ONE_MODEL),
    admin("POST", live.ENGINES, ADD, EngineOverview, MEMBERS, body=live.NewEngineBody, status=201),
    admin("DELETE", live.ENGINE, REMOVE, Deleted, MEMBERS, query=ONE_MODEL),
    *(
        admin("POST", f"{live.ENGINE}/{action}", summary, EngineOverview, LANE, query=ENGINE_QUERY)
        for action, summary in ENGINE_SUMMARIES.items()
    ),
    admin("GET", live.LANES, "List lanes with queues, latencies and goals.", live.LaneStatuses, LANE, query=ONE_MODEL),
    *(
        admin("POST", f"{live.LANES}/{{lane}}/{action}", summary, LaneStatus, LANE, query=ONE_MODEL)
        for action, summary in SUMMARIES.items()
    ),
    admin("GET", live.REQUESTS, "List live requests of all gateway processes.", LiveRequests, LANE, query=ONE_MODEL),
    admin("POST", live.REQUESTS + "/{id}/cancel", "Cancel a live request.", live.CancelledRequest, REQUEST),
    admin("GET", live.OVERVIEW, "Get several sections of the overview.", live.Overview, LANE, query=SECTIONS),
    admin("GET", live.HISTORY, "Get key figures over time.", HistoryPoints, INVALID, query=HISTORY_QUERY),
    admin("GET", live.RECENT, "List recently ended requests.", live.RecentRequests, INVALID, query=RECENT_QUERY),
    Operation("GET", CONSOLE, "Get the console's page.", "anyone", "text/html"),
    Operation("GET", FILE, "Get a file of the console.", "anyone", "*/*", faults=frozenset({Fault.ROUTE_NOT_FOUND})),
)
REGISTRY = ENGINE | {Fault.INVALID_REQUEST, Fault.REGISTRY_UNAVAILABLE}
CHANGES = REGISTRY | {Fault.ADAPTER_EXISTS, Fault.ADAPTER_CONFLICT, Fault.ADAPTER_UNLOADED}


def _adapter(method: str, action: str, summary: str, answer: Any = AdapterStatus, **more: Any) -> Operation:
    path = "/admin/v1/adapters/{name:path}" + action
    return admin(method, path, summary, answer, CHANGES | MODEL, **more)


def _ping(method: str) -> Operation:
    return _readiness(method, "/ping", "Check readiness like /ready, on the path that SageMaker calls.")


def _readiness(method: str, path: str, summary: str) -> Operation:
    refused = {503: answers.Readiness}
    faults = MODEL | INVALID
    return Operation(method, path, summary, "anyone", answers.Readiness, faults=faults, other=refused, query=ONE_MODEL)


DRAIN = {
    "drain_seconds": {"type": "number", "minimum": 0, "maximum": MAX_DRAIN_SECONDS},
    "base_model": {"type": "string", "description": "Base model of the adapter, if two have one of this name."},
}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Create a chat completion.",
        "tenant",
        answers.ChatCompletion,
        bodies.ChatRequest,
        GENERATION,
        answers.ChatCompletionChunk,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Complete one or several prompts.",
        "tenant",
        answers.Completion,
        bodies.CompletionRequest,
        GENERATION,
        answers.Completion,
    ),
    *response_operations(GENERATION),
    *message_operations(GENERATION),
    *embeddings_operations(GENERATION),
    Operation(
        "POST",
        "/invocations",
        "Chat, complete, embed, rank or score, as the fields of the body say (SageMaker).",
        "tenant",
        answers.Invoked,
        Invocation,
        GENERATION,
        answers.Invoked,
    ),
    Operation("GET", "/v1/models", "List the models that the caller may use.", "tenant", answers.Models),
    Operation("GET", "/v1/models/{name:path}", "Get a model.", "tenant", answers.Model, faults=MODEL),
    Operation(
        "POST",
        "/tokenize",
        "Encode a text or a chat as token ids.",
        "tenant",
        answers.Tokens,
        bodies.TokenizeRequest,
        MODEL | {Fault.UNSUPPORTED_PARAMETER, Fault.RATE_LIMIT_EXCEEDED},
    ),
    Operation(
        "POST",
        "/detokenize",
        "Decode token ids.",
        "tenant",
        answers.Text,
        bodies.DetokenizeRequest,
        MODEL | {Fault.RATE_LIMIT_EXCEEDED},
    ),
    *FILE_OPERATIONS,
    *BATCH_OPERATIONS,
    admin("POST", "/v1/load_lora_adapter", "Load an adapter (vLLM).", TEXT, CHANGES, body=bodies.LoadAdapterRequest),
    admin(
        "POST",
        "/v1/unload_lora_adapter",
        "Unload an adapter (vLLM).",
        TEXT,
        CHANGES | MODEL,
        body=bodies.UnloadAdapterRequest,
    ),
    admin("GET", "/admin/v1/adapters", "List all adapters.", answers.Adapters, REGISTRY),
    admin("POST", "/admin/v1/adapters", "Load an adapter.", AdapterStatus, CHANGES, body=bodies.NativeLoadRequest),
    _adapter("POST", "/reload", "Reload an adapter from its source.", answers.Reloaded),
    _adapter("POST", "/pin", "Pin an adapter, so that it stays on the device."),
    _adapter("POST", "/unpin", "Unpin an adapter, so that it may be evicted."),
    _adapter("POST", "/aliases", "Add or remove an alias of an adapter.", body=bodies.AliasRequest),
    _adapter("POST", "/tenants", "Set the tenants that may use an adapter.", body=bodies.AllowRequest),
    _adapter("GET", "", "Get an adapter."),
    _adapter("DELETE", "", "Unload an adapter.", answers.Unloaded, query=DRAIN),
    admin(
        "GET", "/admin/v1/check", "Check engine integrity.", answers.Violations, frozenset({Fault.ENGINE_UNAVAILABLE})
    ),
    *ACCOUNT_OPERATIONS,
    *LIVE_OPERATIONS,
    Operation("GET", "/health", "Check that the process is alive.", "anyone", answers.Health),
    _readiness("GET", "/ready", "Check whether requests can be served, for some base model or for the named one."),
    _ping("GET"),
    _ping("POST"),
    Operation("GET", "/", "Get name, version and gRPC port; browsers get the console.", "anyone", answers.Root),
    Operation("GET", "/version", "Get the gateway's version.", "anyone", answers.Version),
    admin("GET", "/metrics", "Get Prometheus metrics, with an administrator's or a metrics key.", TEXT, frozenset()),
    Operation("GET", "/openapi.json", "Get this document.", "anyone", answers.OpenApi),
)
