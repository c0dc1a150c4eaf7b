"""All operations of the HTTP API, with their request bodies, responses and errors."""

from __future__ import annotations

from typing import Any

from gateway.adapters.record import MAX_DRAIN_SECONDS
from gateway.adapters.status import AdapterStatus
from gateway.core.errors import Fault
from gateway.http import operations as live
from gateway.http.console import CONSOLE, FILE
from gateway.http.openapi import answers
from gateway.http.openapi.accounts import ACCOUNT_OPERATIONS
from gateway.http.openapi.batches import BATCH_OPERATIONS
from gateway.http.openapi.files import FILE_OPERATIONS
from gateway.http.openapi.operation import TEXT, Operation, admin
from gateway.observe.history import MAX_MINUTES, HistoryPoints
from gateway.observe.operations import LaneStatus, LiveRequests
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
    Fault.DEADLINE_EXCEEDED,
}
ENGINE = frozenset({Fault.ENGINE_UNAVAILABLE})
LANE = ENGINE | {Fault.INVALID_REQUEST}
REQUEST = LANE | {Fault.REQUEST_NOT_FOUND}
SECTIONS = {"sections": {"type": "string", "examples": ["engine,lanes,requests,tenants,adapters"]}}

INVALID = frozenset({Fault.INVALID_REQUEST})
HISTORY_QUERY = {"minutes": {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES}}
RECENT_QUERY = {
    "which": {"enum": list(live.WHICH), "description": "failed: those with a status of 400 or more, but not 499."},
    "limit": {"type": "integer", "minimum": 1, "maximum": KEPT},
}
SUMMARIES = {
    "pause": "Start nothing of it: what runs goes on, what comes waits.",
    "drain": "Take nothing new: what was taken goes on to its end.",
    "resume": "Serve it as ever.",
}

LIVE_OPERATIONS: tuple[Operation, ...] = (
    admin("GET", live.LANES, "All lanes: depth, waits, latencies, goals met.", live.LaneStatuses, ENGINE),
    *(
        admin("POST", f"{live.LANES}/{{lane}}/{action}", summary, LaneStatus, LANE)
        for action, summary in SUMMARIES.items()
    ),
    admin("GET", live.REQUESTS, "Live requests of every gateway process.", LiveRequests, ENGINE),
    admin("POST", live.REQUESTS + "/{id}/cancel", "End one.", live.CancelledRequest, REQUEST),
    admin("GET", live.OVERVIEW, "Several lists at once, for a console.", live.Overview, LANE, query=SECTIONS),
    admin("GET", live.HISTORY, "Figures of the last hours.", HistoryPoints, INVALID, query=HISTORY_QUERY),
    admin("GET", live.RECENT, "Requests that have ended.", live.RecentRequests, INVALID, query=RECENT_QUERY),
    Operation("GET", CONSOLE, "The console: a page without data.", "anyone", "text/html"),
    Operation("GET", FILE, "Its files.", "anyone", "*/*", faults=frozenset({Fault.ROUTE_NOT_FOUND})),
)
REGISTRY = ENGINE | {Fault.INVALID_REQUEST, Fault.REGISTRY_UNAVAILABLE}
CHANGES = REGISTRY | {Fault.ADAPTER_EXISTS, Fault.ADAPTER_CONFLICT}


def _adapter(method: str, action: str, summary: str, answer: Any = AdapterStatus, **more: Any) -> Operation:
    path = "/admin/v1/adapters/{name:path}" + action
    return admin(method, path, summary, answer, CHANGES | MODEL, **more)


def _ping(method: str) -> Operation:
    summary = "The same as /ready, where SageMaker looks for it."
    return Operation(method, "/ping", summary, "anyone", answers.Readiness, other={503: answers.Readiness})


DRAIN = {"drain_seconds": {"type": "number", "minimum": 0, "maximum": MAX_DRAIN_SECONDS}}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a chat.",
        "tenant",
        answers.ChatCompletion,
        bodies.ChatRequest,
        GENERATION,
        answers.ChatCompletionChunk,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Continue a text, or several.",
        "tenant",
        answers.Completion,
        bodies.CompletionRequest,
        GENERATION,
        answers.Completion,
    ),
    Operation("GET", "/v1/models", "The models a key may name.", "tenant", answers.Models),
    Operation("GET", "/v1/models/{name:path}", "One model.", "tenant", answers.Model, faults=MODEL),
    Operation(
        "POST",
        "/tokenize",
        "The token ids of a text or a chat.",
        "tenant",
        answers.Tokens,
        bodies.TokenizeRequest,
        MODEL | {Fault.UNSUPPORTED_PARAMETER},
    ),
    Operation("POST", "/detokenize", "The text of token ids.", "tenant", answers.Text, bodies.DetokenizeRequest, MODEL),
    *FILE_OPERATIONS,
    *BATCH_OPERATIONS,
    admin("POST", "/v1/load_lora_adapter", "Load, as vLLM has it.", TEXT, CHANGES, body=bodies.LoadAdapterRequest),
    admin(
        "POST",
        "/v1/unload_lora_adapter",
        "Unload, as vLLM has it.",
        TEXT,
        CHANGES | MODEL,
        body=bodies.UnloadAdapterRequest,
    ),
    admin("GET", "/admin/v1/adapters", "All adapters.", answers.Adapters, REGISTRY),
    admin("POST", "/admin/v1/adapters", "Load.", AdapterStatus, CHANGES, body=bodies.NativeLoadRequest),
    _adapter("POST", "/reload", "Read its files again.", answers.Reloaded),
    _adapter("POST", "/pin", "Keep it on the device."),
    _adapter("POST", "/unpin", "Let it make room."),
    _adapter("POST", "/aliases", "Give it another name, or take one away.", body=bodies.AliasRequest),
    _adapter("POST", "/tenants", "Say which tenants it is for.", body=bodies.AllowRequest),
    _adapter("GET", "", "One adapter."),
    _adapter("DELETE", "", "Unload.", answers.Unloaded, query=DRAIN),
    admin(
        "GET", "/admin/v1/check", "The engine's integrity.", answers.Violations, frozenset({Fault.ENGINE_UNAVAILABLE})
    ),
    *ACCOUNT_OPERATIONS,
    *LIVE_OPERATIONS,
    Operation("GET", "/health", "The process is alive.", "anyone", answers.Health),
    Operation(
        "GET",
        "/ready",
        "Requests can be served; what they depend on.",
        "anyone",
        answers.Readiness,
        other={503: answers.Readiness},
    ),
    _ping("GET"),
    _ping("POST"),
    Operation("GET", "/", "Name, version and gRPC port; browsers are sent to the console.", "anyone", answers.Root),
    Operation("GET", "/version", "The version that runs.", "anyone", answers.Version),
    admin("GET", "/metrics", "Metrics for Prometheus; keys for nothing else may read them too.", TEXT, frozenset()),
    Operation("GET", "/openapi.json", "This document.", "anyone", answers.OpenApi),
)
