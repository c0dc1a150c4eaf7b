"""Reads a section `engine` of the file: how one engine works, and which engines the gateway uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from engine.config import EngineConfig
from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, Scheduling
from gateway.config.file import ConfigError, Problems, as_mapping, build, check_keys, convert, resolve
from gateway.config.models import EnginesConfig

ELSEWHERE: Mapping[str, Any] = {
    "model": "",
    "state_dir": "",
    "machine_share": 1.0,
    "interactive": INTERACTIVE_GOALS,
    "batch": BATCH_GOALS,
}
"""Fields of EngineConfig that the section `engine` may not set: `ModelSettings.engine_config` fills them in."""
ENGINES_KEYS = tuple(item.name for item in fields(EnginesConfig))
"""Settings of the section `engine` that belong to `Config.engines`."""
REMOVED: Mapping[str, str] = {
    "attention": "kernels of loralane compute attention on every GPU; delete the line",
}
"""What an operator does whose section `engine` still has a setting that was removed."""
REMOVED_RULES: Mapping[str, str] = dict.fromkeys(
    (
        "yield_share",
        "full_chunk",
        "long_prompt_steps",
        "harvest_below",
        "promote_from",
        "deadline_margin",
        "max_preemptions",
        "spare_progress",
        "quantum_s",
        "locality_window",
        "locality_share",
    ),
    "it is a constant of the scheduler now; delete the line",
) | dict.fromkeys(
    ("scheduler", "policy", "window_s", "sjf_stretch"),
    "engines serve by lanes, and `loralane simulate` compares other policies with that; delete the line",
)
"""The same for the section `engine.scheduling`."""
PUBLISHED = (
    "itl_stretch",
    "tail_share",
    "batch_floor",
    "promoted_share",
    "preemption",
    "priority_s",
)
"""Settings of the scheduler that operators have a reason to change: how far batch work may lengthen interactive steps,
the least that it gets, and what priorities are worth. The others are constants with measured reasons; for experiments,
the file may set them in `engine.scheduling.advanced`."""


def read_engine(value: Any, env: Mapping[str, str], base: Path, where: str = "engine") -> EngineConfig:
    """Return the part of a section `engine` that says how one engine works, and check all keys of the section."""
    section = dict(as_mapping(resolve(value, env, where), where))
    known_fields = [item.name for item in fields(EngineConfig) if item.name not in ELSEWHERE]
    problems, values = Problems(), {name: section[name] for name in known_fields if name in section}
    with problems.noting():
        check_keys(section, [*known_fields, *ENGINES_KEYS], where, REMOVED)
    with problems.noting():
        if "scheduling" in values:
            values["scheduling"] = _scheduling(values["scheduling"], base, f"{where}.scheduling")
        config = build(EngineConfig, values, where, base, **ELSEWHERE)
    problems.raise_all()
    return config


def read_engines(value: Any, env: Mapping[str, str], base: Path, where: str = "engine") -> EnginesConfig:
    """Return the part of a section `engine` that says which engines the gateway uses."""
    section = as_mapping(resolve(value, env, where), where)
    return build(EnginesConfig, {name: section[name] for name in ENGINES_KEYS if name in section}, where, base)


def _scheduling(value: Any, base: Path, where: str) -> dict[str, Any]:
    """Return the section `scheduling` of a section `engine`, at the place `where`, with the settings of its part
    `advanced` merged into it. Raises ConfigError for unknown keys, settings in the wrong one of the two places, and
    wrong values in `advanced`."""
    section = dict(as_mapping(value, where))
    advanced = as_mapping(section.pop("advanced", None), f"{where}.advanced")
    kinds, problems = get_type_hints(Scheduling), Problems()
    with problems.noting():
        check_keys(section, [*kinds, "advanced"], where, REMOVED_RULES)
    with problems.noting():
        check_keys(advanced, list(kinds), f"{where}.advanced", REMOVED_RULES)
    for name in kinds:
        with problems.noting():
            if name in section and name not in PUBLISHED:
                raise ConfigError(f"{where}.{name}: belongs into {where}.advanced")
            if name in advanced and name in PUBLISHED:
                raise ConfigError(f"{where}.advanced.{name}: belongs into {where}")
            if name in advanced:
                section[name] = convert(advanced[name], kinds[name], f"{where}.advanced.{name}", base)
    problems.raise_all()
    return section
