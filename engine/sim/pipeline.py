"""The cost of a step whose layers are divided among stages (pipeline parallelism), from published figures.

A step's rows are cut into m micro-batches, and s stages take m + s - 1 turns: each reads a stage's weights and computes
one micro-batch. The first stage embeds rows and, when they are back from the last one, computes the output head.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.sizing import micro_batches
from engine.executor.cost import RooflineCost, StepWork


@dataclass(frozen=True, slots=True)
class PipelineCost:
    """A `CostModel` of `stages` stages, of one or several devices each."""

    layers: RooflineCost
    """All layers, on the devices of one stage. Its overhead is what exchanges between these devices take however small
    they are."""
    stages: int
    step_overhead_s: float
    head_bytes: float
    flop_per_sample: float
    hop_s: float
    """Seconds from one stage to the next, however few rows."""
    hop_s_per_token: float

    def seconds(self, work: StepWork) -> float:
        """Return the duration in seconds of a step with this work, without noise."""
        if not work.tokens:
            return self.layers.seconds(work) / self.stages
        count = self.micro_batches(work.tokens)
        part = StepWork._make(amount / count for amount in work)
        turn = self.layers.seconds(part) / self.stages + self.hop_s + part.tokens * self.hop_s_per_token
        return self.step_overhead_s + (count + self.stages - 1) * turn + self._head_s(work)

    def micro_batches(self, rows: int) -> int:
        """Return into how many micro-batches a step of so many rows is cut."""
        weights_s = (self.layers.weight_bytes + self.layers.expert_bytes) / self.layers.bandwidth
        row_s = (self.layers.flop_per_token + self.layers.expert_flop_per_token) / self.layers.speed
        return micro_batches(rows, self.stages, weights_s / row_s)

    def _head_s(self, work: StepWork) -> float:
        read_s = self.head_bytes / self.layers.bandwidth
        return max(read_s, work.samples * self.flop_per_sample / self.layers.speed)
