"""How long a step takes on a device that is not here: cost models read from files of measured or published figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine.core.types import StepPlan

TERMS = (
    "step",
    "prefill_tokens",
    "decode_tokens",
    "decode_context",
    "prefill_attention",
    "adapters",
    "lora_rows",
    "pages_copied",
)
"""What a linear model has a coefficient for: `step` is 1, the others are fields of `StepWork`."""


class StepWork(NamedTuple):
    """What a step asks of a device."""

    prefill_tokens: int = 0
    """Tokens of chunks longer than one."""
    decode_tokens: int = 0
    """Chunks of one token."""
    decode_context: int = 0
    """Tokens whose K and V the decodes read, themselves included."""
    prefill_attention: float = 0.0
    """Query and key pairs of the other chunks: sum of x * start + x^2 / 2."""
    samples: int = 0
    """Rows the output head is computed for."""
    adapters: int = 0
    """Distinct ones in use."""
    adapter_ranks: int = 0
    """Sum of their ranks: proportional to the bytes they make a step read."""
    lora_rows: int = 0
    """Sum of rank x tokens."""
    pages_copied: int = 0
    """Between host and device, adapters included."""

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens


class CostModel(Protocol):
    def seconds(self, work: StepWork) -> float:
        """What a step with this work takes, without noise."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Measured: one set of coefficients (seconds a unit of each of TERMS) for small steps and one for the others."""

    small_step: int
    """Tokens up to which a step is a small one."""
    small: tuple[float, ...]
    large: tuple[float, ...]

    def seconds(self, work: StepWork) -> float:
        coefficients = self.small if work.tokens <= self.small_step else self.large
        values = (
            1,
            work.prefill_tokens,
            work.decode_tokens,
            work.decode_context,
            work.prefill_attention,
            work.adapters,
            work.lora_rows,
            work.pages_copied,
        )
        if not work.tokens:
            return coefficients[-1] * work.pages_copied
        return sum([a * b for a, b in zip(coefficients, values, strict=True)])


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """Published: every part of a step takes the longer of moving its bytes and doing its arithmetic."""

    memory_bytes_per_s: float
    memory_reached: float
    """Share of it that kernels get."""
    flop_per_s: float
    flop_reached: float
    copy_bytes_per_s: float
    """Between host and device."""
    step_overhead_s: float
    weight_bytes: float
    """Read by every step."""
    flop_per_token: float
    flop_per_sample: float
    flop_per_attention_pair: float
    flop_per_lora_row: float
    kv_bytes_per_token: float
    adapter_bytes_per_rank: float
    page_bytes: float

    def seconds(self, work: StepWork) -> float:
        copies = work.pages_copied * self.page_bytes / self.copy_bytes_per_s
        if not work.tokens:
            return copies
        bandwidth, speed = self.memory_bytes_per_s * self.memory_reached, self.flop_per_s * self.flop_reached
        arithmetic = work.tokens * self.flop_per_token + work.samples * self.flop_per_sample
        linear = max(self.weight_bytes / bandwidth, arithmetic / speed)
        decode_attention = work.decode_context * self.kv_bytes_per_token / bandwidth
        prefill_attention = work.prefill_attention * self.flop_per_attention_pair / speed
        adapters = max(
            work.adapter_ranks * self.adapter_bytes_per_rank / bandwidth,
            work.lora_rows * self.flop_per_lora_row / speed,
        )
        return self.step_overhead_s + linear + decode_attention + prefill_attention + adapters + copies


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A model on a device, as its file describes it."""

    name: str
    description: str
    cost: CostModel
    noise_sigma: float
    """Of the lognormal factor a step's time is multiplied by."""
    page_bytes: int
    adapter_bytes_per_rank: int
    disk_bytes_per_s: float
    """At which adapters are read and packed into host memory."""
    engine: Mapping[str, Any]
    """Sizes of an engine there: fields of CoreConfig."""

    def adapter_pages(self, rank: int) -> int:
        return max(1, -(-rank * self.adapter_bytes_per_rank // self.page_bytes))


def read_device(path: Path) -> DeviceSpec:
    """Raises ValueError: the file is no device description; the message says what is wrong with it."""
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
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} does not describe a device: {error!r}") from error


def _cost(document: Mapping[str, Any]) -> CostModel:
    kind, values = document["kind"], document["cost"]
    if kind == "roofline":
        return RooflineCost(**{item.name: (document | values)[item.name] for item in fields(RooflineCost)})
    if kind == "linear":
        small, large = (tuple(values[name][term] for term in TERMS) for name in ("small", "large"))
        return LinearCost(values["small_step"], small, large)
    raise ValueError(f"kind must be linear or roofline, not {kind!r}")


class LiveSequence(NamedTuple):
    """What must be remembered of an admitted request to know what its chunks ask for."""

    seed: int
    adapter: str | None
    rank: int


def measure(plan: StepPlan, live: Mapping[str, LiveSequence]) -> StepWork:
    """The work in a plan, in time proportional to its chunks. `live` holds at least the plan's requests."""
    prefill = decodes = context = samples = lora_rows = 0
    attention = 0.0
    ranks: dict[str, int] = {}
    for chunk in plan.chunks:
        count, start = chunk.num_tokens, chunk.start
        if count == 1:
            decodes += 1
            context += start + 1
        else:
            prefill += count
            attention += count * (start + count / 2)
        samples += chunk.samples
        sequence = live[chunk.request_id]
        if sequence.adapter is not None:
            ranks[sequence.adapter] = sequence.rank
            lora_rows += sequence.rank * count
    copied = len(plan.saves) + len(plan.restores) + sum(len(load.pages) for load in plan.loads)
    return StepWork(prefill, decodes, context, attention, samples, len(ranks), sum(ranks.values()), lora_rows, copied)
