"""Reads the sampling parameters that a model's makers recommend, from its generation_config.json.

As in vLLM, they take effect where a request does not set the field itself, and `max_new_tokens` bounds every answer.
Source: vLLM's `ModelConfig.get_diff_sampling_param`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engine.process.small_files import read_small_text

FILE = "generation_config.json"


class Range(NamedTuple):
    """The numbers that a field may have: from `least` to `most`, integers only if `whole`."""

    least: float
    most: float
    whole: bool = False


FIELDS: Mapping[str, tuple[str, Range]] = {
    "temperature": ("temperature", Range(0, 2)),
    "top_p": ("top_p", Range(1e-9, 1)),
    "top_k": ("top_k", Range(-1, 2**31 - 1, whole=True)),
    "min_p": ("min_p", Range(0, 1)),
    "repetition_penalty": ("repetition_penalty", Range(0.01, 10)),
    "max_new_tokens": ("max_tokens", Range(1, 2**31 - 1, whole=True)),
}
"""Field of the file -> sampling parameter and its range, which is that of requests."""


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters that generation_config.json in a model folder gives, if any, by their names in
    requests, and `max_tokens`, the bound of answers. Raises ValueError, with the remedy, for a bad file."""
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        given = json.loads(read_small_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path} is not a JSON object: fetch it again")
    found: dict[str, float] = {}
    for field, (name, allowed) in FIELDS.items():
        if given.get(field) is not None:
            found[name] = _checked(given[field], f"{path}: {field}", allowed)
    if "top_k" in found:
        found["top_k"] = max(0, found["top_k"])
    return found


def _checked(value: object, what: str, allowed: Range) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not allowed.least <= number <= allowed.most or (allowed.whole and number != int(number)):
        kind = "an integer" if allowed.whole else "a number"
        raise ValueError(
            f"{what} is {str(value)[:40]!r}, not {kind} from {allowed.least:g} to {allowed.most:g}: correct it, or set "
            "model.generation_config to none"
        )
    return int(number) if allowed.whole else number
