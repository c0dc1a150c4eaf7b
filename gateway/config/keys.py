"""Reads the sections of the configuration that hold API keys: `tenants` and `admin`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

from gateway.config.file import ConfigError, Problems, as_mapping, build, check_keys, read_each, resolve
from gateway.config.sections import AdminConfig, ConfiguredAdmin, KeyConfig, TenantConfig
from gateway.core.administrators import Administrator, role_named
from gateway.core.key_rules import KeyRules
from gateway.core.tenants import MAX_LABEL, RESERVED_NAMES, Tenant, hash_key
from gateway.core.times import unix_time

DEMO_KEYS = ("sk-demo-acme", "sk-demo-globex", "sk-demo-admin")
"""API keys of the demo. They are public, so they are accepted on loopback hosts only."""
DEMO_HASHES = frozenset(hash_key(key) for key in DEMO_KEYS)
HASHED = re.compile(r"sha256:([0-9a-f]{64})")
FROM_ENVIRONMENT = re.compile(r"\$\{[^}]+\}")
MIN_KEY_LENGTH = 12


def read_tenants(value: Any, env: Mapping[str, str], base: Path) -> dict[str, TenantConfig]:
    section = as_mapping(value, "tenants")
    return read_each(section, lambda name, item: _tenant(name, item, env, base))


def _tenant(name: str, value: Any, env: Mapping[str, str], base: Path) -> TenantConfig:
    where = f"tenants.{name}"
    if name in RESERVED_NAMES:
        raise ConfigError(f"{where}: this name belongs to {RESERVED_NAMES[name]}")
    section = as_mapping(value, where)
    problems, known = Problems(), [item.name for item in fields(Tenant) if item.name != "name"]
    with problems.noting():
        check_keys(section, ["keys", *known], where)
    with problems.noting():
        rest = {key: item for key, item in section.items() if key in known}
        tenant = build(Tenant, resolve(rest, env, where), where, base, name=name)
    with problems.noting():
        keys = _keys(section.get("keys"), env, base, f"{where}.keys")
    problems.raise_all()
    return TenantConfig(tenant, tuple(keys), {known: described for known, described in keys.items() if described})


def _keys(value: Any, env: Mapping[str, str], base: Path, where: str) -> dict[str, KeyConfig | None]:
    """Return a tenant's keys by their hashes, with what the file says of them; None means that it has the key alone."""
    problems, found = Problems(), dict[str, KeyConfig | None]()
    for index, item in enumerate(_listed(value, where)):
        place = f"{where}[{index}]"
        with problems.noting():
            if not isinstance(item, dict):
                found[_key_hash(item, env, place)] = None
                continue
            check_keys(item, ["key", "label", *(one.name for one in fields(KeyRules))], place)
            rest = resolve({name: text for name, text in item.items() if name not in ("key", "label")}, env, place)
            if "expires_at" in rest:
                rest["expires_at"] = _time(rest["expires_at"], f"{place}.expires_at")
            rules, label = build(KeyRules, rest, place, base), item.get("label") or ""
            if not isinstance(label, str) or len(label) > MAX_LABEL or not label.isprintable():
                raise ConfigError(f"{place}.label: must be at most {MAX_LABEL} printable characters")
            found[_key_hash(item.get("key"), env, f"{place}.key")] = KeyConfig(label, rules)
    problems.raise_all()
    return found


def _time(value: Any, where: str) -> float:
    """Return a date or a time of the file, in UTC unless it says another, in Unix seconds."""
    try:
        return unix_time(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | NoneType):
        raise ConfigError(f"{where}: must be a list")
    return value or []


def read_admin(value: Any, env: Mapping[str, str], base: Path) -> AdminConfig:
    section = as_mapping(value, "admin")
    check_keys(section, [item.name for item in fields(AdminConfig)], "admin")
    keys, metrics_keys = (_key_hashes(section.get(name), env, f"admin.{name}") for name in ("keys", "metrics_keys"))
    named = read_each(
        as_mapping(section.get("administrators"), "admin.administrators"),
        lambda name, item: _administrator(name, item, env),
    )
    known = {"keys": keys, "metrics_keys": metrics_keys, "administrators": named}
    rest = {key: item for key, item in section.items() if key not in known}
    return build(AdminConfig, resolve(rest, env, "admin"), "admin", base, **known)


def _administrator(name: str, value: Any, env: Mapping[str, str]) -> ConfiguredAdmin:
    where = f"admin.administrators.{name}"
    section = as_mapping(value, where)
    check_keys(section, ["key", "role", "tenant"], where)
    for needed in ("key", "role"):
        if needed not in section:
            raise ConfigError(f"{where}.{needed}: is missing")
    try:
        role = role_named(str(resolve(section["role"], env, f"{where}.role")))
        administrator = Administrator(name, role, str(section.get("tenant", "")))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return ConfiguredAdmin(administrator, _key_hash(section["key"], env, f"{where}.key"))


def _key_hashes(value: Any, env: Mapping[str, str], where: str) -> tuple[str, ...]:
    return tuple(_key_hash(item, env, f"{where}[{index}]") for index, item in enumerate(_listed(value, where)))


def _key_hash(text: Any, env: Mapping[str, str], where: str) -> str:
    """Return the SHA-256, in hex, of an API key: a ${VARIABLE}, sha256:HEX, or one of the demo's keys. Raises
    ConfigError for any other text, an unset variable, and a key that is too short, has spaces or is not printable
    ASCII."""
    if isinstance(text, str) and (hashed := HASHED.fullmatch(text)):
        return hashed[1]
    if text not in DEMO_KEYS and not (isinstance(text, str) and FROM_ENVIRONMENT.fullmatch(text)):
        raise ConfigError(f"{where}: write ${{VARIABLE}} or sha256:<64 hex digits>; keys do not belong in files")
    key = resolve(text, env, where)
    if hashed := HASHED.fullmatch(key):
        return hashed[1]
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where}: a key must be at least {MIN_KEY_LENGTH} printable characters without spaces")
    return hash_key(key)
