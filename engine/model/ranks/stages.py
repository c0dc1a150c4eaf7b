"""Which consecutive layers of a model each stage of a pipeline has: balanced by the bytes of their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

from engine.config import EngineConfig
from engine.model.ranks.shard import LAYER, Shard
from engine.model.spec.config import ModelSpec
from engine.model.weights.reader import parameter_shapes

Split = tuple[float, tuple[range, ...]]
"""A way to split layers into pipeline stages: the size of the largest stage, and the layers of each stage."""


def find_shard(config: EngineConfig, spec: ModelSpec, bits: Callable[[str], float], number: int = 0) -> Shard:
    """Return the part of a model that rank `number` has; a stage's ranks are neighbours. `bits` tells how many bits a
    weight of a parameter takes. Raises ValueError for more stages than layers."""
    size, stages = config.tensor_parallel, config.pipeline_parallel
    if stages == 1:
        return Shard(number, size)
    if stages > spec.layers:
        raise ValueError(f"engine.pipeline_parallel {stages} is more than the model's {spec.layers} layers")
    ends, layers = 0.0, [0.0] * spec.layers
    for name, shape in parameter_shapes(spec).items():
        if found := LAYER.match(name):
            layers[int(found["number"])] += prod(shape) * bits(name)
        else:
            ends += prod(shape) * bits(name)
    return Shard(number % size, size, split_layers(layers, ends, stages), number // size)


def split_layers(layers: Sequence[float], ends: float, stages: int) -> tuple[range, ...]:
    """Split the layers, whose sizes are `layers`, into `stages` consecutive stages, of which the largest is as small as
    possible; the first also has embedding, final norm and head, of size `ends`. Return the layers of each stage."""
    sums = list(accumulate(layers, initial=0.0))
    # By the number of leading layers: the largest size, and the stages, of their best split so far.
    best: dict[int, Split] = {stop: (ends + sums[stop], (range(stop),)) for stop in range(1, len(sums))}
    for _ in range(1, stages):
        splits = {
            stop: [
                (max(size, sums[stop] - sums[start]), (*split, range(start, stop)))
                for start, (size, split) in best.items()
                if start < stop
            ]
            for stop in best
        }
        best = {stop: min(found, key=_cost) for stop, found in splits.items() if found}
    return best[len(layers)][1]


def _cost(split: Split) -> tuple[float, int]:
    """Sort key of a split of layers into pipeline stages, lower is better: the size of its largest stage, and then the
    most layers of any stage, because these decide the size of pages."""
    size, stages = split
    return size, max(map(len, stages))
