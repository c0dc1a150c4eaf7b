"""The complete configuration of a gateway and its engine. It is read from YAML, or is that of the demo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

from engine.config import EngineConfig
from engine.demo import CHAT_TEMPLATE, DEMO_ADAPTERS
from engine.rpc.target import EngineTls, is_loopback
from gateway.config.cluster import ClusterConfig, RayConfig
from gateway.config.engine_section import read_engine, read_engines
from gateway.config.file import (
    ConfigError,
    Problems,
    as_mapping,
    check_keys,
    convert,
    read_yaml,
    resolve,
)
from gateway.config.keys import DEMO_HASHES, DEMO_KEYS, read_admin, read_tenants
from gateway.config.lanes import LanesConfig
from gateway.config.models import (
    EnginesConfig,
    ModelConfig,
    ModelSettings,
    check_alone,
    check_kv_places,
    check_preloads,
    read_models,
    served_name,
)
from gateway.config.routes import check_routes, read_routes
from gateway.config.sections import (
    AdaptersConfig,
    AdminConfig,
    BatchesConfig,
    GrpcConfig,
    HttpConfig,
    LimitsConfig,
    ObservabilityConfig,
    RedisConfig,
    ResponsesConfig,
    TenantConfig,
)
from gateway.config.upstreams import UpstreamConfig, check_upstreams
from gateway.core.billing import BillingConfig
from gateway.core.limits import Limits
from gateway.core.safe_url import LOOPBACK
from gateway.core.tenants import ADMIN_TENANT, Principal, Tenant, hash_key, key_id
from gateway.virtual_models.policy import Policy

MAX_GATEWAYS = 16
"""Maximum of `gateways`. Each gateway occupies one thread of the engine's server for its session, and up to four more
while adapters are loaded."""
IN_SECTION: Mapping[str, str] = {"engines": "engine"}
"""Section of the file from which a field of `Config` is read, for each field that is not named after its section."""


@dataclass(frozen=True, slots=True)
class Config:
    """The complete, valid configuration: all sections of the file. Raises ConfigError for `gateways` out of range, for
    a key of two owners, and for a demo key if a port is open beyond loopback."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(model=""))
    """How one engine works, from the section `engine` of the file."""
    engines: EnginesConfig = field(default_factory=EnginesConfig)
    """Which engines the gateway uses, from the same section."""
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    """The section `models`: several base models, by name, in the order of the file. If it is empty, `model`, `engine`,
    `engines`, `lanes` and `adapters.preload` describe the only one."""
    routes: Mapping[str, Policy] = field(default_factory=dict)
    """Virtual models: the policies that choose their members, by the names that clients use."""
    upstreams: Mapping[str, UpstreamConfig] = field(default_factory=dict)
    """Servers elsewhere that may be members of virtual models, by name."""
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    lanes: LanesConfig = field(default_factory=LanesConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    billing: BillingConfig = field(default_factory=BillingConfig)
    redis: RedisConfig = field(default_factory=RedisConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    grpc: GrpcConfig = field(default_factory=GrpcConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    gateways: int = 1
    """Gateway processes that share the ports, the engine and Redis."""

    def __post_init__(self) -> None:
        if not 1 <= self.gateways <= MAX_GATEWAYS:
            raise ConfigError(f"gateways: must be from 1 to {MAX_GATEWAYS}, not {self.gateways}")
        check_preloads(
            self.served, {name: f"models.{name}.adapters" if self.models else "adapters" for name in self.served}
        )
        if unknown := sorted(self.adapters.chat_templates.keys() - self.preloaded().keys()):
            raise ConfigError(f"adapters.chat_templates.{unknown[0]}: is no adapter of a preload")
        check_upstreams(self.upstreams, {*self.served, *self.preloaded()}, has_prices=bool(self.billing.prices))
        check_routes(self.routes, self.served, self.upstreams)
        self._check_keys()
        sections = {name: f"models.{name}.engine" if self.models else "engine" for name in self.served}
        for name, settings in self.served.items():
            settings.engines.check_ray(self.cluster.ray, sections[name])
        check_kv_places(self.served, sections)

    @property
    def served(self) -> Mapping[str, ModelSettings]:
        """The settings of each base model by the name that clients use, the default model first."""
        if self.models:
            return self.models
        model = replace(self.model, name=self.model.name or served_name(self.model.source))
        return {model.name: ModelSettings(model, self.engine, self.engines, self.lanes, self.adapters.preload)}

    @property
    def pricing(self) -> BillingConfig:
        """The section `billing`, with the upstreams' prices before the others."""
        upstream_prices = [
            upstream.price.for_usage(name) for name, upstream in self.upstreams.items() if upstream.price
        ]
        return replace(self.billing, prices=(*upstream_prices, *self.billing.prices))

    def ray_of(self, model: str) -> RayConfig | None:
        """Return how Ray runs the engines of a base model; None means that it runs none."""
        return self.served[model].engines.on_ray(self.cluster.ray)

    @property
    def engine_tls(self) -> Mapping[str, EngineTls | None]:
        """The TLS files for connections to the engines of each base model, by the model's name; None means no TLS."""
        return {name: settings.engines.tls for name, settings in self.served.items()}

    def _check_keys(self) -> None:
        owners = [(entry.tenant.name, key) for entry in self.tenants.values() for key in entry.keys]
        owners += [("admin", key) for key in self.admin.keys]
        owners += [("admin.metrics_keys", key) for key in self.admin.metrics_keys]
        first: dict[str, str] = {}
        for owner, key in owners:
            if first.setdefault(key, owner) != owner:
                raise ConfigError(f"tenants: {first[key]} and {owner} share a key")
            for section, host in self._hosts():
                if key in DEMO_HASHES and not is_loopback(host):
                    raise ConfigError(f"{section}.host: {host} would offer demo keys to others; use keys of your own")

    def _hosts(self) -> list[tuple[str, str]]:
        """Return (section, host) for each section that has listening ports."""
        hosts = [("http", self.http.host), ("grpc", self.grpc.host)]
        return hosts if self.admin.port is None else [*hosts, ("admin", self.admin.host)]

    @property
    def default_model(self) -> ModelSettings:
        """The settings of the first base model."""
        return next(iter(self.served.values()))

    def section_of(self, model: str) -> str:
        """Return the section of the file that describes a base model, for messages."""
        return f"models.{model}" if self.models else "model"

    def preloaded(self) -> dict[str, Path]:
        """Return the folders of the adapters to load at start, for all base models, by the adapters' names."""
        return {name: path for settings in self.served.values() for name, path in settings.preload.items()}

    def preload_place(self, adapter: str) -> str:
        """Return the place in the file of an adapter to load at start, for messages."""
        owner = [f"models.{name}." for name, settings in self.models.items() if adapter in settings.preload]
        return f"{''.join(owner)}adapters.preload.{adapter}"

    def with_served(self, change: Callable[[str, ModelSettings], ModelSettings]) -> Config:
        """Return a copy in which the lanes and preloaded adapters of each base model are those that `change` returns
        for the model's name and settings."""
        changed = {name: change(name, settings) for name, settings in self.served.items()}
        loaded = {name for settings in changed.values() for name in settings.preload}
        templates = {name: file for name, file in self.adapters.chat_templates.items() if name in loaded}
        adapters = replace(self.adapters, chat_templates=templates)
        if self.models:
            return replace(self, models=changed, adapters=adapters)
        only = next(iter(changed.values()))
        return replace(self, lanes=only.lanes, adapters=replace(adapters, preload=only.preload))

    def admins(self) -> dict[str, Principal]:
        """Return a principal for each admin key, by the SHA-256 of the key."""
        return {key: Principal(ADMIN_TENANT, key_id(key), is_admin=True) for key in self.admin.keys}


def load_config(path: Path | None, env: Mapping[str, str]) -> Config:
    """Read and validate the configuration in a YAML file; return that of the demo if `path` is None. Raises
    ConfigError, whose message names the place of each problem, one per line.

    Variables of `env` replace ${NAME} references; REDIS_URL in `env` applies if there is no redis.url. Relative
    paths in the file start from the file's folder.
    """
    config = demo_config() if path is None else parse_config(read_yaml(path), env, path.resolve().parent)
    if config.redis.url or not env.get("REDIS_URL"):
        return config
    return replace(config, redis=replace(config.redis, url=env["REDIS_URL"]))


def parse_config(document: Mapping[str, Any], env: Mapping[str, str], base: Path) -> Config:
    """Convert a parsed YAML document to a `Config`, with ${NAME} references replaced from `env` and relative paths from
    the folder `base`. Raises ConfigError with all problems of the sections or, if there are none, with the first
    contradiction between them."""
    problems, kinds = Problems(), get_type_hints(Config)
    sections: dict[str, Any] = {}
    with problems.noting():
        check_keys(document, [name for name in kinds if name != "engines"], "")
    with problems.noting():
        _check_secrets(document)
    with problems.noting():
        check_alone(document)
    special: Mapping[str, Callable[..., Any]] = {
        "engine": read_engine,
        "engines": read_engines,
        "routes": read_routes,
        "tenants": read_tenants,
        "admin": read_admin,
    }
    with problems.noting():
        if "models" in document:
            sections["models"] = _models(document, env, base)
    for name in (name for name in kinds if name != "models" and (name in document or name in special)):
        with problems.noting():
            if name in special:
                sections[name] = special[name](document.get(IN_SECTION.get(name, name)), env, base)
            else:
                sections[name] = convert(resolve(document[name], env, name), kinds[name], name, base)
    problems.raise_all()
    return Config(**sections)


def _models(document: Mapping[str, Any], env: Mapping[str, str], base: Path) -> dict[str, ModelSettings]:
    def engine(value: Any, where: str) -> tuple[EngineConfig, EnginesConfig]:
        return read_engine(value, env, base, where), read_engines(value, env, base, where)

    lanes = resolve(document.get("lanes"), env, "lanes")
    return read_models(resolve(document["models"], env, "models"), lanes, base, engine)


def demo_config() -> Config:
    """Return the demo's configuration, which is used without a file. configs/demo.yaml is its YAML form."""
    acme = Tenant("acme", limits=Limits(1_000_000, 1_000_000_000))
    globex = Tenant("globex", limits=Limits(600, 200_000))
    return Config(
        model=ModelConfig(chat_template=CHAT_TEMPLATE.resolve()),
        adapters=AdaptersConfig(preload={name: path.resolve() for name, path in DEMO_ADAPTERS.items()}),
        tenants={
            tenant.name: TenantConfig(tenant, (hash_key(key),))
            for tenant, key in zip((acme, globex), DEMO_KEYS[:2], strict=True)
        },
        responses=ResponsesConfig("by_default"),  # because clients such as the AI SDK expect it without asking
        http=HttpConfig(cors_origins=LOOPBACK),
        admin=AdminConfig((hash_key(DEMO_KEYS[2]),)),
    )


def _check_secrets(document: Mapping[str, Any]) -> None:
    """Raise ConfigError if the secret of a webhook or the key of an upstream is not a ${VARIABLE}."""
    batches = as_mapping(document.get("batches"), "batches")
    for section, entries, name in (
        ("batches.webhooks", batches.get("webhooks"), "secret"),
        ("upstreams", document.get("upstreams"), "key"),
    ):
        for entry, settings in as_mapping(entries, section).items():
            secret = as_mapping(settings, f"{section}.{entry}").get(name, "${}")
            if not isinstance(secret, str) or not secret.startswith("${"):
                raise ConfigError(f"{section}.{entry}.{name}: write ${{VARIABLE}}; secrets do not belong in files")
