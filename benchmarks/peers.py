"""Commands for the servers to compare, each configured for the same work on the same cores."""

from __future__ import annotations

import ctypes.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.runner import PeerError
from benchmarks.server import KEY, Command, free_port
from gateway.config.whole import load_config

MODEL = "base"
"""Name of the model on every server."""
MAX_SEQS = 32
MAX_MODEL_LEN = 2048
PATIENT: Mapping[str, Any] = {"interactive": {"ttft_s": 3600, "itl_s": 60}}
"""The section `lanes` with goals of latency that no step misses, so that an engine gives up no throughput for them."""
KV_GIB = 2


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    command: Command
    key: str = ""


def loralane(model: Path, scratch: Path, cpus: frozenset[int], extra: Mapping[str, Any]) -> Peer:
    """Return a loralane server. `extra` has configuration sections, whose settings override the benchmark's own. Raises
    ConfigError if loralane does not know one of them."""
    port = free_port()
    own: dict[str, dict[str, Any]] = {
        "model": {"source": str(model), "name": MODEL},
        "engine": {
            "dtype": "bfloat16",
            "threads": len(cpus),
            "memory_gb": KV_GIB,
            "max_seqs": MAX_SEQS,
            "max_model_len": MAX_MODEL_LEN,
            "prefix_caching": False,
        },
        "tenants": {"acme": {"keys": [KEY]}},
        "http": {"port": port, "request_timeout_s": 3000},
        "grpc": {"port": free_port()},
        "observability": {"request_log": False},
    }
    path = scratch / "loralane.yaml"
    path.write_text(yaml.safe_dump(own | {name: own.get(name, {}) | section for name, section in extra.items()}))
    load_config(path, os.environ)
    words = [sys.executable, "-m", "gateway", "serve", "--config", str(path), "--data-dir", str(scratch)]
    return Peer("loralane", Command(words, f"http://127.0.0.1:{port}", "/ready", cpus=cpus), KEY)


@dataclass(frozen=True, slots=True)
class VllmAdapters:
    """Adapter settings that vLLM needs at start."""

    folders: Mapping[str, Path]
    slots: int
    """Number of adapters on the device at a time; the others are in host memory."""
    max_rank: int

    @property
    def words(self) -> list[str]:
        words = ["--enable-lora", "--max-loras", str(self.slots), "--max-lora-rank", str(self.max_rank)]
        words += ["--max-cpu-loras", str(len(self.folders)), "--lora-modules"]
        return words + [f"{name}={folder}" for name, folder in self.folders.items()]


def vllm(python: Path, model: Path, cpus: frozenset[int], adapters: VllmAdapters | None = None) -> Peer:
    """Return a vLLM server with its priority scheduler, run as its documentation advises for CPUs. Raises PeerError if
    the allocator or the OpenMP library is missing, without which vLLM runs at half its speed."""
    port = free_port()
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS)]
    words += ["--scheduling-policy", "priority", "--no-enable-prefix-caching"]
    words += adapters.words if adapters else []
    env = {
        "LD_PRELOAD": ":".join(_preloads(python)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(cpu) for cpu in sorted(cpus)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "HF_HUB_OFFLINE": "1",
    }
    return Peer("vLLM", Command(words, f"http://127.0.0.1:{port}", "/health", env, cpus))


def _preloads(python: Path) -> tuple[str, str]:
    allocator = ctypes.util.find_library("tcmalloc_minimal")
    if allocator is None:
        raise PeerError("vLLM needs tcmalloc to run at its speed: install the system package libtcmalloc-minimal4")
    openmp = python.absolute().parent.parent / "lib" / "libiomp5.so"
    if not openmp.is_file():
        raise PeerError(f"vLLM needs Intel's OpenMP to run at its speed, and {openmp} does not exist")
    return allocator, str(openmp)
