"""Finds the devices that serve a model's traffic within goals, first by arithmetic, then on the real scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.core.config import CoreConfig, LaneGoals
from engine.core.predict.capacity import HEADROOM
from engine.core.predict.capacity import sequences as fit
from lab.devices.accelerators import ACCELERATORS, FORMS, device_of, fits, served_form, weight_bytes
from lab.devices.capacity import Demand, Steady, mixed_step_s, prefill_s, rate_within, serve
from lab.devices.cost import DeviceSpec, LinearCost, RooflineCost, StepWork
from lab.devices.shapes import Shape
from lab.plans.advice import demand_of
from lab.sim.report import GroupReport
from lab.sim.run import Progress, Setup, simulate
from lab.traffic.analysis import Analysis
from lab.traffic.scenario import Scenario

MAX_SEQS, TOKEN_BUDGET = 512, 4096
AS_MEASURED = "as measured"
RANKS = (1, 2, 4, 8)
"""Tensor-parallel sizes that are tried: numbers of devices that share each layer."""
STAGES = (1, 2, 4)
"""Numbers of pipeline stages that are tried."""
MOST_DEVICES = 8
"""Maximum number of devices of an engine, which must all be in one machine."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The model, traffic and latency goals for which a plan of devices and engines is made."""

    shape: Shape
    """The model."""
    traffic: Analysis
    """Arrival rates, lengths and adapters of the requests."""
    rate: float
    """Requests a second of all engines."""
    goals: LaneGoals
    """Latency goals of interactive work, in seconds."""
    rank: int = 0
    """Rank of the requests' adapters; 0 means the base model."""

    def demand(self, core: CoreConfig) -> Demand:
        """Return the average request of the traffic, as an engine with the settings `core` computes it."""
        return demand_of(self.traffic, core, self.rank)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible plan: engines of one kind on one kind of device, as many as serve the traffic by arithmetic."""

    accelerator: str
    form: str
    """`accelerator` and `form`: names of the device and of the number format (`Form`), which is AS_MEASURED for a
    measured device."""
    ranks: int
    """Devices that share each layer of an engine."""
    stages: int
    """Parts of an engine's layers, each on `ranks` devices of its own."""
    engines: int
    """Number of engines."""
    device: DeviceSpec
    core: CoreConfig
    """`device` and `core`: an engine's description and settings."""
    steady: Steady
    """Steady state of one engine at its share of the traffic."""
    most: Steady
    """Steady state of one engine at the highest rate that it serves."""
    price: float | None
    """Price of a device per hour. None means that it is not known."""
    prefill: int = 0
    """Engines, the first ones, that compute the prompts of split requests; the others continue the answers, and
    `steady` describes one of those. 0 means that each request stays on one engine."""

    @property
    def devices(self) -> int:
        return self.engines * self.ranks * self.stages

    @property
    def cost(self) -> float | None:
        """Price of all devices per hour. None means that the price of a device is not known."""
        return None if self.price is None else self.devices * self.price


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of devices and engines, whose traffic was simulated, with the results."""

    candidate: Candidate
    lane: GroupReport
    """Results of the interactive requests."""
    busy: tuple[float, float]
    """Shares of the time in which the least and the most busy device computed."""
    is_enough: bool
    """True means that the shares of first tokens and of gaps between tokens that the goals demand were in time, and no
    request was refused."""
    report: dict[str, Any]
    """All results."""


def candidates(
    wish: Wish,
    accelerators: Sequence[str],
    forms: Sequence[str],
    prices: Mapping[str, float],
    measured: Sequence[DeviceSpec] = (),
) -> list[Candidate]:
    """Return the possible plans, one for each kind of engine that serves the traffic, as `ordered` sorts them. `prices`
    are by device and hour; `measured` devices ran the model. Raises ValueError for too long requests."""
    if wish.traffic.whole.most > wish.shape.max_position:
        raise ValueError(
            f"the longest request has {wish.traffic.whole.most:,} tokens, and {wish.shape.name} computes "
            f"{wish.shape.max_position:,} at most"
        )
    sizes = [(ranks, stages) for ranks in RANKS for stages in STAGES if ranks * stages <= MOST_DEVICES]
    kinds = ((name, form, *size) for name in accelerators for form in forms for size in sizes)
    choices = [choice for kind in kinds for choice in _described(wish, *kind, prices)]
    for device in measured:
        choices += _candidate(wish, device, device.name, AS_MEASURED, 1, 1, prices)
    return ordered(choices)


def ordered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates by cost or, if a price is missing, by number of devices, then fewer devices and smaller
    engines, then those without splits, then the shortest steps."""
    price = pricing(candidates)
    return sorted(
        candidates,
        key=lambda candidate: (
            price(candidate),
            candidate.devices,
            candidate.ranks * candidate.stages,
            bool(candidate.prefill),
            candidate.steady.step_s,
        ),
    )


def pricing(candidates: Sequence[Candidate]) -> Callable[[Candidate], float]:
    """Return the function by whose value candidates are compared: their cost, or if a price is missing, the number of
    their devices."""
    is_priced = all(candidate.price is not None for candidate in candidates)
    return lambda candidate: candidate.devices * (candidate.price or 0.0) if is_priced else candidate.devices


def _described(
    wish: Wish, accelerator: str, form: str, ranks: int, stages: int, prices: Mapping[str, float]
) -> Iterator[Candidate]:
    """Yield the candidate of one accelerator, form, number of ranks and number of stages, computed from data sheets.
    Yield nothing if the model does not fit or a request alone misses the goals."""
    served = served_form(form, wish.shape, ranks, stages)
    if fits(wish.shape, served, ACCELERATORS[accelerator], ranks, stages):
        sizes = {"max_seqs": MAX_SEQS, "token_budget": TOKEN_BUDGET}
        device = device_of(wish.shape, served, ACCELERATORS[accelerator], ranks, stages, **sizes)
        yield from _candidate(wish, device, accelerator, form, ranks, stages, prices)


def _candidate(
    wish: Wish, device: DeviceSpec, accelerator: str, form: str, ranks: int, stages: int, prices: Mapping[str, float]
) -> Iterator[Candidate]:
    """Yield the candidate on a device, with as many engines as the traffic needs. Yield nothing if the page pool cannot
    hold the longest request, or a request alone misses the goals."""
    core = replace(CoreConfig(**device.engine), interactive=wish.goals)
    if core.num_pages * core.block_size < wish.traffic.whole.most or not _in_time(wish, device, core):
        return
    demand = wish.demand(core)
    most = serve(device, core, demand, math.inf)
    highest = rate_within(device, core, demand, wish.goals.itl_s)
    engines = max(1, math.ceil(wish.rate / (HEADROOM * highest)))
    steady = serve(device, core, demand, wish.rate / engines / HEADROOM)
    yield Candidate(accelerator, form, ranks, stages, engines, device, core, steady, most, prices.get(accelerator))


def _in_time(wish: Wish, device: DeviceSpec, core: CoreConfig) -> bool:
    """Return whether an engine without other requests meets the goals: the TTFT for a prompt of the 90th percentile,
    and the ITL for one decode."""
    alone = prefill_s(device, core, wish.traffic.prompt.p90, wish.rank)
    return alone <= wish.goals.ttft_s and mixed_step_s(device, core, wish.demand(core), 1, 0) <= wish.goals.itl_s


def try_out(candidate: Candidate, wish: Wish, scenario: Scenario, progress: Progress = lambda _: None) -> Plan:
    """Simulate an engine's share of the traffic on the real scheduler, and return the candidate as a plan with the
    results. Raises ValueError if no request is interactive."""
    workload = scenario.workload(wish.rate / candidate.engines / (wish.traffic.rate or wish.rate))
    report = simulate(Setup(candidate.device, candidate.core), workload, progress)
    return judged(candidate, wish, report.lanes, (report.busy, report.busy), asdict(report))


def judged(
    candidate: Candidate,
    wish: Wish,
    lanes: Mapping[str, GroupReport],
    busy: tuple[float, float],
    report: dict[str, Any],
) -> Plan:
    """Return the plan of a simulated candidate with these results, judged by the goals of `wish`. Raises ValueError if
    no request is interactive."""
    if (lane := lanes.get("interactive")) is None:
        raise ValueError("no simulated request is interactive: a plan is for the goals of those")
    shares = [share for share in (lane.ttft_attainment, lane.itl_attainment) if share is not None]
    is_enough = min(shares, default=0.0) >= wish.goals.attainment and not lane.refused
    return Plan(candidate, lane, busy, is_enough, report)


def with_engines(candidate: Candidate, wish: Wish, engines: int) -> Candidate:
    """Return the candidate with another number of engines, and with `steady` computed anew for one engine's share of
    the traffic."""
    demand = wish.demand(candidate.core)
    steady = serve(candidate.device, candidate.core, demand, wish.rate / engines / HEADROOM)
    return replace(candidate, engines=engines, steady=steady)


def binds(candidate: Candidate, demand: Demand) -> str:
    """Return in words what keeps a candidate's engine from serving more requests: `KV memory`, `max_seqs`, `arithmetic`
    or `memory bandwidth`."""
    core, cost = candidate.core, candidate.device.cost
    if candidate.most.seqs >= core.num_pages // math.ceil(demand.held / core.block_size):
        return "KV memory"
    if candidate.most.seqs >= core.max_seqs:
        return "max_seqs"
    if not isinstance(cost, RooflineCost):
        token_s = cost.seconds(StepWork(decode_tokens=1, samples=1))
        if isinstance(cost, LinearCost):
            token_s += cost.experts * (1 - cost.chosen)  # those that one token does not choose
        return "arithmetic" if candidate.most.step_s > 2 * token_s else "memory bandwidth"
    tokens = candidate.most.seqs * (1 + demand.prompt / demand.output)
    products = tokens * (cost.flop_per_token + cost.expert_flop_per_token) / cost.speed
    return "arithmetic" if products > candidate.most.step_s / 2 else "memory bandwidth"


def sequences(candidate: Candidate, tokens: float) -> int:
    """Return how many sequences of so many tokens fit into the pages of one of a candidate's engines, with headroom."""
    return fit(candidate.core.num_pages, candidate.core.block_size, tokens)


def adapters_beside(candidate: Candidate, demand: Demand, rank: int) -> tuple[int, int]:
    """Return how many adapters of a rank fit into the device pages of a candidate's engine beside the KV of its
    sequences in steady state, and how many fit into its host memory."""
    core = candidate.core
    kv = candidate.steady.seqs * math.ceil(demand.held / core.block_size)
    each = candidate.device.adapter_pages(rank)
    return max(0, core.num_pages - kv) // each, core.host_adapter_bytes // (each * candidate.device.page_bytes)


def weights_of(candidate: Candidate, shape: Shape) -> tuple[float, float] | None:
    """Return the bytes of an engine's weights, and of those on its fullest device. None means that they are not known,
    because the device was measured."""
    if candidate.form == AS_MEASURED:
        return None
    stage_bytes = weight_bytes(shape, FORMS[candidate.form], candidate.ranks, candidate.stages)
    return candidate.ranks * sum(stage_bytes), max(stage_bytes)


def kv_bytes_of(candidate: Candidate, shape: Shape) -> float:
    """Return the bytes of KV that a token takes on a candidate's engine, in all layers."""
    if candidate.form == AS_MEASURED:
        return candidate.device.page_bytes / candidate.core.block_size
    return shape.kv_bytes(served_form(candidate.form, shape, candidate.ranks, candidate.stages).kv_bytes)
