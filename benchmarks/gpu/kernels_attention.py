"""Section B: paged attention at the 8B shape. Decode is compared with its bytes (K and V once), prefill is in TFLOP/s.

A timed round goes through the KV of all layers, which lie in pages of 2 MiB as in an engine: no cache holds the KV that
is read next, and the addresses that a layer reads are as far apart as in production.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.ours import our_backend
from benchmarks.gpu.shapes import AttentionLoad, attention_load, model_dtype, model_spec
from benchmarks.gpu.timing import Timing, memory_bandwidth, time_calls
from lora_kernels.backend import Backend

LEAST_S = 3.0
LENGTHS = (128, 256, 384, 512, 768, 1024, 2048, 8192)
"""Context lengths of a typical batch of chats: most are short, a few long."""

Chunks = tuple[tuple[int, int], ...]
"""(number of query rows, context length in tokens) of each sequence of a batch."""

DECODES: dict[str, Chunks] = {
    "64 x 2,048": ((1, 2048),) * 64,
    "64 of 128 to 8,192": tuple((1, context) for context in LENGTHS * 8),
    "8 x 8,192": ((1, 8192),) * 8,
    "1 x 32,768": ((1, 32768),),
    "16 x 1,024": ((1, 1024),) * 16,
    "256 x 512": ((1, 512),) * 256,
    "1 x 1,024": ((1, 1024),),
}
PREFILLS: dict[str, Chunks] = {
    "prompt of 2,048": ((2048, 2048),),
    "prompt of 8,192": ((8192, 8192),),
    "chunk of 512 at 16,384": ((512, 16384),),
    "4 chunks of 512 at 4,096": ((512, 4096),) * 4,
    "63 decodes at 2,048, chunk of 512": ((1, 2048),) * 63 + ((512, 2048),),
}
KV_DTYPES = {"": False, ", FP8 KV": True}
"""Ending of a case's name -> whether K and V are stored in FP8."""
TINY_DECODES: dict[str, Chunks] = {"2 of 20": ((1, 20), (1, 17))}
TINY_PREFILLS: dict[str, Chunks] = {"chunk of 4 at 12": ((4, 12),)}


def run(journal: Journal) -> None:
    device = torch.device(journal.device)
    bandwidth = memory_bandwidth(device, journal.tiny)
    for ending, fp8_kv in kv_dtypes(device).items():
        for name, chunks in (TINY_DECODES if journal.tiny else DECODES).items():
            with journal.case(f"decode attention: {name}{ending}", LEAST_S):
                timed = decode(make_load(chunks, device, fp8_kv), bandwidth)
                journal.row("attention, decode", f"{name}{ending}", **timed)
        for name, chunks in (TINY_PREFILLS if journal.tiny else PREFILLS).items():
            with journal.case(f"prefill attention: {name}{ending}", LEAST_S):
                journal.row("attention, prefill", f"{name}{ending}", **prefill(make_load(chunks, device, fp8_kv)))


def kv_dtypes(device: torch.device) -> dict[str, bool]:
    """Return the `KV_DTYPES` that a device has: FP8 in the interpreter and from compute capability 8.9 on."""
    has_fp8 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)
    return KV_DTYPES if has_fp8 else {"": False}


def make_load(chunks: Chunks, device: torch.device, fp8_kv: bool = False) -> AttentionLoad:
    tiny = device.type == "cpu"
    spec = model_spec(tiny)
    return attention_load(spec, chunks, 1 if tiny else spec.layers, model_dtype(tiny), device, fp8_kv)


def our_calls(load: AttentionLoad, backend: Backend) -> list[Callable[[], object]]:
    """Return the calls to time: one of the backend's attention for each layer of the load."""
    attend = partial(backend.attention, kv_coding=load.kv_coding)
    return [partial(attend, load.query, kv, load.batch, load.scores) for kv in load.kv]


def measure(load: AttentionLoad) -> Timing:
    device = load.query.device
    return time_calls(our_calls(load, our_backend(device, load.kv_coding is not None)), device)


def decode(load: AttentionLoad, bandwidth: float) -> dict[str, float | str]:
    timing = measure(load)
    reached = load.io_bytes / (timing.us * 1e-6)
    return {
        "us": timing.us,
        "MB": load.io_bytes / 1e6,
        "GB/s": reached / 1e9,
        "of limit": reached / bandwidth,
        "timed by": timing.how,
    }


def prefill(load: AttentionLoad) -> dict[str, float | str]:
    timing = measure(load)
    return {"us": timing.us, "TFLOP/s": load.flops / timing.us / 1e6, "timed by": timing.how}
