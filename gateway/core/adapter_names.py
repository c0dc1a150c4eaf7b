"""Validation of adapter names, of their aliases, and of the lists of tenants that adapters are restricted to."""

from __future__ import annotations

import re
from collections.abc import Collection

from gateway.core.errors import invalid_request, model_not_found
from gateway.core.tenants import NAME as TENANT_NAME

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,127}")
"""Valid names of adapters and aliases. A colon is not allowed, because a request may name an adapter as
`base:adapter`."""
MAX_ALIASES = 64
"""Maximum number of aliases of one adapter."""


def check_name(name: str, reserved: Collection[str], param: str) -> None:
    """Check the name of an adapter or an alias.

    Args:
        name: the name to check.
        reserved: names of the base model, which are refused.
        param: the request field that the error names.

    Raises:
        ApiError: INVALID_REQUEST, the name is malformed or reserved.
    """
    if not NAME.fullmatch(name):
        rule = "1 to 128 letters, digits, '_', '.', '-' or '/', beginning with a letter or digit"
        raise invalid_request(f"{param} must be {rule}", param)
    if name in reserved:
        raise invalid_request(f"{name!r} is the name of the base model", param)


def tenant_list(tenants: Collection[str]) -> tuple[str, ...]:
    """Return tenant names sorted and without duplicates. Raises ApiError: INVALID_REQUEST, if a name is malformed."""
    for tenant in tenants:
        if not TENANT_NAME.fullmatch(tenant):
            raise invalid_request(f"{tenant!r} is no name of a tenant", "tenants")
    return tuple(sorted(set(tenants)))


def with_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Return the aliases with one added, sorted. Raises ApiError: INVALID_REQUEST, if they exceed MAX_ALIASES."""
    if len({*aliases, alias}) > MAX_ALIASES:
        raise invalid_request(f"an adapter has at most {MAX_ALIASES} aliases", "alias")
    return tuple(sorted({*aliases, alias}))


def without_alias(aliases: Collection[str], alias: str) -> tuple[str, ...]:
    """Return the aliases with one removed, sorted. Raises ApiError: MODEL_NOT_FOUND, if it is not among them."""
    if alias not in aliases:
        raise model_not_found(alias)
    return tuple(sorted(set(aliases) - {alias}))
