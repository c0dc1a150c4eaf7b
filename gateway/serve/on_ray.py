"""Connects the configuration to the engines on a Ray cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from gateway.cluster.engines import RayEngines
from gateway.cluster.lease import Lease
from gateway.cluster.model import ModelOnRay
from gateway.cluster.ray_process import RayError, RayProcess
from gateway.config.cluster import RayConfig
from gateway.config.models import ModelSettings
from gateway.engines.directory import engine_directory
from gateway.engines.member import member_store
from gateway.redis.connect import redis_client
from gateway.serve.engine_host import HostOrders
from gateway.serve.launch import Launch, StartError

HOST = "gateway.serve.engine_host:EngineHost"


@asynccontextmanager
async def engines_on_ray(launch: Launch, store: str) -> AsyncIterator[RayEngines]:
    """Run the engines of all base models that Ray serves until the block ends; the block begins when the cluster is
    connected, and the engines start then. `store` is the URL of the deployment's Redis. Raises StartError if Ray is not
    installed or the cluster cannot be reached."""
    config = launch.config
    assert config.cluster.ray is not None
    models = [
        ModelOnRay(name, ray, settings.lanes.goals(), _orders(launch, name, settings, ray), settings.engines.tls)
        for name, settings in config.served.items()
        if (ray := config.ray_of(name)) is not None
    ]
    try:
        async with (
            RayProcess(config.cluster.ray.address, HOST) as process,
            redis_client(store, cluster=config.redis.cluster) as redis,
            engine_directory(member_store(redis, config.redis.key_prefix), {}, config.engine_tls) as directory,
            RayEngines(process, models, directory, Lease(redis, config.redis.key_prefix)) as engines,
        ):
            yield engines
    except RayError as error:
        raise StartError(f"cluster.ray: {error}") from error


def _orders(launch: Launch, model: str, settings: ModelSettings, ray: RayConfig) -> Callable[[str], str]:
    """Return a function that takes the name of an engine of this base model and returns its `HostOrders` as text, which
    the engine's actor gets."""
    settings, source = replace(settings, preload={}), Path(settings.model.source)  # gateways load the adapters
    if source.exists():  # the actor runs in another folder
        settings = replace(settings, model=replace(settings.model, source=str(source.resolve())))
    cores = None if ray.resources.get("GPU") else ray.resources.get("CPU", 1.0)

    def orders(engine: str) -> str:
        return HostOrders(settings, launch.data_dir, f"{model}/{engine}", launch.engine, cores).to_text()

    return orders
