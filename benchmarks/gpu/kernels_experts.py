"""Section B: routing and the linear layers of experts at the shapes of two models, beside the byte limit.

Each product is compared with torch's before it is timed. The limit counts the weights of chosen experts only.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.exact import relative_error
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.ours import our_backend
from benchmarks.gpu.shapes import model_dtype
from benchmarks.gpu.timing import memory_bandwidth, time_calls
from lora_kernels.gpu.grouped_linear import DeviceExperts
from lora_kernels.routing import Routing


class ExpertShape(NamedTuple):
    """Sizes of a layer's experts: their number, those that compute a row, hidden size and intermediate size."""

    experts: int
    top_k: int
    hidden: int
    inner: int


MODELS = {"Qwen3-30B-A3B": ExpertShape(128, 8, 2048, 768), "Mixtral 8x7B": ExpertShape(8, 2, 4096, 14336)}
TINY = {"tiny": ExpertShape(4, 2, 64, 32)}
ROWS = (1, 16, 64, 256, 2048)
LAYERS = 2
"""Layers that are timed, so that no cache holds their weights."""
LEAST_S = 3.0


def run(journal: Journal) -> None:
    device, dtype = torch.device(journal.device), model_dtype(journal.tiny)
    bandwidth = memory_bandwidth(device, journal.tiny)
    for model, shape in (TINY if journal.tiny else MODELS).items():
        with journal.case(f"routing, {model}", LEAST_S):
            time_routing(journal, model, shape, dtype)
        for name, (features, width) in {
            "gate_up": (2 * shape.inner, shape.hidden),
            "down": (shape.hidden, shape.inner),
        }.items():
            with journal.case(f"{name}, {model}", LEAST_S):
                weights = [random_weights(shape.experts, features, width, dtype, device) for _ in range(LAYERS)]
                for rows in (3,) if journal.tiny else ROWS:
                    time_linears(
                        journal, f"{name}, {model}, {rows} rows", weights, route(shape, rows, device), bandwidth
                    )


def time_routing(journal: Journal, model: str, shape: ExpertShape, dtype: torch.dtype) -> None:
    device = torch.device(journal.device)
    experts = our_backend(device).experts
    for rows in (3,) if journal.tiny else ROWS:
        logits = torch.randn(rows, shape.experts, device=device).to(dtype)
        routes = partial(experts.route, logits, shape.top_k, normalised=True)
        entries = torch.zeros(rows * shape.top_k, shape.hidden, dtype=dtype, device=device)
        combines = partial(experts.combine, entries, routes())
        times = {name: time_calls([call], device).us for name, call in (("route us", routes), ("combine us", combines))}
        journal.row("routing to experts", f"{model}, {rows} rows", **times)


def route(shape: ExpertShape, rows: int, device: torch.device) -> Routing:
    """Return the entries of rows whose logits are independent of each other."""
    logits = torch.randn(rows, shape.experts, device=device, generator=torch.Generator(device).manual_seed(0))
    return our_backend(device).experts.route(logits, shape.top_k, normalised=True)


def random_weights(count: int, features: int, width: int, dtype: torch.dtype, device: torch.device) -> DeviceExperts:
    def draw() -> Tensor:
        return torch.randn(features, width, device=device, dtype=dtype) * width**-0.5

    return DeviceExperts((draw() for _ in range(count)), count)


def time_linears(journal: Journal, name: str, linears: list[DeviceExperts], routing: Routing, bandwidth: float) -> None:
    """Check and time the linears of several layers over the same entries."""
    weight, entries = linears[0].weight, len(routing.rows)
    x = torch.randn(entries, weight.shape[2], device=weight.device).to(weight.dtype)
    error = relative_error(linears[0](x, routing.starts), exact_products(x, weight, routing), weight.dtype)
    us = time_calls([partial(linear, x, routing.starts) for linear in linears], weight.device).us
    chosen = int(routing.starts.diff().count_nonzero())
    moved = (chosen * weight[0].numel() + entries * sum(weight.shape[1:])) * weight.dtype.itemsize
    figures = {"us": us, "MB": moved / 1e6, "of limit": moved / bandwidth / (us * 1e-6)}
    operations = 2 * entries * weight[0].numel()
    journal.row("experts", name, **figures, **{"TFLOP/s": operations / us / 1e6, "relative error": error})


def exact_products(x: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """Return each entry's product with its expert's weight, in fp32 by torch."""
    bounds = pairwise(routing.starts.tolist())
    parts = [x[start:stop].float() @ one.float().T for one, (start, stop) in zip(weight, bounds, strict=True)]
    return torch.cat(parts)
