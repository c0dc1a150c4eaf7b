"""From YAML to frozen dataclasses, with errors that say where and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from engine.core.types import Lane

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

T = TypeVar("T")


class ConfigError(ValueError):
    """The configuration cannot be used; the message begins with the place in it, as in `http.port: ...`."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a repeated key win in silence; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: {key} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file's mapping, before references are resolved. Raises ConfigError."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_problem(error)}") from None
    return as_mapping(document, str(path))


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Without the line itself, which may have a secret in it."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "it cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def as_mapping(value: Any, where: str) -> dict[str, Any]:
    """A section; one left empty in the file has all its defaults."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: must be a mapping of names to values")
    return value


def resolve(value: Any, env: Mapping[str, str], where: str = "") -> Any:
    """`value` with every ${NAME} and ${NAME:-default} in its texts replaced from `env`. Raises ConfigError."""
    if isinstance(value, dict):
        return {key: resolve(item, env, f"{where}.{key}" if where else str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [resolve(item, env, f"{where}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        text = env.get(name) or default
        if text is None:
            raise ConfigError(f"{where}: the environment variable {name} is not set")
        return text

    return REFERENCE.sub(text_of, value)


def check_keys(given: Mapping[str, Any], known: list[str], where: str) -> None:
    """Raises ConfigError naming the first unknown key and the nearest known one."""
    for key in given:
        if key not in known:
            nearest = get_close_matches(key, known, 1, 0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known are: {', '.join(known)}"
            raise ConfigError(f"{f'{where}.{key}' if where else key}: unknown key; {hint}")


def build(cls: type[T], value: Any, where: str, base: Path, **given: Any) -> T:
    """A dataclass from a mapping of its fields.

    `base`: the folder that relative paths start from. `given`: fields that the file may not set.

    Raises:
        ConfigError: unknown or missing keys, values of another type, values the dataclass refuses.
    """
    section = as_mapping(value, where)
    hints = get_type_hints(cls)
    own = [field for field in fields(cls) if field.name not in given]  # type: ignore[arg-type]
    check_keys(section, [field.name for field in own], where)
    for field in own:
        if field.default is MISSING and field.default_factory is MISSING and field.name not in section:
            raise ConfigError(f"{where}.{field.name}: is required")
    values = {key: convert(item, hints[key], f"{where}.{key}", base) for key, item in section.items()}
    try:
        return cls(**given, **values)
    except ConfigError:
        raise
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(f"{where}.") else f"{where}: {text}") from error


def convert(value: Any, kind: Any, where: str, base: Path) -> Any:
    """`value` as `kind`. Numbers and booleans may be written as text, as they are when they come from a reference."""
    if section := _section(kind):
        return None if value is None and section is not kind else build(section, value, where, base)
    if get_origin(kind) is tuple and is_dataclass(get_args(kind)[0]):
        if not isinstance(value, list):
            raise ConfigError(f"{where}: must be a list")
        return tuple(convert(item, get_args(kind)[0], f"{where}[{index}]", base) for index, item in enumerate(value))

    if get_origin(kind) is Mapping and is_dataclass(get_args(kind)[1]):
        entries, one = as_mapping(value, where), get_args(kind)[1]
        return {name: convert(item, one, f"{where}.{name}", base) for name, item in entries.items()}

    def special(wanted: type, item: Any) -> Any:
        if issubclass(wanted, Path) and isinstance(item, str):
            return (base / Path(item).expanduser()).resolve()
        raise ConfigError(f"{where}: {item!r} is not a {wanted.__name__.lower()}")

    if kind is Lane:
        return lane(value, where)
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=special)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from error
        if choices := _choices(kind):  # msgspec would repeat the value, which may be a secret in the wrong place
            raise ConfigError(f"{where}: must be one of {', '.join(choices)}") from None
        raise ConfigError(f"{where}: {error}".replace("`", "")) from error


def _section(kind: Any) -> type | None:
    """The dataclass that is wanted, or that may be left out."""
    kinds = [each for each in get_args(kind) if each is not NoneType] if get_origin(kind) is UnionType else [kind]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def _choices(kind: Any) -> list[str]:
    """Values of a Literal, or of a union that has one; empty for every other kind."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else ()
    literal = [choice for each in kinds for choice in _choices(each)]
    return ["true", "false", *literal] if literal and bool in kinds else literal


def lane(value: Any, where: str) -> Lane:
    names = [member.name.lower() for member in Lane]
    if value not in names:
        raise ConfigError(f"{where}: must be one of {', '.join(names)}, not {value!r}")
    return Lane[value.upper()]
