"""Rewrites JSON schemas in the keywords that llguidance follows, where answers stay the same: the library refuses
others, some of which generators such as Zod and Pydantic write without need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

REWRITTEN = ("uniqueItems", "propertyNames", "format")
"""Keywords without which a schema stays as it is."""
FOLLOWED = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Values of `format` that the library follows."""
FREE = frozenset(("binary", "directory-path", "file-path", "password", "path"))
"""Values of `format`, of OpenAPI and of Pydantic, that say what a text is for: any text has them."""
_BASE64 = "^([0-9a-zA-Z+/]{4})*([0-9a-zA-Z+/]{2}==|[0-9a-zA-Z+/]{3}=)?$"
_UUID = "^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{12}}$"
PATTERNS: Mapping[str, str] = {
    "base64": _BASE64,
    "base64url": "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2,3})?$",
    "byte": _BASE64,
    "hex": "^[0-9a-fA-F]*$",
    **{f"uuid{version}": _UUID.format(version=version) for version in range(1, 9)},
}
"""Patterns that say the same as a `format` that the library does not follow. `byte` is OpenAPI's name of base64."""
_NAME_PATTERNS = {**PATTERNS, "uuid": _UUID.format(version="[0-9a-fA-F]")}
_LENGTHS = frozenset(("minLength", "maxLength"))
_NOTES = frozenset(("$comment", "contentEncoding", "default", "deprecated", "description", "examples", "title"))
"""Keywords that neither allow nor forbid anything."""

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


def followable(schema: Any) -> Any:
    """Return a copy of a JSON schema without keywords that the library does not follow, where the same can be said
    without them. Raises ValueError where `uniqueItems` demands something, which no grammar can express;
    RecursionError."""
    # `uniqueItems` goes where it demands nothing, a `format` where a pattern says the same, and `propertyNames` where
    # the properties can be listed or be given a pattern. Others are left for the library to refuse.
    if not isinstance(schema, Mapping):
        return schema
    kept = {keyword: _below(keyword, value) for keyword, value in schema.items()}
    if isinstance(kept.get("uniqueItems"), bool):
        _check_unique_items(kept)
        del kept["uniqueItems"]
    if isinstance(kept.get("format"), str) and kept["format"] not in FOLLOWED:
        kept = _without_format(kept)
    return _without_names(kept) if "propertyNames" in kept else kept


def _below(keyword: str, value: Any) -> Any:
    """Apply `followable` to the schemas in the value of a schema's keyword, and return the new value. Values without
    schemas, such as those of `enum`, are returned unchanged. Raises ValueError like `followable`."""
    if keyword in _BY_NAME and isinstance(value, Mapping):
        return {name: followable(schema) for name, schema in value.items()}
    if keyword in _SCHEMA | _LIST and isinstance(value, list):
        return [followable(schema) for schema in value]
    return followable(value) if keyword in _SCHEMA else value


def _check_unique_items(schema: Mapping[str, Any]) -> None:
    most = schema.get("maxItems")
    if schema["uniqueItems"] and not (isinstance(most, int) and most <= 1):
        raise ValueError("uniqueItems is not supported: leave it out and check the answer, or set maxItems to 1")


def _without_format(schema: Json) -> Json:
    """Return a schema without its `format` if a pattern says the same or if it says nothing. Beside a pattern, unknown
    formats are notes, as JSON Schema has it: Zod writes `starts_with` beside the pattern of the beginning."""
    kind, rest = schema["format"], {keyword: value for keyword, value in schema.items() if keyword != "format"}
    members = schema.get("allOf")
    if any(
        "pattern" in one for one in (rest, *(members if isinstance(members, list) else ())) if isinstance(one, dict)
    ):
        return rest
    if kind in PATTERNS:
        return {**rest, "pattern": PATTERNS[kind]}
    return rest if kind in FREE else schema


def _without_names(schema: Json) -> Json:
    """Return the schema of an object without `propertyNames`, if the rest can say the same: a record of Zod, or a
    dictionary of Pydantic."""
    names, rest = schema["propertyNames"], {word: value for word, value in schema.items() if word != "propertyNames"}
    if _restricts(names) <= {"type"} and _is_text(names):
        return rest
    extra, known = rest.get("additionalProperties", True), rest.get("properties", {})
    if "patternProperties" in rest or not isinstance(known, dict):
        return schema
    if (listed := _listed(names)) is not None:
        properties = {name: known.get(name, extra) for name in listed if name in known or extra is not False}
        return {**rest, "properties": properties, "additionalProperties": False}
    if (pattern := _pattern(names)) is not None and not known:
        return {**rest, "patternProperties": {pattern: extra}, "additionalProperties": False}
    return schema


def _restricts(schema: Any) -> frozenset[str]:
    return frozenset(schema) - _NOTES if isinstance(schema, dict) else frozenset()


def _is_text(names: Any) -> bool:
    return names is True or (isinstance(names, dict) and names.get("type", "string") == "string")


def _listed(names: Any) -> list[str] | None:
    """Return the names that a schema of property names lists. None means that it does not list them."""
    if not _is_text(names) or names is True:
        return None
    [keyword, *others] = sorted(_restricts(names) - {"type"}) or [""]
    value = names.get(keyword)
    if others or (keyword in ("anyOf", "oneOf") and not isinstance(value, list)):
        return None
    if keyword in ("anyOf", "oneOf"):
        lists = [_listed(one) for one in value]
        return None if None in lists else list(dict.fromkeys(name for names in lists for name in names or ()))
    given = {"const": [value], "enum": value}.get(keyword)
    return given if isinstance(given, list) and all(isinstance(name, str) for name in given) else None


def _pattern(names: Any) -> str | None:
    """Return the pattern of a schema of property names. None means that no pattern says the same."""
    if not _is_text(names):
        return None
    words = _restricts(names) - {"type"}
    if words <= _LENGTHS:
        least, most = (int(names[word]) if word in names else "" for word in ("minLength", "maxLength"))
        return rf"^[\s\S]{{{least or 0},{most}}}$"
    if words <= {"pattern", "format"} and "pattern" in words:
        return str(names["pattern"])
    return _NAME_PATTERNS.get(str(names["format"])) if words == {"format"} else None
