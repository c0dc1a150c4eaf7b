"""Finds a kernel's fastest configuration, one parameter after the other, and believes no winner it has not checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.journal import first_line
from lora_kernels.tuning import Choice, Config

Run = Callable[[], Tensor]
"""Launches a kernel over fixed inputs; the result is a tensor of its own."""
Tell = Callable[[str], None]

LEAST_GAIN = 1.02
"""What a configuration must be faster by to be taken: less is noise."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel at a shape.

    Attributes:
        kernel, shape: under what its configuration is stored.
        default: what it is launched with where nothing was measured.
        variants: parameter -> values to try, the most important parameter first.
        prepare: a configuration -> the launches to time, over memory that no cache holds; the first is checked.
            ValueError: the configuration makes no sense.
    """

    kernel: str
    shape: str
    default: Config
    variants: Mapping[str, Sequence[int]]
    prepare: Callable[[Config], Sequence[Run]]

    @property
    def name(self) -> str:
        return f"{self.kernel} at {self.shape}"


def tune(subject: Subject, time: Callable[[Sequence[Run]], float], tell: Tell) -> Choice:
    """The fastest configuration whose result is the default's.

    Args:
        time: microseconds of one launch.
        tell: told of every configuration that is tried.

    Raises:
        ValueError: the default itself cannot be launched.
    """
    expected, default_us = _measure(subject, subject.default, time)
    tell(f"{subject.name}: default {default_us:.1f} us")
    best, best_us = dict(subject.default), default_us
    for name, values in subject.variants.items():
        for config in _neighbours(best, name, values):
            us = _try(subject, config, expected, time, tell)
            if us is not None and us * LEAST_GAIN < best_us:
                best, best_us = config, us
    tell(f"{subject.name}: {default_us / best_us:.2f} times as fast with {best}")
    return Choice(best, best_us, default_us)


def _neighbours(config: Config, name: str, values: Sequence[int]) -> Iterator[dict[str, int]]:
    for value in values:
        if value != config[name]:
            yield {**config, name: value}


def _try(
    subject: Subject, config: Config, expected: Tensor, time: Callable[[Sequence[Run]], float], tell: Tell
) -> float | None:
    """Microseconds; None where the configuration is refused, does not fit the device, or computes something else."""
    changed = ", ".join(f"{name} {value}" for name, value in config.items() if value != subject.default[name])
    try:
        result, us = _measure(subject, config, time)
    except (ValueError, RuntimeError) as error:
        if _is_lost(expected):
            raise
        tell(f"  {changed}: not usable: {first_line(error)}")
        return None
    if not _is_same(result, expected):
        tell(f"  {changed}: WRONG result, left out")
        return None
    tell(f"  {changed}: {us:.1f} us")
    return us


def _measure(subject: Subject, config: Config, time: Callable[[Sequence[Run]], float]) -> tuple[Tensor, float]:
    runs = subject.prepare(config)
    result = runs[0]().clone()
    return result, time(runs)


def _is_same(result: Tensor, expected: Tensor) -> bool:
    """But for rounding: other blocks add in another order."""
    off = (result.float() - expected.float()).norm()
    return bool(off <= torch.finfo(expected.dtype).eps * expected.float().norm())


def _is_lost(expected: Tensor) -> bool:
    """An error that poisoned the device: nothing measured after it would be true."""
    try:
        expected.sum().item()
    except RuntimeError:
        return True
    return False
