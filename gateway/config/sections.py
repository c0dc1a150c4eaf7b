"""Sections of a gateway's configuration, named as in the YAML. They are frozen, and each validates its own values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gateway.config.webhooks import WebhookConfig
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.key_rules import NO_RULES, KeyRules
from gateway.core.limits import Policy
from gateway.core.networks import parse_networks
from gateway.core.safe_url import check_origins
from gateway.core.tenants import Tenant, key_id
from gateway.redis.address import store_address

URL_PREFIX = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://[A-Za-z0-9][A-Za-z0-9_./-]*/")
USERINFO = re.compile(r"//.*@")
"""Matches the user part of a URL, which may hold secrets and must not appear in messages."""
LOCAL_SCHEMES = frozenset(("file", "local"))
MAX_AUDIT_DAYS, MAX_AUDIT_ENTRIES = 3650, 10_000_000
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
    match = URL_PREFIX.fullmatch(value)
    if not match:
        shown = USERINFO.sub("//***@", value.partition("?")[0])
        raise ValueError(f"urls must be like s3://bucket/folder/, with the slash at the end, not {shown!r}")
    if match["scheme"] in LOCAL_SCHEMES:
        raise ValueError(f"urls cannot hold {value!r}: name the folder in roots")
    if match["scheme"] in WEB_SCHEMES:
        raise ValueError(f"urls cannot hold {value!r}: a web server can redirect to anywhere; use an object store")


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """Paths of the PEM files of a port that accepts TLS 1.2 and 1.3."""

    cert: Path
    """Certificate chain: the server's certificate, followed by the intermediate certificates up to its authority."""
    key: Path
    """Private key of the certificate, without a password."""
    client_ca: Path | None = None
    """Certificates of authorities. If set, each client must present a certificate that one of them has signed."""


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    roots: tuple[Path, ...] = ()
    """Folders below which adapters may be loaded at runtime, in addition to `adapters` in the data directory."""
    preload: Mapping[str, Path] = field(default_factory=dict)
    """Adapters to load at start: PEFT folders or GGUF files by served name."""
    chat_templates: Mapping[str, Path | None] = field(default_factory=dict)
    """Jinja files that render chats of preloaded adapters, by served name. None means the template in the adapter's own
    folder. Chats of other adapters are rendered with the base model's."""
    drain_seconds: float = 30.0
    """Seconds that running requests of an adapter that is unloaded have before they are aborted."""
    load_timeout_s: float = 300.0
    """Seconds that the engine may take to read an adapter."""
    hub: tuple[str, ...] = ()
    """Patterns of Hugging Face ids, such as `acme/*`, that may be fetched. If empty, the hub is never contacted."""
    urls: tuple[str, ...] = ()
    """Prefixes of fsspec URLs, such as `s3://bucket/adapters/`, below which adapters may be fetched."""
    cache: Path | None = None
    """Folder for fetched adapters. None means the folder `fetched` in the data directory."""
    fetch_timeout_s: float = 600.0
    """Seconds that the fetch of one adapter may take."""
    max_fetch_gb: float = 8.0
    """Maximum size of one fetched adapter, in GiB. Rank 256 on every projection of an 8B model takes 2.5 in bf16."""

    def __post_init__(self) -> None:
        _at_least(0, drain_seconds=self.drain_seconds)
        _positive(load_timeout_s=self.load_timeout_s, fetch_timeout_s=self.fetch_timeout_s)
        _positive(max_fetch_gb=self.max_fetch_gb)
        for url in self.urls:
            _url_prefix(url)


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """What the file says of a key beside the key."""

    label: str = ""
    rules: KeyRules = NO_RULES


@dataclass(frozen=True, slots=True)
class TenantConfig:
    tenant: Tenant
    """All fields of the tenant's section except its keys."""
    keys: tuple[str, ...] = ()
    """SHA-256 of each API key, in hex."""
    described: Mapping[str, KeyConfig] = field(default_factory=dict)
    """Labels and rules of those keys of which the file gives some, by SHA-256."""


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    when_redis_is_away: Policy = "degraded"
    """Policy while Redis is not reachable. With `degraded` each gateway grants its share of the limits, with `closed`
    requests get 503, and with `open` requests are not limited. A limit may override it in its own
    `when_redis_is_away`."""
    replicas: int = 1
    """Number of gateways that share one Redis. While Redis is away, each grants an equal share of every limit."""
    lease_seconds: float = 30.0
    """Seconds after which a request's lease expires unless its gateway renews it. When a gateway dies, its running
    requests stop counting against the limits after this time."""

    def __post_init__(self) -> None:
        _at_least(1, replicas=self.replicas, lease_seconds=self.lease_seconds)


@dataclass(frozen=True, slots=True)
class RedisConfig:
    url: str = field(default="", repr=False)
    """A redis://, rediss:// or unix:// URL, with commas between several hosts of a cluster, or
    redis+sentinel://HOST:26379,.../NAME for the primary NAME that Sentinels watch. If empty, the environment variable
    REDIS_URL is used, or, if that is not set, an embedded Valkey in the data directory."""
    cluster: bool = False
    """The servers at `url` are nodes of a Redis Cluster. One of them must answer to find the others."""
    timeout_ms: float = 50.0
    """Timeout of one call of the limiter, in milliseconds, while Redis is unavailable; 20 times as long otherwise."""
    key_prefix: str = "loralane:"

    def __post_init__(self) -> None:
        _at_least(1, timeout_ms=self.timeout_ms)
        if not self.url:
            return
        address = store_address(self.url)
        if self.cluster and (address.service or not address.nodes):
            raise ValueError("cluster needs a url that begins with redis:// or rediss://")
        if len(address.nodes) > 1 and not (self.cluster or address.service):
            raise ValueError("url has several hosts: set cluster: true, or begin it with redis+sentinel://")


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Limits and storage of uploaded files and of the batch jobs that use them."""

    storage: str = field(default="", repr=False)
    """Where file contents are stored: an fsspec URL, such as s3://bucket/loralane. Empty means a folder in the data
    directory."""
    max_file_bytes: int = 200 * 2**20
    """Maximum size of one upload."""
    max_lines: int = 50_000
    """Maximum number of lines of one job."""
    tenant_bytes: int = 10 * 2**30
    """Maximum bytes of all files of one tenant. Files that jobs write count towards it, but are never refused."""
    tenant_files: int = 10_000
    tenant_jobs: int = 100
    """Maximum number of open jobs of one tenant."""
    workers: bool = True
    """True means that this gateway works on jobs. If false, it accepts jobs and leaves the work to other gateways."""
    lease_s: float = 15.0
    """Seconds after which a lease on a piece of work expires unless its gateway renews it. When a gateway dies, other
    gateways take over its work after this time."""
    retention_days: float = 30.0
    """Days after its end at which the record of a job is deleted."""
    webhooks: Mapping[str, WebhookConfig] = field(default_factory=dict)
    """Webhook endpoints by tenant, which are notified when a batch has ended. They need the extra `webhooks`."""

    def __post_init__(self) -> None:
        if self.storage and "://" not in self.storage:
            raise ValueError(
                f"storage must be a URL, such as file:///srv/files or s3://bucket/folder, not {self.storage!r}"
            )
        _at_least(1, max_file_bytes=self.max_file_bytes, max_lines=self.max_lines, tenant_bytes=self.tenant_bytes)
        _at_least(1, tenant_files=self.tenant_files, tenant_jobs=self.tenant_jobs, lease_s=self.lease_s)
        _positive(retention_days=self.retention_days)


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """Storage of responses to /v1/responses, in Redis."""

    store: Literal["never", "on_request", "by_default"] = "on_request"
    """Responses that are stored: none, those whose requests say `store: true`, or, as at OpenAI, all but those whose
    requests say false."""
    keep_days: float = 30.0
    """Days after which a stored response is deleted."""
    tenant_bytes: int = 256 * 2**20
    """Maximum bytes of all stored responses of one tenant, which take as much memory of Redis."""

    def __post_init__(self) -> None:
        _at_least(1, tenant_bytes=self.tenant_bytes)
        _positive(keep_days=self.keep_days)


@dataclass(frozen=True, slots=True)
class HttpConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    """0 means any free port."""
    tls: TlsConfig | None = None
    """None means plain HTTP."""
    max_body_bytes: int = 8 * 2**20
    request_timeout_s: float = 600.0
    """Maximum seconds from a request's arrival to its last token. A client may ask for less."""
    first_token_timeout_s: float = 120.0
    engine_wait_s: float = 60.0
    """Seconds that a request waits for the next engine process each time that an engine process ends; then it gets
    503."""
    drain_seconds: float | None = None
    """Seconds that running requests have to end after SIGTERM, which an orchestrator should give the process, and 20 s
    more. None means `request_timeout_s`, in which every request ends by itself."""
    keep_alive_s: float = 75.0
    """Seconds after which an idle connection is closed. It should be longer than a proxy in front keeps connections."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API, except for administration. A port of `*` matches any port."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks, as CIDR, of proxies in front of the gateway, whose X-Forwarded-For (over gRPC: x-forwarded-for) says
    where a request comes from, for keys with `networks`. Other peers' header is ignored."""

    def __post_init__(self) -> None:
        _port(self.port)
        parse_networks(self.trusted_proxies)
        check_origins(self.cors_origins)
        _at_least(1, max_body_bytes=self.max_body_bytes)
        _positive(keep_alive_s=self.keep_alive_s)
        _positive(request_timeout_s=self.request_timeout_s, first_token_timeout_s=self.first_token_timeout_s)
        _positive(engine_wait_s=self.engine_wait_s)
        _at_least(0, drain_seconds=self.drain)

    @property
    def drain(self) -> float:
        """Seconds that running requests have to end after SIGTERM."""
        return self.request_timeout_s if self.drain_seconds is None else self.drain_seconds


@dataclass(frozen=True, slots=True)
class GrpcConfig:
    host: str = "127.0.0.1"
    port: int = 50051
    """0 means any free port."""
    tls: TlsConfig | None = None
    """None means gRPC without TLS."""

    def __post_init__(self) -> None:
        _port(self.port)


@dataclass(frozen=True, slots=True)
class ConfiguredAdmin:
    """An administrator of the configuration, with the SHA-256 of the key in hex."""

    administrator: Administrator
    key: str


@dataclass(frozen=True, slots=True)
class AdminConfig:
    keys: tuple[str, ...] = ()
    """SHA-256, in hex, of each key of an owner without a name. If there are neither these nor `administrators`, only
    administrators that were made live may call the admin API."""
    administrators: Mapping[str, ConfiguredAdmin] = field(default_factory=dict)
    """Administrators by name, each with a role."""
    metrics_keys: tuple[str, ...] = ()
    """SHA-256, in hex, of each key that may read /metrics and do nothing else."""
    open_metrics: bool | Literal["no_tenants"] = False
    """How much of /metrics a request without a key may read: all of it (true), nothing (false), or all without the
    breakdown by tenant (`no_tenants`)."""
    port: int | None = None
    """HTTP port for the admin API, the console and /metrics, which `http.port` then no longer serves. 0 means any free
    port. None means that `http.port` serves them."""
    grpc_port: int | None = None
    """gRPC port for the admin services, which `grpc.port` then no longer serves. 0 means any free port."""
    host: str = "127.0.0.1"
    """Host of `port` and `grpc_port`."""
    tls: TlsConfig | None = None
    """TLS of `port` and `grpc_port`. None means that they have no TLS."""

    def __post_init__(self) -> None:
        if (self.port is None) != (self.grpc_port is None):
            raise ValueError("port and grpc_port go together: administration would be left at a public port")
        for port in (self.port, self.grpc_port):
            _port(port or 0)
        if self.administrators and not any(administrator.is_owner for administrator, _ in self.seeds()):
            raise ValueError("administrators: one must have the role owner and no tenant, or admin.keys a key")

    def seeds(self) -> list[tuple[Administrator, str]]:
        """Return all configured administrators, each with the SHA-256 of the key. Owners without a name are named after
        the key's id."""
        owners = [(Administrator(f"key-{key_id(key)}", AdminRole.OWNER), key) for key in self.keys]
        return owners + [(entry.administrator, entry.key) for entry in self.administrators.values()]


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """How much of the audit log is kept: what is older than `days`, or beyond `entries`, is dropped."""

    days: int = 365
    entries: int = 100_000

    def __post_init__(self) -> None:
        if not 1 <= self.days <= MAX_AUDIT_DAYS:
            raise ValueError(f"days must be from 1 to {MAX_AUDIT_DAYS}, not {self.days}")
        if not 1 <= self.entries <= MAX_AUDIT_ENTRIES:
            raise ValueError(f"entries must be from 1 to {MAX_AUDIT_ENTRIES}, not {self.entries}")


@dataclass(frozen=True, slots=True)
class TracesConfig:
    endpoint: str = ""
    """Base URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318, which needs the extra `otel`. Empty means that
    no traces are sent."""
    ratio: float = 1.0
    """Share of requests that are traced, from 0 to 1, among those without a decision of the caller in `traceparent`."""

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must begin with http:// or https://, not {self.endpoint!r}")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be between 0 and 1, not {self.ratio}")


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    request_log: bool = True
    """True means that the gateway writes one JSON line per request to standard output."""
    traces: TracesConfig = TracesConfig()
