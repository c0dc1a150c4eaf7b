"""Derives an engine's sizes from its device, its model and the memory: how many sequences run at once, how many tokens
a step computes, and how much host memory packed adapters take. Each of these comes with its reason, a phrase for the
log and for `loralane check --explain`. A pipeline's micro-batches follow from the device's speeds, too. Nothing here
measures: the caller says what the device is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2, sqrt
from typing import NamedTuple

GIB = 1 << 30
HOST_SHARE, DEVICE_SHARE = 0.25, 0.9
"""Shares of the free memory of the host and of a GPU that one kind of use may take."""

CPU_SEQS, CPU_TOKENS = 32, 256
"""Sizes for any CPU. A CPU computes some 25 tokens in the time in which it reads the weights (measured on two cores),
and more cores raise both speeds, so that there is nothing to derive."""

MEMORY_REACHED, FLOP_REACHED, HOST_OVERHEAD_S = 0.87, 0.6, 0.0008
"""Shares of a GPU's peak bandwidth and FLOP/s that steps reach, and seconds that the host adds to a step: the
assumptions of lab/devices/profiles/h100-8b.json, which names their sources."""
LEAST_SEQS, MOST_SEQS = 16, 512
SHORT_CONTEXT = 256
"""Tokens of KV by which memory limits `max_seqs`: a short prompt and its answer. Requests are usually longer, and pages
then limit how many run. In the median of the Azure conversation trace, prompts have 1,020 tokens and answers 129 (Patel
et al., Splitwise, ISCA 2024, section III)."""
LEAST_TOKENS, MOST_TOKENS, TOKENS_STEP = 512, 8192, 128
"""Bounds of a `token_budget` that is derived from speed, and the number that it is a multiple of: steps with prompts
are captured in multiples of 128 rows."""
FULL_STEP = 12
"""Duration of a full step as a multiple of what any step takes: reading the weights once, and the host's overhead.
Simulated on an H100 (8B model, 30 requests/s of 256 to 1,024 tokens, CV 2): the p99 of TTFT is 1.02, 0.48, 0.31, 0.26
and 0.26 s with budgets of 512, 1,024, 2,048, 2,944 and 4,096 tokens, and the p99 of ITL 22, 35, 60, 81 and 96 ms. Batch
work beside 10 requests/s loses 8 % of its throughput with 512 tokens, and none with 1,024."""
MOST_ADAPTER_BYTES = {"cuda": 64 * GIB, "cpu": 2 * GIB}
"""Bounds of the derived host memory for packed adapters. For a GPU it is pinned at the start, and cannot be swapped. A
CPU's page pool, which adapters are copied to, is in host memory as well."""
LEAST_ADAPTER_BYTES = GIB // 4
"""Room for three adapters of rank 16 on all projections of an 8B model, of 80 MiB each."""
ADAPTER_STEP = 64 << 20
SET = "set by the configuration"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak speeds and free memory of a GPU.

    Attributes:
        name: name that the driver reports.
        free_bytes: memory that is free before the weights are loaded.
        bytes_per_s: bandwidth of its memory.
        flop_per_s: rate of dense matrix products in the engine's dtype.
        assumed: which of these figures are assumed because they are not known, and how; empty if none is.
    """

    name: str
    free_bytes: int
    bytes_per_s: float
    flop_per_s: float
    assumed: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """Figures of a model from which an engine's sizes are derived.

    Attributes:
        weight_bytes: bytes of all weights in the engine's dtype.
        itemsize: bytes of one weight.
        token_bytes: bytes of KV of one token.
        row_bytes: upper bound of the bytes of intermediate results of one row of a step.
        multiplied: share of the weights that a row is multiplied by: not those of experts that are not chosen for it.
    """

    weight_bytes: int
    itemsize: int
    token_bytes: int
    row_bytes: int
    multiplied: float = 1.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the operator has set: `max_seqs`, `token_budget`, the bytes of the page pool (0 means not set), and the ITL
    goal of the interactive lane in seconds."""

    max_seqs: int = 0
    token_budget: int = 0
    pool_bytes: int = 0
    itl_s: float = 0.1


class Size(NamedTuple):
    """Value of an engine's size, such as `max_seqs`, and the reason for it, a phrase that follows the number in a
    sentence."""

    value: int
    reason: str


class StepSizes(NamedTuple):
    max_seqs: Size
    token_budget: Size


def cpu_sizes(chosen: Chosen) -> StepSizes:
    """Return `max_seqs` and `token_budget` for a CPU: those that the operator has set, otherwise fixed defaults."""
    reason = "the default of every CPU, measured: some 25 tokens take as long to compute as the weights to read"
    return _with_chosen(chosen, Size(CPU_SEQS, reason), Size(CPU_TOKENS, reason))


def gpu_sizes(gpu: Gpu, model: Model, chosen: Chosen, reserved: Callable[[int, int], int]) -> StepSizes:
    """Return `max_seqs` and `token_budget` for a GPU, except those that the operator has set. The GPU's speed decides
    first; then its memory may lower them.

    Args:
        reserved: returns the bytes of device memory, besides weights and pages, that steps of up to a number of
            sequences and of tokens need. It must not decrease as these grow: what is reserved in the end is then no
            more than what was assumed here.

    Raises:
        ValueError: The GPU has too little memory for the model; the message says what to do.
    """
    seqs, tokens = seqs_by_speed(gpu, model), tokens_by_speed(gpu, model, chosen.itl_s)
    fast = _with_chosen(chosen, seqs, tokens)
    kept = reserved(fast.max_seqs.value, fast.token_budget.value)
    pool, spare = _pool_and_spare(gpu, model, chosen, kept)
    seqs = min(seqs, seqs_by_memory(pool, model), key=_value)
    tokens = min(tokens, tokens_by_memory(spare, model), key=_value)
    return _with_chosen(chosen, seqs, tokens)


def seqs_by_speed(gpu: Gpu, model: Model) -> Size:
    """Return the `max_seqs` that suits a GPU's speed: the smallest power of two that is at least four fifths of the
    rows that are computed in the time that any step takes, within `LEAST_SEQS` and `MOST_SEQS`. Fewer decodes leave the
    GPU waiting; more take longer and hardly make more tokens a second. Kernels that find a row's sequence are compiled
    for powers of two, so that 288 sequences would cost what 512 do. Simulated on an H100 (8B model, 600 batch requests
    beside 10 interactive ones a second): 160 sequences make 7 % fewer tokens a second than 256, and 512 make 3 % more,
    while the median of interactive ITL is 15, 22 and 39 ms."""
    rows = any_step_s(gpu, model) / token_s(gpu, model)
    value = 1 << max(0, ceil(log2(0.8 * rows)))
    reason = f"{rows:.0f} rows take as long to compute as any step needs to read the weights{_figures(gpu)}"
    return Size(min(max(value, LEAST_SEQS), MOST_SEQS), reason)


def seqs_by_memory(pool_bytes: int, model: Model) -> Size:
    """Return the `max_seqs` that memory allows: the largest power of two of sequences whose `SHORT_CONTEXT` tokens of
    KV fit into the page pool, but at least `LEAST_SEQS`."""
    tokens = max(pool_bytes, 0) // model.token_bytes
    value = max((1 << (tokens // SHORT_CONTEXT).bit_length()) // 2, LEAST_SEQS)
    return Size(value, f"the page pool holds the KV of {tokens:,} tokens, {SHORT_CONTEXT} for each sequence")


def tokens_by_speed(gpu: Gpu, model: Model, itl_s: float) -> Size:
    """Return the `token_budget` that suits a GPU's speed: the number of tokens of a step that lasts `FULL_STEP` times
    what any step takes (see `any_step_s`), so that this constant is a small part of it, but not longer than the ITL
    goal in seconds. If the constant alone exceeds the goal, return the number of tokens that are computed in the time
    in which the weights are read."""
    any_step, token = any_step_s(gpu, model), token_s(gpu, model)
    full = _multiple((FULL_STEP * any_step - HOST_OVERHEAD_S) / token)
    goal = _multiple((max(itl_s, any_step) - HOST_OVERHEAD_S) / token)
    if goal < full:
        return Size(min(goal, MOST_TOKENS), f"more would make a step longer than the ITL goal of {itl_s:g} s")
    least = min(LEAST_TOKENS, goal)
    if least <= full <= MOST_TOKENS:
        return Size(full, f"a full step takes {FULL_STEP} times as long as any step needs to read the weights")
    return Size(min(max(full, least), MOST_TOKENS), f"the {'least' if full < least else 'most'} that speed decides")


def tokens_by_memory(spare_bytes: int, model: Model) -> Size:
    """Return the `token_budget` that memory allows: the number of tokens whose intermediate results fit into the
    `spare_bytes` that the page pool leaves."""
    spare = max(spare_bytes, 0)
    return Size(
        _multiple(spare / model.row_bytes), f"intermediate results have {spare / GIB:.2f} GiB beside the page pool"
    )


def micro_batches(rows: int, stages: int, weight_rows: float) -> int:
    """Return into how many micro-batches a pipeline of several stages cuts a step.

    With m of them, s stages take m + s - 1 turns, each as long as reading a stage's weights and computing `rows` / m
    rows. If w rows take as long as the weights (`weight_rows`), the sum is least at m = sqrt((s - 1) * rows / w).
    """
    return max(1, min(rows, round(sqrt((stages - 1) * rows / weight_rows))))


def adapter_bytes(device: str, free_bytes: int, used_bytes: int, engines: int, share: float = 1.0) -> Size:
    """Return the bytes of host memory for packed adapters: a quarter of what is free and not for other uses, between
    `LEAST_ADAPTER_BYTES` and the maximum for the kind of device.

    Args:
        device: `cuda` or `cpu`.
        free_bytes: host memory that is available now, within the limit of the control group.
        used_bytes: part of it that the engine will use for other things.
        engines: number of engines that may share the machine's memory: one for each GPU.
        share: part of this machine's memory for this engine.
    """
    left = max(0, free_bytes - used_bytes)
    value = int(HOST_SHARE * share * left / engines) // ADAPTER_STEP * ADAPTER_STEP
    value = min(max(value, LEAST_ADAPTER_BYTES), MOST_ADAPTER_BYTES[device])
    if value in (LEAST_ADAPTER_BYTES, MOST_ADAPTER_BYTES[device]):
        bound = "least" if value == LEAST_ADAPTER_BYTES else "most"
        return Size(value, f"the {bound} that is derived for a {'GPU' if device == 'cuda' else 'CPU'}")
    each = f" for each of {engines} GPUs" if engines > 1 else ""
    return Size(value, f"a quarter of the {left * share / GIB:.1f} GiB that the host has left{each}")


def _pool_and_spare(gpu: Gpu, model: Model, chosen: Chosen, reserved: int) -> tuple[int, int]:
    """Return the bytes of the page pool, and those that are left beside it for steps that are not captured. Raises
    ValueError if that is too little to serve requests."""
    rest = gpu.free_bytes - model.weight_bytes
    pool = chosen.pool_bytes or int(DEVICE_SHARE * (rest - reserved))
    spare = rest - reserved - pool
    has = f"{gpu.name} has {gpu.free_bytes / GIB:.1f} GiB free, and the weights take {model.weight_bytes / GIB:.1f} GiB"
    advice = "serve a smaller model, use a larger GPU, or end what else uses its memory"
    if rest <= 0:
        raise ValueError(f"{has}: {advice}")
    if rest < chosen.pool_bytes:
        raise ValueError(f"{has}, which leaves no {pool / GIB:.1f} GiB for pages: lower engine.memory_gb or num_pages")
    if not chosen.pool_bytes and pool < SHORT_CONTEXT * model.token_bytes:
        raise ValueError(f"{has}; with {reserved / GIB:.1f} GiB for steps, that leaves too little for pages: {advice}")
    return pool, spare


def _with_chosen(chosen: Chosen, seqs: Size, tokens: Size) -> StepSizes:
    """Return the sizes with those that the operator has set in their place, and such that the token budget is at least
    `max_seqs`."""
    if chosen.token_budget:
        tokens = Size(chosen.token_budget, SET)
        seqs = min(seqs, Size(chosen.token_budget, "no more than engine.token_budget"), key=_value)
    if chosen.max_seqs:
        seqs = Size(chosen.max_seqs, SET)
    return StepSizes(seqs, max(tokens, Size(seqs.value, "no fewer than engine.max_seqs"), key=_value))


def any_step_s(gpu: Gpu, model: Model) -> float:
    """Return the seconds that a step takes however few tokens it computes: to read the weights, and on the host."""
    return model.weight_bytes / (gpu.bytes_per_s * MEMORY_REACHED) + HOST_OVERHEAD_S


def token_s(gpu: Gpu, model: Model) -> float:
    """Return the seconds that the matrix products of one token take in a large step: two operations a weight."""
    return 2 * model.multiplied * model.weight_bytes / model.itemsize / (gpu.flop_per_s * FLOP_REACHED)


def _multiple(tokens: float) -> int:
    """Return `tokens`, rounded down to a multiple of `TOKENS_STEP`, and at least that."""
    return max(1, int(tokens) // TOKENS_STEP) * TOKENS_STEP


def _figures(gpu: Gpu) -> str:
    figures = f" ({gpu.flop_per_s / 1e12:.0f} TFLOP/s, {gpu.bytes_per_s / 1e9:,.0f} GB/s)"
    return f"{figures}; {gpu.assumed}" if gpu.assumed else figures


def _value(size: Size) -> int:
    return size.value
