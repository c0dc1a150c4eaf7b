"""The console's page and files: their routes, which have no structs."""

from __future__ import annotations

from typing import Any

from gateway.api_schema.operation import Operation
from gateway.core.errors import Fault

CONSOLE = "/console"

PAGE: Operation[Any] = Operation("GET", CONSOLE, "Get the console's page.", "anyone", "text/html")
FILE: Operation[Any] = Operation(
    "GET",
    CONSOLE + "/{file}",
    "Get a file of the console.",
    "anyone",
    "*/*",
    faults=frozenset({Fault.ROUTE_NOT_FOUND}),
)

OPERATIONS: tuple[Operation[Any], ...] = (PAGE, FILE)
