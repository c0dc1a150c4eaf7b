"""Cost models, read from files of measured or published figures, that predict step durations on absent devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.core.messages.step import StepPlan
from engine.core.predict.step_time import share_read

TERMS = (
    "step",
    "prefill_tokens",
    "decode_tokens",
    "decode_context",
    "prefill_attention",
    "adapters",
    "lora_rows",
    "pages_copied",
    "prompts",
)
"""Terms of a linear model, each with a coefficient: `step` has the value 1, `prompts` the value 1 in steps with prompts
(which a CPU computes kernel by kernel, and decodes alone from a tape), and the others are fields of `StepWork`."""


class StepWork(NamedTuple):
    """The amount of work in one step, from which a cost model predicts its duration."""

    prefill_tokens: int = 0
    """Tokens in chunks of more than one token."""
    decode_tokens: int = 0
    """Number of decodes: chunks of one token, and each token of chunks with proposals."""
    decode_context: int = 0
    """Tokens whose K and V the decodes read, including the decoded tokens themselves."""
    prefill_attention: float = 0.0
    """Query-key pairs of the chunks of more than one token: sum of x * start + x^2 / 2 over chunks of x tokens."""
    samples: int = 0
    """Number of rows that the output head is computed for."""
    adapters: int = 0
    """Number of distinct adapters in use."""
    adapter_ranks: int = 0
    """Sum of the ranks of the distinct adapters in use, proportional to the adapter bytes that the step reads."""
    lora_rows: int = 0
    """Sum of (rank of the adapter) x (number of tokens) over the chunks with an adapter."""
    pages_copied: int = 0
    """Pages copied between host and device, including pages of adapters."""

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    @property
    def amounts(self) -> tuple[float, ...]:
        """The amounts that the duration of a step depends on, in the order of TERMS and of
        `engine.core.predict.step_time.StepFeatures`."""
        return (
            self.prefill_tokens,
            self.decode_tokens,
            self.decode_context,
            self.prefill_attention,
            self.adapters,
            self.lora_rows,
            self.pages_copied,
        )


class CostModel(Protocol):
    """Predicts the duration of a step on a device that is simulated, from the work in the step."""

    def seconds(self, work: StepWork) -> float:
        """Return the duration in seconds of a step with this work, without noise."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A measured cost model, as engines learn it (`engine.core.predict.step_time`): the sum of TERMS times seconds per
    unit, of reading chosen experts, and of surcharges. A step without tokens only copies pages."""

    coefficients: tuple[float, ...]
    """Seconds per unit of each of the TERMS, in their order."""
    beyond: tuple[tuple[int, float], ...] = ()
    """Pairs (number of tokens, seconds): each token of a step beyond that number costs so many seconds more."""
    chosen: float = 1.0
    """Share of a layer's experts that are chosen for a token."""
    experts: float = 0.0
    """Seconds for reading all experts."""

    def seconds(self, work: StepWork) -> float:
        coefficients, tokens = self.coefficients, work.tokens
        if not tokens:
            return coefficients[TERMS.index("pages_copied")] * work.pages_copied
        values = (1, *work.amounts, work.prefill_tokens > 0)
        linear = sum([a * b for a, b in zip(coefficients, values, strict=True)])
        linear += self.experts * share_read(self.chosen, tokens)
        return linear + sum([price * (tokens - knot) for knot, price in self.beyond if tokens > knot])


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """A cost model from published figures. A step takes the sum of its parts: its overhead; linear layers, experts and
    adapters, each by the longer of bytes and arithmetic; attention of decodes (bytes) and prefill (arithmetic); and
    page copies."""

    memory_bytes_per_s: float
    memory_reached: float
    """Fraction of the memory bandwidth that kernels achieve."""
    flop_per_s: float
    flop_reached: float
    """Fraction of `flop_per_s` that kernels achieve."""
    copy_bytes_per_s: float
    """Bandwidth of copies between host and device."""
    step_overhead_s: float
    weight_bytes: float
    """Bytes of weights that every step reads."""
    flop_per_token: float
    """FLOP of the matrix products of one row with the weights that every step reads, without the output head's."""
    flop_per_sample: float
    flop_per_attention_pair: float
    flop_per_lora_row: float
    kv_bytes_per_token: float
    adapter_bytes_per_rank: float
    """Bytes of an adapter of rank 1 that every step with it reads."""
    page_bytes: float
    exchange_s_per_token: float = 0.0
    """Seconds in which devices that share each layer sum their results for one token."""
    chosen: float = 1.0
    """Share of a layer's experts that are chosen for a row."""
    expert_bytes: float = 0.0
    """Bytes of the weights of all experts."""
    expert_flop_per_token: float = 0.0
    """FLOP of the experts that are chosen for a row."""
    expert_reached: float = 1.0
    """Efficiency of experts relative to that of other weights: a factor for the bandwidth and the FLOP/s that they
    reach."""
    expert_adapter_bytes_per_rank: float = 0.0
    """Bytes of an adapter of rank 1 on all experts. `flop_per_lora_row` has the FLOP of those that are chosen."""

    @property
    def bandwidth(self) -> float:
        """Bytes of device memory that kernels read in a second."""
        return self.memory_bytes_per_s * self.memory_reached

    @property
    def speed(self) -> float:
        """FLOP that kernels compute in a second."""
        return self.flop_per_s * self.flop_reached

    def seconds(self, work: StepWork) -> float:
        copies = work.pages_copied * self.page_bytes / self.copy_bytes_per_s
        if not work.tokens:
            return copies
        bandwidth, speed = self.bandwidth, self.speed
        arithmetic = work.tokens * self.flop_per_token + work.samples * self.flop_per_sample
        linear = max(self.weight_bytes / bandwidth, arithmetic / speed) + self._experts_s(work.tokens)
        decode_attention = work.decode_context * self.kv_bytes_per_token / bandwidth
        prefill_attention = work.prefill_attention * self.flop_per_attention_pair / speed
        adapters = max(self._adapter_bytes(work) / bandwidth, work.lora_rows * self.flop_per_lora_row / speed)
        exchange = work.tokens * self.exchange_s_per_token
        return self.step_overhead_s + linear + decode_attention + prefill_attention + adapters + exchange + copies

    def _experts_s(self, tokens: float) -> float:
        read = self.expert_bytes * share_read(self.chosen, tokens)
        return max(read / self.bandwidth, tokens * self.expert_flop_per_token / self.speed) / self.expert_reached

    def _adapter_bytes(self, work: StepWork) -> float:
        """Return the bytes of adapters that a step reads. Which share of the experts' adapter weights it reads follows
        from the mean number of rows of an adapter."""
        if not work.adapter_ranks:
            return 0.0
        of_experts = self.expert_adapter_bytes_per_rank * share_read(self.chosen, work.lora_rows / work.adapter_ranks)
        return work.adapter_ranks * (self.adapter_bytes_per_rank + of_experts)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Description of a device that computes a certain model, for simulations: cost model, sizes and rates, as read from
    the device's JSON file."""

    name: str
    description: str
    cost: CostModel
    noise_sigma: float
    """Sigma of the lognormal noise factor of a step's duration."""
    page_bytes: int
    adapter_bytes_per_rank: int
    disk_bytes_per_s: float
    """Rate at which adapters are read from disk and packed into host memory."""
    engine: Mapping[str, Any]
    """Configuration of an engine on this device: fields of CoreConfig."""

    def adapter_pages(self, rank: int) -> int:
        """Return the number of pages that an adapter of this rank takes, at least 1."""
        return max(1, -(-rank * self.adapter_bytes_per_rank // self.page_bytes))


def read_device(path: Path) -> DeviceSpec:
    """Read a device description from a JSON file. Raises ValueError if it is not JSON or lacks a field, and OSError.
    Types and ranges of values are not checked."""
    try:
        document = json.loads(path.read_text())
        return DeviceSpec(
            name=document["name"],
            description=document["description"],
            cost=_cost(document),
            noise_sigma=document["noise_sigma"],
            page_bytes=document["page_bytes"],
            adapter_bytes_per_rank=document["adapter_bytes_per_rank"],
            disk_bytes_per_s=document["disk_bytes_per_s"],
            engine=document["engine"],
        )
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} does not describe a device: {error!r}") from error


def _cost(document: Mapping[str, Any]) -> CostModel:
    kind, values = document["kind"], document["cost"]
    if kind == "roofline":
        known = document | values
        return RooflineCost(**{item.name: known[item.name] for item in fields(RooflineCost) if item.name in known})
    if kind == "linear":
        beyond = tuple((int(knot), price) for knot, price in values["beyond"].items())
        experts = values.get("chosen", 1.0), values.get("experts", 0.0)
        return LinearCost(tuple(values[term] for term in TERMS), beyond, *experts)
    raise ValueError(f"kind must be linear or roofline, not {kind!r}")


class LiveSequence(NamedTuple):
    """What a simulation knows of an admitted request: the seed of its sampling parameters, and its adapter (None: the
    base model) with its rank (0 without one)."""

    seed: int
    adapter_hash: str | None
    rank: int


def follow(plan: StepPlan, live: dict[str, LiveSequence], ranks: Mapping[str, int]) -> None:
    """Update `live`, the admitted requests of a simulation, by a plan: remove the sequences that it releases, and add
    those that it admits. `ranks` has the rank of each adapter by its hash."""
    for request_id in plan.released:
        live.pop(request_id, None)
    for admission in plan.admitted:
        adapter_hash = admission.adapter_hash
        rank = 0 if adapter_hash is None else ranks[adapter_hash]
        live[admission.request_id] = LiveSequence(admission.params.seed, adapter_hash, rank)


def measure(plan: StepPlan, live: Mapping[str, LiveSequence]) -> StepWork:
    """Return the amounts of work in a plan, from which a cost model predicts its step, in time proportional to its
    chunks. `live` maps request ids to sequences, for all with chunks."""
    prefill = decodes = context = samples = lora_rows = 0
    attention = 0.0
    ranks: dict[str, int] = {}
    for request_id, start, count, _, is_sampled, proposals, _ in plan.chunks:
        if count == 1 + len(proposals):
            decodes += count
            context += count * start + count * (count + 1) // 2
        else:
            prefill += count
            attention += count * (start + count / 2)
        samples += is_sampled * (1 + len(proposals))
        _, adapter_hash, rank = live[request_id]
        if adapter_hash is not None:
            ranks[adapter_hash] = rank
            lora_rows += rank * count
    copied = len(plan.saves) + len(plan.forks) + len(plan.restores) + sum(len(load.pages) for load in plan.loads)
    return StepWork(prefill, decodes, context, attention, samples, len(ranks), sum(ranks.values()), lora_rows, copied)
