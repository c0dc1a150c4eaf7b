"""What adapters and their aliases may be called, and whom they may be kept for."""

from __future__ import annotations

import re
from collections.abc import Collection

from gateway.core.errors import invalid_request, model_not_found
from gateway.core.tenants import NAME as TENANT_NAME

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
"""No colon: `base:adapter` is how a request may spell it."""
MAX_ALIASES = 64
"""Of one adapter."""


def check_name(name: str, reserved: Collection[str], param: str) -> None:
    """`reserved`: names of the base model. Raises ApiError: INVALID_REQUEST, blaming `param`."""
    if not NAME.fullmatch(name):
        rule = "1 to 128 letters, digits, '_', '.', '-' or '/', beginning with a letter or digit"
        raise invalid_request(f"{param} must be {rule}", param)
    if name in reserved:
        raise invalid_request(f"{name!r} is the name of the base model", param)


def tenant_list(tenants: Collection[str]) -> tuple[str, ...]:
    """Each once, in order. Raises ApiError: INVALID_REQUEST."""
    for tenant in tenants:
        if not TENANT_NAME.fullmatch(tenant):
            raise invalid_request(f"{tenant!r} is no name of a tenant", "tenants")
    return tuple(sorted(set(tenants)))


def with_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Raises ApiError: INVALID_REQUEST, there would be too many."""
    if len({*aliases, alias}) > MAX_ALIASES:
        raise invalid_request(f"an adapter has at most {MAX_ALIASES} aliases", "alias")
    return tuple(sorted({*aliases, alias}))


def without_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Raises ApiError: MODEL_NOT_FOUND, it is none of them."""
    if alias not in aliases:
        raise model_not_found(alias)
    return tuple(sorted(set(aliases) - {alias}))
