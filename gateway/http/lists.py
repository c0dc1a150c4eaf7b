"""Parses query parameters that the API's lists have in common."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request

from gateway.core.errors import invalid_request

MAX_DIGITS = 9
MAX_NUMBER = 10**MAX_DIGITS - 1


def parse_number(text: str, param: str, least: int, most: int) -> int:
    """Return the whole number that a caller wrote in decimal digits. Raises ApiError: INVALID_REQUEST, naming `param`,
    if the text is not a number from `least` to `most`."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else -1
    if not least <= number <= most:
        raise invalid_request(f"{param} must be a number from {least} to {most}", param)
    return number


def newest_first(order: str) -> bool:
    """Return whether a list begins with its newest entry, as the value `desc` of its query parameter `order` asks.
    Raises ApiError: INVALID_REQUEST, `order` is neither `desc` nor `asc`."""
    if order not in ("asc", "desc"):
        raise invalid_request("order must be asc or desc", "order")
    return order == "desc"


def check_parameters(given: Collection[str], *known: str) -> None:
    """Raise ApiError (INVALID_REQUEST) if a name in `given` is not among `known`, because a misspelled query parameter
    would otherwise be ignored silently."""
    for name in given:
        if name not in known:
            shown = f"known are: {', '.join(known)}" if known else "this operation has none"
            raise invalid_request(f"there is no parameter {name[:80]!r}; {shown}", name[:80])


def tenant_filter(request: Request) -> str:
    """Return the query parameter `tenant`; empty means all tenants."""
    return request.query_params.get("tenant", "")


def model_filter(request: Request) -> str:
    """Return the base model that the query parameter `model` names; empty if it is absent."""
    return request.query_params.get("model", "")
