"""Another process that the fuzzer may attack: the whole gateway of the demo with its real engine, model and adapters.

It speaks as `tests.fuzz.target` does. Grammars reach the engine's own worker processes here, are compiled in the engine
and followed by answers. Sequences are short, so that a case takes seconds on a small machine. An argument is the module
of another engine, which has no adapters.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from rich.console import Console

from engine.model.folders.prepare import prepare_model
from engine.process.files import default_data_dir
from gateway.config.sections import AdminConfig, TenantConfig
from gateway.config.whole import Config, demo_config
from gateway.core.tenants import Tenant, hash_key
from gateway.serve.launch import Launch
from gateway.serve.process import freeze_memory, run_loop
from gateway.serve.single import Running, running

IDLE_SECONDS = 60
TENANTS = ("acme", "globex", "initech")


def fuzzed_config() -> Config:
    """Return the demo's configuration with the names and keys that the cases use, on free ports."""
    config = demo_config()
    tenants = {name: TenantConfig(Tenant(name), (hash_key(f"sk-{name}"),)) for name in TENANTS}
    return replace(
        config,
        model=replace(config.model, name="tiny"),
        engine=replace(config.engine, memory_gb=0.25, max_model_len=256),
        tenants=tenants,
        admin=AdminConfig((hash_key("sk-admin"),)),
        http=replace(config.http, port=0),
        grpc=replace(config.grpc, port=0),
        observability=replace(config.observability, request_log=False),
    )


async def serve(
    folder: Path, source: str = "embedded", engine_program: Sequence[str] = (), *, adapters: bool = True
) -> None:
    """Serve a model until the standard input ends.

    Args:
        folder: the data directory.
        source: the model, as `prepare_model` takes it.
        engine_program: module of another engine, and its arguments; empty means the real one.
        adapters: whether the demo's adapters are loaded, which fit the embedded model alone.
    """
    model = prepare_model(source, default_data_dir(os.environ), Console(stderr=True))
    launch = Launch(fuzzed_config(), model, folder)
    if not adapters:
        launch = launch.preloading({})
    if engine_program:
        launch = replace(launch, engine=tuple(engine_program))
    async with running(launch) as app:
        addresses = {"http": f"http://127.0.0.1:{app.http_port}", "grpc": f"127.0.0.1:{app.grpc_port}"}
        freeze_memory()
        print(json.dumps(addresses), flush=True)
        engine = app.engines.supervisors["engine-0"].pid
        await asyncio.to_thread(sys.stdin.read)
        left = await _left(app)
        print(
            json.dumps({"left": left if app.engines.supervisors["engine-0"].pid == engine else "an engine that died"}),
            flush=True,
        )


async def _left(app: Running) -> int:
    """Wait for the ends of requests whose clients have gone. Returns how many errors the engine finds in its books."""
    async with asyncio.timeout(IDLE_SECONDS):
        while True:
            stats = await app.engine.stats(check=True)
            left = app.gateway.active + sum(lane.running + lane.waiting for lane in stats.lanes)
            if not left:
                return len(stats.violations)
            await asyncio.sleep(0.05)


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        run_loop(serve(Path(folder), engine_program=sys.argv[1:], adapters=len(sys.argv) == 1))


if __name__ == "__main__":
    main()
