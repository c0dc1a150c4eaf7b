"""Section B: the pointwise kernels between the matrix products, and the sampler, at the 8B shape.

A decode step has so few rows that a kernel's fixed cost dominates its bytes; at 2,048 rows the bytes dominate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
from torch import Tensor

from benchmarks.gpu.exact import random_masks
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.ours import our_backend
from benchmarks.gpu.shapes import attention_load, model_dtype, model_spec
from benchmarks.gpu.timing import Call, memory_bandwidth, time_calls, time_host
from engine.core.messages.requests import SamplingParams
from engine.model.sample.masks import TokenMasks
from engine.model.sample.slot_sampler import make_sampler
from engine.model.spec.config import ModelSpec
from lora_kernels.pointwise import Pointwise, TorchPointwise

COLD_BYTES = 192 << 20
MOST_COPIES = 64
LEAST_S = 2.0
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, seed=1),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


def run(journal: Journal) -> None:
    device = torch.device(journal.device)
    spec, bandwidth = model_spec(journal.tiny), memory_bandwidth(device, journal.tiny)
    for rows in (2,) if journal.tiny else (64, 2048):
        for name, (make, moved) in pointwise_works(spec, rows, device).items():
            with journal.case(f"{name}, {rows} rows", LEAST_S):
                journal.row("pointwise", f"{name}, {rows} rows", **pointwise(make, moved, bandwidth, device))
        for name, measure in (("write_kv", write_kv), ("rotate_and_write", rotate_and_write)):
            with journal.case(f"{name}, {rows} rows", LEAST_S):
                journal.row("pointwise", f"{name}, {rows} rows", **measure(spec, rows, bandwidth, device))
    for name, params in SAMPLED.items():
        rows = 2 if journal.tiny else 64
        with journal.case(f"sampler: {name}", LEAST_S):
            journal.row("sampler, host included", f"{name}, {rows} rows", us=sampler(spec, rows, params, device))
    with journal.case("sampler: masks", LEAST_S):
        masks = random_masks(range(rows), spec.vocab_size)
        took = sampler(spec, rows, GREEDY, device, masks)
        journal.row("sampler, host included", f"greedy, a grammar's mask in each of {rows} rows", us=took)


Maker = Callable[[Pointwise], Call]
"""Returns a call of one kernel of a `Pointwise`, over newly allocated random tensors."""


def pointwise_works(spec: ModelSpec, rows: int, device: torch.device) -> dict[str, tuple[Maker, int]]:
    """Return kernel name -> (maker of calls over `rows` rows, number of bytes that one call moves)."""
    dtype = model_dtype(device.type == "cpu")

    def draw(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_()

    def add_norm(ours: Pointwise) -> Call:
        x, delta, weight = draw(rows, spec.hidden_size), draw(rows, spec.hidden_size), draw(spec.hidden_size)
        return partial(ours.add_norm, x, delta, weight, spec.rms_norm_eps)

    def rotate(ours: Pointwise) -> Call:
        angle = torch.rand(rows, 1, spec.head_dim, device=device)
        return partial(ours.rotate, draw(rows, heads, spec.head_dim), angle.cos(), angle.sin())

    def swiglu(ours: Pointwise) -> Call:
        return partial(ours.swiglu, draw(rows, 2 * spec.intermediate_size))

    heads, size = spec.heads + spec.kv_heads, dtype.itemsize
    return {
        "add_norm": (add_norm, rows * spec.hidden_size * 4 * size),
        "rotate": (rotate, rows * spec.head_dim * (2 * heads * size + 8)),
        "swiglu": (swiglu, rows * spec.intermediate_size * 3 * size),
    }


def pointwise(make: Maker, moved: int, bandwidth: float, device: torch.device) -> dict[str, float | str]:
    copies = 1 if device.type == "cpu" else min(MOST_COPIES, ceil(COLD_BYTES / moved))
    ours, theirs = (
        time_calls([make(side) for _ in range(copies)], device)
        for side in (our_backend(device).pointwise, TorchPointwise())
    )
    return {"us": ours.us, "torch us": theirs.us, **_against(moved, ours.us, bandwidth), "timed by": ours.how}


def write_kv(spec: ModelSpec, rows: int, bandwidth: float, device: torch.device) -> dict[str, float | str]:
    load = attention_load(
        spec, [(1, 100)] * rows, 1 if device.type == "cpu" else 8, model_dtype(device.type == "cpu"), device
    )
    shape, backend = (rows, spec.kv_heads, spec.head_dim), our_backend(device)
    key, value = (torch.empty(*shape, dtype=load.query.dtype, device=device).normal_() for _ in range(2))
    timing = time_calls([partial(backend.write_kv, kv, key, value, load.batch) for kv in load.kv], device)
    return {"us": timing.us, **_against(4 * key.nbytes, timing.us, bandwidth), "timed by": timing.how}


def rotate_and_write(spec: ModelSpec, rows: int, bandwidth: float, device: torch.device) -> dict[str, float | str]:
    tiny = device.type == "cpu"
    load, backend = (
        attention_load(spec, [(1, 100)] * rows, 1 if tiny else 8, model_dtype(tiny), device),
        our_backend(device),
    )
    width, angle = spec.query_width + 2 * spec.kv_width, torch.rand(rows, 1, spec.head_dim, device=device)
    cos, sin, calls = angle.cos(), angle.sin(), []
    for kv in load.kv:
        qkv = torch.empty(rows, width, dtype=load.query.dtype, device=device).normal_()
        calls.append(partial(backend.rotate_and_write, qkv, kv, load.batch, cos, sin, None))
    timing, moved = time_calls(calls, device), rows * (2 * width * load.query.itemsize + 8 * spec.head_dim)
    return {"us": timing.us, **_against(moved, timing.us, bandwidth), "timed by": timing.how}


def _against(moved: int, us: float, bandwidth: float) -> dict[str, float]:
    return {"MB": moved / 1e6, "of limit": moved / bandwidth / (us * 1e-6)}


def sampler(
    spec: ModelSpec, rows: int, params: SamplingParams, device: torch.device, masks: TokenMasks | None = None
) -> float:
    """Return the median microseconds from the logits of `rows` requests on the device, and masks on the host, to tokens
    on the host."""
    ours = make_sampler(spec.vocab_size, device, (), rows)
    names = [f"r{row}" for row in range(rows)]
    for name in names:
        ours.add(name, params, range(64), 32)
    logits = torch.empty(rows, spec.vocab_size, dtype=model_dtype(device.type == "cpu"), device=device).normal_()
    return time_host(
        lambda: ours.start(logits, names, masks).to_host(), device, repeats=3 if device.type == "cpu" else 20
    )
