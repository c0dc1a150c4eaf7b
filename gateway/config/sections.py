"""Sections of a gateway's configuration: frozen, each validated by itself, section for section as in the YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, LaneGoals
from engine.core.types import Lane
from gateway.config.tls import TlsConfig
from gateway.config.webhooks import WebhookConfig
from gateway.core.limits import Policy
from gateway.core.origins import check_origins
from gateway.core.tenants import Tenant
from gateway.tools.dialects import ToolParserName

URL_PREFIX = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://[A-Za-z0-9][A-Za-z0-9_./-]*/")
USERINFO = re.compile(r"//.*@")
"""Where a URL has its secrets, which no message may repeat."""
LOCAL_SCHEMES = frozenset(("file", "local"))
WEB_SCHEMES = frozenset(("http", "https", "ftp", "webdav", "webhdfs"))


def _port(value: int) -> None:
    if not 0 <= value <= 65535:
        raise ValueError(f"port must be between 0 and 65535, not {value}")


def _at_least(minimum: int, **values: float) -> None:
    for name, value in values.items():
        if not value >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, not {value}")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value}")


def _url_prefix(value: str) -> None:
    found = URL_PREFIX.fullmatch(value)
    if not found:
        shown = USERINFO.sub("//***@", value.partition("?")[0])
        raise ValueError(f"urls must be like s3://bucket/folder/, with the slash at the end, not {shown!r}")
    if found["scheme"] in LOCAL_SCHEMES:
        raise ValueError(f"urls cannot hold {value!r}: name the folder in roots")
    if found["scheme"] in WEB_SCHEMES:
        raise ValueError(f"urls cannot hold {value!r}: a web server can redirect to anywhere; use an object store")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The base model."""

    source: str = "embedded"
    """A model folder, a GGUF file, a Hugging Face id, or `embedded`: the small one that comes with the package."""
    name: str = ""
    """What clients call it; empty: the last part of the source's own name."""
    chat_template: Path | None = None
    """A Jinja file to render chats with; None means the template that comes with the model."""
    tool_parser: ToolParserName = "auto"
    """How the model writes tool calls: hermes or llama3; none: calls are not read; auto: as its chat template does."""


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    roots: tuple[Path, ...] = ()
    """Folders below which adapters may be loaded while running, beside `adapters` in the data directory."""
    preload: Mapping[str, Path] = field(default_factory=dict)
    """Served name -> PEFT folder, loaded at start."""
    drain_seconds: float = 30.0
    """How long an unloaded adapter's requests may go on before they are aborted."""
    load_timeout_s: float = 300.0
    """How long the engine may take to read an adapter."""
    hub: tuple[str, ...] = ()
    """Patterns of Hugging Face ids, such as `acme/*`, that may be fetched from the hub; none: it is never asked."""
    urls: tuple[str, ...] = ()
    """Beginnings of fsspec URLs, such as `s3://bucket/adapters/`, below which adapters may be fetched."""
    cache: Path | None = None
    """Folder for what is fetched; None: in the data directory."""
    fetch_timeout_s: float = 600.0
    """How long one adapter may take to be fetched."""
    max_fetch_gb: float = 8.0
    """Size of one fetched adapter, in GiB: rank 256 on every projection of an 8B model has 2.5 in bf16."""

    def __post_init__(self) -> None:
        _at_least(0, drain_seconds=self.drain_seconds)
        _positive(load_timeout_s=self.load_timeout_s, fetch_timeout_s=self.fetch_timeout_s)
        _positive(max_fetch_gb=self.max_fetch_gb)
        for url in self.urls:
            _url_prefix(url)


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """How much of a lane is let in, and what it promises: the goals are the engine's LaneGoals, field for field."""

    max_requests: int
    """Answers of this lane in the gateway at once, waiting and running: a request with `n: 4` counts four. Tenants
    share them by weight; a request that does not fit is refused with lane_queue_full."""
    ttft_s: float
    itl_s: float
    attainment: float
    max_wait_s: float

    def __post_init__(self) -> None:
        _at_least(1, max_requests=self.max_requests)
        self.goals()  # which refuses what is out of range

    def goals(self) -> LaneGoals:
        return LaneGoals(self.ttft_s, self.itl_s, self.attainment, self.max_wait_s)


@dataclass(frozen=True, slots=True)
class InteractiveLane(LaneConfig):
    max_requests: int = 1000
    ttft_s: float = INTERACTIVE_GOALS.ttft_s
    itl_s: float = INTERACTIVE_GOALS.itl_s
    attainment: float = INTERACTIVE_GOALS.attainment
    max_wait_s: float = INTERACTIVE_GOALS.max_wait_s


@dataclass(frozen=True, slots=True)
class BatchLane(LaneConfig):
    max_requests: int = 10_000
    ttft_s: float = BATCH_GOALS.ttft_s
    itl_s: float = BATCH_GOALS.itl_s
    attainment: float = BATCH_GOALS.attainment
    max_wait_s: float = BATCH_GOALS.max_wait_s


@dataclass(frozen=True, slots=True)
class LanesConfig:
    interactive: InteractiveLane = InteractiveLane()
    batch: BatchLane = BatchLane()

    def of(self, lane: Lane) -> LaneConfig:
        return self.interactive if lane is Lane.INTERACTIVE else self.batch


@dataclass(frozen=True, slots=True)
class TenantConfig:
    tenant: Tenant
    """Every other field of the tenant's section."""
    keys: tuple[str, ...] = ()
    """SHA-256 of each, in hex."""


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    when_redis_is_away: Policy = "degraded"
    """degraded: each gateway keeps to its share. closed: requests get 503. open: requests are not limited. A limit that
    names its own in its `when_redis_is_away` follows that."""
    replicas: int = 1
    """Gateways sharing one Redis; while it is away each grants this fraction of every limit."""
    lease_seconds: float = 30.0
    """After which requests under way in a gateway that died no longer count as such; renewed while they run."""

    def __post_init__(self) -> None:
        _at_least(1, replicas=self.replicas, lease_seconds=self.lease_seconds)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    url: str = field(default="", repr=False)
    """redis://, rediss:// or unix://; empty: REDIS_URL if set, else an embedded Valkey in the data directory."""
    cluster: bool = False
    """The server at `url` is a node of a Redis Cluster."""
    timeout_ms: float = 50.0
    """Of one limiter call."""
    key_prefix: str = "loralane:"

    def __post_init__(self) -> None:
        _at_least(1, timeout_ms=self.timeout_ms)
        if self.cluster and self.url.startswith("unix://"):
            raise ValueError("cluster needs a url that begins with redis:// or rediss://")
        if self.url and not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("url must begin with redis://, rediss:// or unix://")
        try:
            urlsplit(self.url).port  # noqa: B018 - raises, in words that may be a part of the password
        except ValueError:
            raise ValueError(
                "url has no valid port; what a password has of /, ?, # and @ is written as %2F ..."
            ) from None


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Files, and the jobs made of them."""

    storage: str = field(default="", repr=False)
    """Where their bytes are kept: an fsspec URL, as in s3://bucket/loralane; empty: a folder in the data directory."""
    max_file_bytes: int = 200 * 2**20
    """Of one upload."""
    max_lines: int = 50_000
    """Of one job."""
    tenant_bytes: int = 10 * 2**30
    """Of all files of one tenant; what jobs have written counts, but is never refused."""
    tenant_files: int = 10_000
    tenant_jobs: int = 100
    """Of one tenant, open at once."""
    workers: bool = True
    """false: this gateway takes jobs in and leaves the work to others."""
    lease_s: float = 15.0
    """After which work of a gateway that died is taken over; renewed while it works."""
    retention_days: float = 30.0
    """How long a job is remembered after its end."""
    webhooks: Mapping[str, WebhookConfig] = field(default_factory=dict)
    """Tenant -> where it is told that a batch has ended. Needs the extra `webhooks`."""

    def __post_init__(self) -> None:
        if self.storage and "://" not in self.storage:
            raise ValueError(
                f"storage must be a URL, such as file:///srv/files or s3://bucket/folder, not {self.storage!r}"
            )
        _at_least(1, max_file_bytes=self.max_file_bytes, max_lines=self.max_lines, tenant_bytes=self.tenant_bytes)
        _at_least(1, tenant_files=self.tenant_files, tenant_jobs=self.tenant_jobs, lease_s=self.lease_s)
        _positive(retention_days=self.retention_days)


@dataclass(frozen=True, slots=True)
class HttpConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    tls: TlsConfig | None = None
    """None: plain HTTP."""
    max_body_bytes: int = 8 * 2**20
    request_timeout_s: float = 600.0
    """From arrival to the last token, unless the client asks for less."""
    first_token_timeout_s: float = 120.0
    engine_wait_s: float = 60.0
    """A request may be without an engine process for so long, each time that one ends."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API; a port of `*` stands for any. Administration is excluded."""

    def __post_init__(self) -> None:
        _port(self.port)
        check_origins(self.cors_origins)
        _at_least(1, max_body_bytes=self.max_body_bytes)
        _positive(request_timeout_s=self.request_timeout_s, first_token_timeout_s=self.first_token_timeout_s)
        _positive(engine_wait_s=self.engine_wait_s)


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    host: str = "127.0.0.1"
    port: int = 50051
    """0: any free one."""
    tls: TlsConfig | None = None
    """None: plain gRPC."""

    def __post_init__(self) -> None:
        _port(self.port)


@dataclass(frozen=True, slots=True)
class AdminConfig:
    keys: tuple[str, ...] = ()
    """SHA-256 of each, in hex; without any, nobody may use the admin API."""
    metrics_keys: tuple[str, ...] = ()
    """SHA-256 of keys that may read /metrics and do nothing else."""
    open_metrics: bool | Literal["no_tenants"] = False
    """What /metrics tells a request without a key: all of it, nothing, or all but which tenant uses what."""
    port: int | None = None
    """Of HTTP for administrators, with the console and /metrics, which `http.port` then has no more; 0: any free one;
    None: they share `http.port`."""
    grpc_port: int | None = None
    """The same for the admin services of gRPC."""
    host: str = "127.0.0.1"
    """Of both."""
    tls: TlsConfig | None = None
    """Of both; None: plain."""

    def __post_init__(self) -> None:
        if (self.port is None) != (self.grpc_port is None):
            raise ValueError("port and grpc_port go together: administration would be left at a public port")
        for port in (self.port, self.grpc_port):
            _port(port or 0)


@dataclass(frozen=True, slots=True)
class TracesConfig:
    endpoint: str = ""
    """Base URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318; empty: no traces. Needs the extra `otel`."""
    ratio: float = 1.0
    """Share of requests that are traced, of those whose caller has not decided by `traceparent`."""

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must begin with http:// or https://, not {self.endpoint!r}")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be between 0 and 1, not {self.ratio}")


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    request_log: bool = True
    """One JSON line a request on standard output."""
    traces: TracesConfig = TracesConfig()
