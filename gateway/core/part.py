"""Splits the API between ports: one port serves all of it, or one serves administration and another the rest."""

from __future__ import annotations

import re
from typing import Literal

ApiSurface = Literal["all", "public", "admin"]

COMMON = frozenset(("/", "/health", "/ready", "/ping", "/version", "/openapi.json"))
"""HTTP paths that every port serves, because monitoring queries the port that it monitors."""
ADMINISTRATION = re.compile(r"/(admin|console|metrics|v1/(un)?load_lora_adapter)(/.*)?")


def is_admin_path(path: str) -> bool:
    """Return True for the admin API, the console, /metrics and vLLM's routes that load and unload adapters."""
    return ADMINISTRATION.fullmatch(path) is not None


def serves_path(surface: ApiSurface, path: str) -> bool:
    """Return whether a port with this surface of the API (`all`, `public` or `admin`) serves an HTTP path, given as the
    path of its route, which may have {placeholders}. Every port serves the paths COMMON."""
    if surface == "all" or path in COMMON:
        return True
    return (surface == "admin") == is_admin_path(path)


def is_admin_service(name: str) -> bool:
    """Return True for the gRPC services of the package `loralane.v1` that administrators alone may call: those whose
    names end with Admin."""
    return name.endswith("Admin")


def serves_service(surface: ApiSurface, name: str) -> bool:
    """Return whether a port with this surface of the API (`all`, `public` or `admin`) serves the service `name` of the
    gRPC package `loralane.v1`. Health and reflection, which every port serves, are not covered."""
    return surface == "all" or (surface == "admin") == is_admin_service(name)
