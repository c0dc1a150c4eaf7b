"""Which part of the API a port offers: all of it, or administration at a port of its own and the rest at another."""

from __future__ import annotations

import re
from typing import Literal

Part = Literal["all", "public", "admin"]

COMMON = frozenset(("/", "/health", "/ready", "/ping", "/version", "/openapi.json"))
"""At every port: what watches over a gateway asks the port that it watches over."""
ADMINISTRATION = re.compile(r"/(admin|console|metrics|v1/(un)?load_lora_adapter)(/.*)?")


def is_administration(path: str) -> bool:
    """True for the admin API, the console, /metrics and vLLM's routes that load adapters."""
    return ADMINISTRATION.fullmatch(path) is not None


def offers_path(part: Part, path: str) -> bool:
    """Of HTTP. `path`: as its route spells it."""
    if part == "all" or path in COMMON:
        return True
    return (part == "admin") == is_administration(path)


def offers_service(part: Part, name: str) -> bool:
    """Of gRPC. `name`: of a service of ours; health and reflection are at every port."""
    return part == "all" or (part == "admin") == name.endswith("Admin")
