"""Explains a configuration in sentences: what an operator gets with it, and what to think about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.core.messages.requests import Lane
from engine.core.predict.capacity import Capacity
from engine.rpc.target import is_loopback
from gateway.config.capacity import capacity_rows, preloaded_ranks
from gateway.config.cluster import RayConfig
from gateway.config.keys import DEMO_HASHES
from gateway.config.lanes import LaneConfig
from gateway.config.models import EnginesConfig, ModelSettings
from gateway.config.sections import TenantConfig, TlsConfig
from gateway.config.upstreams import UpstreamConfig
from gateway.config.whole import Config
from gateway.redis.address import without_secrets

GIB = 2**30
LIMITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "concurrent_requests": "requests at once",
    "tokens_per_day": "tokens a day",
}


def explain(config: Config, data_dir: Path, engines: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (topic, sentence) for each part of a configuration, and then (`note`, warning) for each risk of it.
    `data_dir` is the gateway's data directory; `engines` has an engine's report on the machine, from
    `engine.serve.explain`, for each base model."""
    for name, settings in config.served.items():
        if len(config.served) > 1:
            yield "base model", name
        yield "engines", _engines(settings.engines, config.ray_of(name))
        yield from _model(settings, engines[name])
    for name, policy in config.routes.items():
        yield f"virtual model {name}", f"{policy.policy}: {policy.explain()}"
    for name, upstream in config.upstreams.items():
        yield f"upstream {name}", _upstream(config, name, upstream)
    weights = sum(entry.tenant.weight for entry in config.tenants.values())
    for entry in config.tenants.values():
        yield f"tenant {entry.tenant.name}", _tenant(entry, weights)
    yield "Redis", without_secrets(config.redis.url) or f"an embedded Valkey in {data_dir}"
    processes = config.gateways * config.limits.replicas
    yield "Redis away", f"limits: {config.limits.when_redis_is_away}, each process as one of {processes}"
    yield "processes", f"gateways on the ports below: {config.gateways}"
    yield "HTTP", _port(config.http.host, config.http.port, config.http.tls)
    yield "gRPC", _port(config.grpc.host, config.grpc.port, config.grpc.tls)
    if config.admin.port is not None:
        yield "admin HTTP", _port(config.admin.host, config.admin.port, config.admin.tls)
        yield "admin gRPC", _port(config.admin.host, config.admin.grpc_port or 0, config.admin.tls)
    place = urlsplit(config.batches.storage).scheme + " storage" if config.batches.storage else data_dir
    yield "files", f"{place}, at most {config.batches.max_lines:,} lines a job"
    yield from (("note", note) for note in _notes(config))


def _model(settings: ModelSettings, engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from _engine(settings, engine)
    lanes = (("interactive", settings.lanes.interactive), ("batch", settings.lanes.batch))
    yield from ((f"{name} lane", _lane(lane)) for name, lane in lanes)
    floor = settings.engine.scheduling.batch_floor
    yield "batch floor", f"at least {floor:.0%} of device time, unless an interactive token would be late"


def _engines(engines: EnginesConfig, ray: RayConfig | None) -> str:
    tls = "mutual TLS" if engines.tls else "no TLS"
    if ray is not None:
        taken = ", ".join(f"{amount:g} {name}" for name, amount in ray.resources.items())
        number = f"{ray.min}" if ray.min == ray.max else f"{ray.min} to {ray.max}"
        return f"{number} on Ray at {ray.address}, each with {taken}, {tls}"
    if engines.addresses:
        return f"{', '.join(engines.addresses)}, {tls}; the sizes below are those of an engine on this machine"
    return f"processes that the gateway starts: {engines.replicas}"


def _engine(config: ModelSettings, engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    threads = f", {engine['threads']} threads" if engine["device"] == "cpu" else ""
    yield "device", f"{engine['device']}, {engine['dtype']}{threads}"
    if "capacity" not in engine:
        yield "model", f"{config.model.source}: fetched or read at the start; then its memory and sizes are known"
        return
    gib, bits = engine["weight_bytes"] / GIB, engine["weight_bits"]
    weights = f"{gib:.2f} GiB of weights ({engine['weights']}), {bits:.3g} bits each"
    if engine["ranks"] > 1:
        weights += ", on each rank"
    if len(stages := engine["stages"]) > 1:
        parts = (f"{stage['layers']} and {stage['weight_bytes'] / GIB:.2f} GiB" for stage in stages)
        weights += f" of the largest stage; a rank's layers and weights by stage: {', '.join(parts)}"
    yield "model", f"{config.model.source} ({engine['architecture']}), {weights}"
    yield "sampling", _sampling(config, engine["sampling_defaults"])
    if "draft_block" in engine:
        held = f"{engine['draft_block']} tokens of its KV in a page that nothing else needs"
        yield "draft model", f"{engine['draft_bytes'] / GIB:.2f} GiB of weights, {held}"
    capacity, reasons = Capacity(**engine["capacity"]), engine["reasons"]
    yield from capacity_rows(config, capacity, preloaded_ranks(config))
    yield "engine.max_seqs", f"{capacity.max_seqs}: {reasons['max_seqs']}"
    yield "engine.token_budget", f"{engine['token_budget']}: {reasons['token_budget']}"
    host = f"{engine['host_adapter_gb']:g}: {reasons['host_adapter_gb']}"
    yield "engine.host_adapter_gb", f"{host}; others are read from disk on demand"


def _sampling(config: ModelSettings, defaults: Mapping[str, float]) -> str:
    values = ", ".join(f"{name} {value}" for name, value in defaults.items())
    if not values:
        return "requests that set no sampling parameters get those of OpenAI's API: the model gives none"
    if config.model.generation_config == "none":
        return f"the model's own defaults ({values}) are not used (model.generation_config)"
    return f"requests that set no others get the model's own defaults: {values} (generation_config.json)"


def _lane(lane: LaneConfig) -> str:
    refuse = f"refused if they would wait {lane.max_wait_s:g} s" if lane.max_wait_s else "never refused for their wait"
    goals = f"TTFT {lane.ttft_s:g} s and ITL {lane.itl_s:g} s"
    goals += f" for {lane.attainment:.0%} of requests and tokens" if lane.attainment else ", as a guideline"
    return f"{goals}; at most {lane.max_requests} answers at once, {refuse}"


def _tenant(entry: TenantConfig, weights: float) -> str:
    values = {name: getattr(entry.tenant.limits, name) for name in LIMITS}
    limits = [f"{value:,} {LIMITS[name]}" for name, value in values.items() if value is not None]
    share = f"{entry.tenant.weight / weights:.0%} of a lane's device time if all tenants use it"
    return f"{', '.join(limits) or 'no limits'}; {share}; keys: {len(entry.keys)}"


def _upstream(config: Config, name: str, upstream: UpstreamConfig) -> str:
    tenants = [entry.tenant for entry in config.tenants.values()]
    senders = [tenant.name for tenant in tenants if any(upstream.permits(name, tenant, lane) for lane in Lane)]
    return f"{upstream.model} at {upstream.url}; may get data of: {', '.join(senders) or 'no configured tenant'}"


def _port(host: str, port: int, tls: TlsConfig | None) -> str:
    clients = " with client certificates" if tls and tls.client_ca else ""
    return f"{host}:{port or 'any free port'}, {'TLS' + clients if tls else 'no TLS'}"


def _notes(config: Config) -> Iterator[str]:
    held = {key for entry in config.tenants.values() for key in entry.keys} | {key for _, key in config.admin.seeds()}
    if held & DEMO_HASHES:
        yield "The demo's public keys are accepted, on loopback only."
    if not config.admin.seeds():
        yield "There is no admin key: the admin API refuses all callers but administrators made live."
    sections = [("http", config.http.host, config.http.tls), ("grpc", config.grpc.host, config.grpc.tls)]
    if config.admin.port is not None:
        sections.append(("admin", config.admin.host, config.admin.tls))
    for name, host, tls in sections:
        if tls is None and not is_loopback(host):
            yield f"{name} listens on {host} without TLS: unless a proxy ends TLS, keys can be read on the way."
    if config.admin.port is None and not is_loopback(config.http.host):
        yield "The admin API and the console share the public port; admin.port gives them their own."
    if config.admin.open_metrics is True:
        yield "/metrics names tenants and adapters to callers without a key."
    if len(config.served) > 1 and not all(settings.engine.memory_gb for settings in config.served.values()):
        yield "Engines on one device share its memory: set engine.memory_gb of each base model."
    if config.gateways == 1 and config.limits.replicas == 1 and config.redis.url:
        yield "If several gateways share this Redis, set limits.replicas to their number."
