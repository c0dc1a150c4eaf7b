"""Compares a new configuration with the running one, and finds which changes apply without a restart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from engine.core.messages.requests import Lane
from gateway.config.models import ModelSettings
from gateway.config.sections import TenantConfig
from gateway.config.whole import IN_SECTION, Config
from gateway.core.lanes import lane_name
from gateway.core.tenants import key_id

LIVE = ("adapters", "lanes", "limits", "tenants")
"""Sections whose changes a running gateway applies."""


def merge_live_sections(running: Config, read: Config) -> Config:
    """Return a copy of `running` with the sections LIVE of `read`, and the lanes and adapters of base models that both
    have. Raises ConfigError if that is not valid."""
    models = {name: _live_from(read.models.get(name, settings), settings) for name, settings in running.models.items()}
    return replace(running, models=models, **{name: getattr(read, name) for name in LIVE})


def _live_from(read: ModelSettings, running: ModelSettings) -> ModelSettings:
    return replace(running, lanes=read.lanes, preload=read.preload)


def need_restart(running: Config, read: Config) -> list[str]:
    """Return the names of the sections and of the entries of `models` that differ and that a reload does not apply.
    Values are left out: they may be secret."""
    running = merge_live_sections(running, read)
    names = [section.name for section in fields(Config) if section.name not in (*LIVE, "models")]
    differing = [name for name in names if getattr(running, name) != getattr(read, name)]
    return [*dict.fromkeys(IN_SECTION.get(name, name) for name in differing), *_differing_models(running, read)]


def _differing_models(running: Config, read: Config) -> list[str]:
    names = dict.fromkeys((*running.models, *read.models))
    differing = [f"models.{name}" for name in names if running.models.get(name) != read.models.get(name)]
    return differing or (["the order of models"] if list(running.models) != list(read.models) else [])


def changes(before: Config, after: Config) -> list[str]:
    """Return a line for each value that differs in the sections that a reload applies (LIVE): `+` and the value if it
    is new, `-` and the value if it is gone, otherwise the old and the new value. API keys are shown by their ids."""
    old, new = _values(before), _values(after)
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            lines.append(f"+ {name}: {_shown(new[name])}")
        elif name not in new:
            lines.append(f"- {name}: {_shown(old[name])}")
        elif old[name] != new[name]:
            lines.append(f"  {name}: {_shown(old[name])} -> {_shown(new[name])}")
    return lines


def leftovers(before: Config, after: Config) -> list[str]:
    """Return a line for each preloaded adapter and each tenant that only `before` names. A reload does not remove them,
    because the file of another gateway may still name them."""
    adapters = before.preloaded().keys() - after.preloaded().keys()
    tenants = before.tenants.keys() - after.tenants.keys()
    lines = [f"! {before.preload_place(name)}: is served until it is unloaded" for name in sorted(adapters)]
    return lines + [f"! tenants.{name}: stays until it is deleted" for name in sorted(tenants)]


def _values(config: Config) -> dict[str, Any]:
    values = {name: value for section in LIVE for name, value in _flat(section, getattr(config, section))}
    for name, settings in config.models.items():
        values |= _flat(f"models.{name}.lanes", settings.lanes)
        values |= _flat(f"models.{name}.adapters.preload", settings.preload)
    return values


def _flat(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    items = _items(value)
    if items is None:
        yield where, value
    else:
        for name, item in items:
            yield from _flat(f"{where}.{name}", item)


def _items(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return (name, value) for the fields of a dataclass or the items of a mapping, None for any other value. A
    tenant's keys are given by their ids, and with what the file says of them."""
    if isinstance(value, TenantConfig):
        items = [(name, item) for name, item in _fields(value.tenant) if name != "name"]
        described = [(f"keys.{key_id(key)}", said) for key, said in value.described.items()]
        return [*items, ("keys", [key_id(key) for key in value.keys]), *described]
    if is_dataclass(value):
        return _fields(value)
    return list(value.items()) if isinstance(value, Mapping) else None


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(value, field.name)) for field in fields(value)]


def _shown(value: Any) -> str:
    if isinstance(value, Lane):
        return lane_name(value)
    if isinstance(value, Sequence | frozenset) and not isinstance(value, str):
        return ", ".join(sorted(map(str, value))) or "none"
    return "none" if value is None else str(value)
