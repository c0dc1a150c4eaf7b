"""Settings of an engine that follow from what its traffic looks like."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.config import CoreConfig
from engine.sizing import GIB
from lab.devices.capacity import Demand, Steady, mixed_step_s, prefill_s, serve
from lab.devices.cost import DeviceSpec
from lab.traffic.analysis import Analysis

LENGTH_MARGIN = 1.1
"""The advised maximum length of a sequence is at least this multiple of the 99th percentile of prompt and answer
together."""
LENGTH_STEP = 64
TTFT_MARGIN, ITL_MARGIN = 1.5, 2.0
"""An advised TTFT goal is at least `TTFT_MARGIN` times the time that a long prompt takes alone, and an advised ITL goal
at least `ITL_MARGIN` times the duration of a step that only decodes."""
RANK = 16
"""Assumed rank of adapters, as traces do not say it."""
HOLDING_S = 600.0
"""Seconds for which an adapter should stay in host memory: one of `lab.traffic.analysis.WINDOWS`."""


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    """Dotted name in a configuration file, such as `engine.max_model_len`."""
    value: float | int
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    steady: Steady | None
    """Steady state of the device at the request rate of the busiest minute. None means that all requests arrive at
    once."""
    settings: list[Setting]
    notes: list[str]


def demand_of(analysis: Analysis, core: CoreConfig, rank: int) -> Demand:
    """Return the average request of a trace, for capacity planning, with an adapter of this rank (0 means the base
    model). Prompt tokens that a prefix cache as large as the engine's page pool finds do not count as computed."""
    cached = analysis.reuse.share_with(core.num_pages * core.block_size)
    prompt, output = analysis.prompt.mean, analysis.output.mean
    adapters = analysis.popularity.adapters if analysis.popularity else 0
    return Demand(prompt * (1 - cached), output, prompt + output / 2, rank, adapters)


def _usual(analysis: Analysis, core: CoreConfig) -> Demand:
    """Return the average request of a trace, for capacity planning, with an adapter of rank `RANK` if more than half of
    the requests ask for one."""
    return demand_of(analysis, core, RANK if analysis.popularity and analysis.popularity.share > 0.5 else 0)


def most_rate(analysis: Analysis, device: DeviceSpec, core: CoreConfig) -> float:
    """Return the highest rate, in requests a second, at which a device serves the average request of a trace, by
    arithmetic instead of simulation."""
    return serve(device, core, _usual(analysis, core), math.inf).rate


def advise(analysis: Analysis, device: DeviceSpec, core: CoreConfig) -> Advice:
    """Return the settings that suit a trace's traffic for an engine on a device (maximum sequence length, latency
    goals, host memory for adapters), and notes for the operator."""
    steady = serve(device, core, _usual(analysis, core), analysis.busiest) if analysis.busiest else None
    settings = [*_lengths(analysis, core), *_goals(analysis, device, core, steady)]
    if analysis.popularity is not None:
        together = analysis.popularity.working[HOLDING_S]
        settings.append(host_adapters(device, together, f"within {HOLDING_S / 60:.0f} minutes"))
    return Advice(steady, settings, list(_notes(analysis, device, core, steady)))


def host_adapters(device: DeviceSpec, adapters: int, when: str) -> Setting:
    """Return the advised `engine.host_adapter_gb`: the GiB of host memory that `adapters` adapters of rank `RANK` take.
    `when` says in the reason when requests ask for all of them, such as "on one day"."""
    size = adapters * device.adapter_pages(RANK) * device.page_bytes / GIB
    reason = f"up to {adapters:,} adapters {when}, if they have rank {RANK}"
    return Setting("engine.host_adapter_gb", round_up(max(size, 0.1)), reason)


def engines_needed(device: DeviceSpec, steady: Steady, rate: float, when: str) -> str:
    """Return the sentence that says how many engines are needed for `rate` requests a second, if one engine serves as
    many as `steady` says. `when` names the time with this rate, such as "the busiest minute"."""
    return (
        f"one {device.name} serves {steady.rate:.3g} of the {rate:.3g} requests a second of {when}: at least "
        f"{math.ceil(rate / steady.rate)} engines are needed"
    )


def round_up(value: float) -> float:
    """Return a positive value rounded up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def round_length(tokens: float) -> int:
    """Return a number of tokens rounded up to a multiple of LENGTH_STEP."""
    return math.ceil(tokens / LENGTH_STEP) * LENGTH_STEP


def _lengths(analysis: Analysis, core: CoreConfig) -> Iterator[Setting]:
    usual, most = analysis.whole.p99 * LENGTH_MARGIN, analysis.whole.most
    wanted = round_length(max(usual, most))
    reason = f"{LENGTH_MARGIN} times the 99th percentile of prompt and answer together, {analysis.whole.p99:,} tokens"
    if most > usual:
        reason = f"the longest prompt and answer together, {most:,} tokens"
    if wanted > core.max_model_len:
        wanted, reason = core.max_model_len, f"all that the engine allows; {reason}, would be {wanted:,}"
    yield Setting("engine.max_model_len", wanted, reason)


def _goals(analysis: Analysis, device: DeviceSpec, core: CoreConfig, steady: Steady | None) -> Iterator[Setting]:
    """Yield settings with wider TTFT and ITL goals for interactive work where no schedule could meet those of
    `core`."""
    if steady is None or "interactive" not in analysis.lanes:
        return
    demand, longest = _usual(analysis, core), min(analysis.prompt.p99, core.max_model_len)
    alone = prefill_s(device, core, longest, demand.rank)
    if TTFT_MARGIN * alone > core.interactive.ttft_s:
        reason = f"a prompt of the 99th percentile, {longest:,} tokens, takes {alone:.3g} s alone"
        yield Setting("lanes.interactive.ttft_s", round_up(TTFT_MARGIN * alone), reason)
    decode = mixed_step_s(device, core, demand, steady.seqs, 0)
    if ITL_MARGIN * decode > core.interactive.itl_s:
        reason = f"a step of {steady.seqs} decodes, without a prompt, takes {decode:.3g} s"
        yield Setting("lanes.interactive.itl_s", round_up(ITL_MARGIN * decode), reason)


def _notes(analysis: Analysis, device: DeviceSpec, core: CoreConfig, steady: Steady | None) -> Iterator[str]:
    if steady is not None and not steady.is_enough:
        yield engines_needed(device, steady, analysis.busiest or 0.0, "the busiest minute")
    if analysis.reuse.curve:
        held = core.num_pages * core.block_size
        yield (
            f"{analysis.reuse.share:.0%} of all prompt tokens were computed before: a prefix cache of the {held:,} "
            f"tokens of an engine's pages finds {analysis.reuse.share_with(held):.0%} of all, and nine tenths of those "
            f"computed before need one of {analysis.reuse.tokens_for(0.9):,}"
        )
    if analysis.whole.most > core.max_model_len:
        yield f"the longest request has {analysis.whole.most:,} tokens; the engine allows {core.max_model_len:,}"
