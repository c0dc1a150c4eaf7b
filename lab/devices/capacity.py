"""What a device serves in steady state, by arithmetic. With S sequences, S / (output x the mean step) requests end a
second. Steps with a chunk and decoding ones are averaged, as cost is not linear."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.core.config import CoreConfig
from engine.core.predict.step_time import share_read
from lab.devices.cost import DeviceSpec, StepWork


@dataclass(frozen=True, slots=True)
class Demand:
    """The average request of some traffic, from which capacity is computed by arithmetic. Sizes are in tokens."""

    prompt: float
    """Prompt tokens that are computed, without those of the prefix cache."""
    output: float
    held: float
    """Tokens of context that a request holds on average while it decodes: its prompt, with those of the prefix cache,
    and half of its output."""
    rank: int = 0
    """Rank of its adapter; 0 means the base model."""
    adapters: int = 0
    """Adapters that requests ask for, all alike. 0 means that each request has one of its own."""
    reserved: float = 0.0
    """Tokens whose pages it takes from its start to its end, on a server that reserves them. 0 means that it takes
    pages as it grows: those of `held` on average."""


@dataclass(frozen=True, slots=True)
class Steady:
    """Steady state of a device that serves a stream of average requests (`Demand`) at some rate. Times are in
    seconds."""

    seqs: int
    """Sequences that decode at a time."""
    step_s: float
    """Duration of an average step, which is the mean ITL."""
    rate: float
    """Requests a second that the device serves with so many sequences."""
    is_enough: bool
    """True means that the device serves the rate that was asked for."""


def most_seqs(core: CoreConfig, demand: Demand) -> int:
    """Return the maximum number of sequences that can decode at a time in steady state: by `max_seqs`, the pages, and
    the token budget, which has to have room for the prompts of the sequences that follow, too."""
    pages = math.ceil((demand.reserved or demand.held) / core.block_size)
    budgeted = core.token_budget / (1 + demand.prompt / demand.output)
    return max(1, min(core.max_seqs, int(budgeted), core.num_pages // pages))


def serve(device: DeviceSpec, core: CoreConfig, demand: Demand, rate: float) -> Steady:
    """Return the steady state with the fewest decoding sequences in which a device serves `rate` requests a second. If
    the device cannot serve that rate, return the state with `most_seqs` sequences."""
    low, high = 1, most_seqs(core, demand)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _rate(device, core, demand, middle) >= rate else (middle + 1, high)
    served = _rate(device, core, demand, low)
    return Steady(low, _step_s(device, core, demand, low), served, served >= rate)


def rate_within(device: DeviceSpec, core: CoreConfig, demand: Demand, step_s: float) -> float:
    """Return the highest rate, in requests a second, at which an average step takes at most `step_s` seconds. If even
    the steps of a single decoding sequence take longer, return the rate with one sequence at a time."""
    low, high = 1, most_seqs(core, demand)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _step_s(device, core, demand, middle) <= step_s else (low, middle - 1)
    return _rate(device, core, demand, low)


def mixed_step_s(device: DeviceSpec, core: CoreConfig, demand: Demand, seqs: int, prompt: int) -> float:
    """Return the predicted duration in seconds of a step of `seqs` decodes beside `prompt` tokens of a prompt, or as
    many of them as the token budget has room for."""
    return device.cost.seconds(_work(demand, seqs, min(prompt, max(0, core.token_budget - seqs))))


def prefill_s(device: DeviceSpec, core: CoreConfig, tokens: int, rank: int = 0) -> float:
    """Return the predicted seconds in which a device computes a prompt of `tokens` tokens alone, in chunks of the token
    budget. `rank` is that of its adapter; 0 means the base model."""
    seconds, start = 0.0, 0
    while start < tokens:
        chunk = min(core.token_budget, tokens - start)
        pairs = chunk * start + chunk**2 / 2
        lora = {"adapters": 1, "adapter_ranks": rank, "lora_rows": rank * chunk} if rank else {}
        seconds += device.cost.seconds(StepWork(prefill_tokens=chunk, prefill_attention=pairs, samples=1, **lora))
        start += chunk
    return seconds


def _rate(device: DeviceSpec, core: CoreConfig, demand: Demand, seqs: int) -> float:
    return seqs / (demand.output * _step_s(device, core, demand, seqs))


def _step_s(device: DeviceSpec, core: CoreConfig, demand: Demand, seqs: int) -> float:
    """Return the predicted mean duration in seconds of steps of `seqs` decodes, some of which have a chunk of a
    prompt."""
    needed = seqs / demand.output * demand.prompt
    chunk = min(demand.prompt, max(1, core.token_budget - seqs))
    share = needed / chunk if chunk else 0.0
    if share >= 1:
        return device.cost.seconds(_work(demand, seqs, needed))
    plain, mixed = (device.cost.seconds(_work(demand, seqs, prefill)) for prefill in (0.0, chunk))
    return (1 - share) * plain + share * mixed


def _work(demand: Demand, seqs: int, prefill: float) -> StepWork:
    """Return the work of a step of `seqs` decodes and `prefill` prompt tokens. The context before these prompt tokens
    is, on average, half of the computed prompt and what the prefix cache holds."""
    tokens, before = seqs + prefill, demand.held - demand.output / 2 - demand.prompt / 2
    different = _different(demand.adapters, seqs)
    lora = {"adapters": different, "adapter_ranks": different * demand.rank, "lora_rows": round(tokens * demand.rank)}
    return StepWork(
        prefill_tokens=round(prefill),
        decode_tokens=seqs,
        decode_context=round(seqs * demand.held),
        prefill_attention=prefill * before,
        samples=seqs,
        **(lora if demand.rank else {}),
    )


def _different(adapters: int, seqs: int) -> int:
    """Return the expected number of distinct adapters among `seqs` sequences, each of which uses one of `adapters`
    adapters with equal probability. If `adapters` is 0, each sequence has its own."""
    return round(adapters * share_read(1 / adapters, seqs)) if adapters else seqs
