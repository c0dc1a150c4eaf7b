"""Models, health and versions: what anyone or any tenant may ask of a gateway, and the operations."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from gateway.api_schema.common import INVALID, MODEL, ONE_MODEL
from gateway.api_schema.operation import TEXT, Operation, admin


class Model(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    weights: str = ""
    """Format of the base model's weights, such as Q4_K+Q6_K, gptq-4bit-g128, int8 or bf16."""
    default_sampling_params: dict[str, float] = {}
    """Sampling parameters of requests that do not set them, where the model has defaults, and `max_tokens`, its bound
    of every answer."""
    chat_template: str = "model"
    """What renders chats: `model` is the template of the base model, `auto` the one in the adapter's folder, and
    `given` one that an operator sent."""


class Models(Struct):
    object: Literal["list"]
    data: list[Model]


class Health(Struct):
    status: Literal["ok"]


class Readiness(Struct):
    status: Literal["ready", "degraded", "not_ready"]
    """`degraded` means that some base models can be served and others cannot."""
    reason: str | None
    """Reason why requests for some or all models cannot be served now, why Redis does not serve, or a warning that
    Redis may evict keys; null if there is none of these."""
    engine: bool
    """True if the engines of all base models, or of the one asked about, are connected and make progress."""
    models: dict[str, str | None]
    """Reason why the engine of a base model cannot serve requests now, by the model's name; null where it can."""
    redis: bool
    limiter: str
    limiter_modes: list[str]


class Version(Struct):
    version: str


class GrpcPort(Struct):
    port: int
    tls: bool


class Root(Struct):
    name: str
    version: str
    grpc: GrpcPort | None
    """The gRPC port of this gateway process; null if it does not serve gRPC."""


class OpenApi(Struct):
    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


def _readiness(method: str, path: str, summary: str) -> Operation[Readiness]:
    refused, faults = {503: Readiness}, MODEL | INVALID
    return Operation(method, path, summary, "anyone", Readiness, faults=faults, other=refused, query=ONE_MODEL)


LIST_MODELS = Operation("GET", "/v1/models", "List the models that the caller may use.", "tenant", Models)
GET_MODEL = Operation("GET", "/v1/models/{name:path}", "Get a model.", "tenant", Model, faults=MODEL)
HEALTH = Operation("GET", "/health", "Check that the process is alive.", "anyone", Health)
READY = _readiness("GET", "/ready", "Check whether requests can be served, for some base model or for the named one.")
PING, POST_PING = (
    _readiness(method, "/ping", "Check readiness like /ready, on the path that SageMaker calls.")
    for method in ("GET", "POST")
)
ROOT = Operation("GET", "/", "Get name, version and gRPC port; browsers get the console.", "anyone", Root)
VERSION = Operation("GET", "/version", "Get the gateway's version.", "anyone", Version)
METRICS = admin(
    "GET", "/metrics", "Get Prometheus metrics, with an administrator's or a metrics key.", TEXT, frozenset()
)
OPENAPI = Operation("GET", "/openapi.json", "Get this document.", "anyone", OpenApi)

OPERATIONS: tuple[Operation[Any], ...] = (HEALTH, READY, PING, POST_PING, ROOT, VERSION, METRICS, OPENAPI)
