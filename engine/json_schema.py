"""Removes JSON schema keywords that the grammar library does not support, where they demand nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEMA = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
"""Keywords whose value is a schema, or a list of schemas."""
_LIST = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_BY_NAME = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords whose value maps names to schemas."""


def without_idle_keywords(schema: Any) -> Any:
    """Return the schema without `uniqueItems` where it demands nothing: where it is false, or at most one item fits.

    Raises:
        ValueError: `uniqueItems` demands something. No grammar can express it, and no approximation is made.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for keyword, value in schema.items():
        if keyword == "uniqueItems" and isinstance(value, bool):
            _check_unique_items(schema)
        else:
            kept[keyword] = _below(keyword, value)
    return kept


def _below(keyword: str, value: Any) -> Any:
    """Return the value of a keyword with idle keywords removed from the schemas in it. Other values, such as those of
    `enum`, are returned unchanged."""
    if keyword in _BY_NAME and isinstance(value, Mapping):
        return {name: without_idle_keywords(schema) for name, schema in value.items()}
    if keyword in _SCHEMA | _LIST and isinstance(value, list):
        return [without_idle_keywords(schema) for schema in value]
    return without_idle_keywords(value) if keyword in _SCHEMA else value


def _check_unique_items(schema: Mapping[str, Any]) -> None:
    most = schema.get("maxItems")
    if schema["uniqueItems"] and not (isinstance(most, int) and most <= 1):
        raise ValueError("uniqueItems is not supported: leave it out and check the answer, or set maxItems to 1")
