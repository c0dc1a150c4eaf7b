"""Finds a kernel's fastest configuration, one parameter after the other, and checks the result of each candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.journal import first_line
from lora_kernels.tuning import Choice, Config

Run = Callable[[], Tensor]
"""Launches a kernel over fixed inputs and returns its result."""
Tell = Callable[[str], None]

LEAST_GAIN = 1.02
"""Factor by which a configuration must be faster to replace the best one; smaller differences are noise."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel to tune at a shape.

    Attributes:
        kernel, shape: Keys under which the chosen configuration is stored.
        default: Configuration that is used if nothing was measured.
        variants: Parameter -> values to try, the most important parameter first.
        prepare: Returns the launches to time with a configuration, over memory that no cache holds. The result of the
            first is checked. Raises ValueError if the configuration is invalid.
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
    """Return the fastest configuration found whose result equals the default's up to rounding, varying one parameter
    after the other, with its microseconds and the default's. `time` returns the microseconds of one of the launches
    that it is given; `tell` is called with a line about each configuration tried. Raises ValueError or RuntimeError if
    the default cannot be launched, and RuntimeError if the device is lost."""
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
    """Return the microseconds of a launch and report them, or what failed, by `tell`. None means that the configuration
    is invalid, does not fit the device, or gives a different result. Raises RuntimeError if the device is lost."""
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
    """Return whether the results are equal up to rounding, because different block sizes add in different orders."""
    off = (result.float() - expected.float()).norm()
    return bool(off <= torch.finfo(expected.dtype).eps * expected.float().norm())


def _is_lost(expected: Tensor) -> bool:
    """Return whether an error has corrupted the CUDA context, so that `expected`, a tensor on it, is unreadable."""
    try:
        expected.sum().item()
    except RuntimeError:
        return True
    return False
