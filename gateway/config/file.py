"""Converts YAML to frozen dataclasses. Errors name the place in the file and say what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from engine.core.messages.requests import Lane
from engine.process.small_files import read_small_text
from gateway.core.counts import parse_count

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")

WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

MERGE = "tag:yaml.org,2002:merge"

T = TypeVar("T")


class ConfigError(ValueError):
    """The configuration cannot be used; each line of the message names a problem's place, as in `http.port: ...`."""


class Problems:
    """Collects the problems of a configuration, so that all of them can be reported at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Context manager that records a ConfigError of the block, one problem for each line, and suppresses it."""
        try:
            yield
        except ConfigError as error:
            self._lines += str(error).splitlines()

    def __bool__(self) -> bool:
        return bool(self._lines)

    def raise_all(self) -> None:
        """Raise ConfigError with one recorded problem per line; do nothing if there are none."""
        if self._lines:
            raise ConfigError("\n".join(dict.fromkeys(self._lines)))


class _UniqueKeyLoader(yaml.SafeLoader):
    """A YAML loader for which a repeated key is an error. By default a repetition silently replaces the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE:  # `<<: *anchor`, which SafeLoader replaces by the anchor's keys
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: {key} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, with its ${NAME} references unresolved. Raises ConfigError for a file that
    cannot be read, is empty (as one that is just being written), too large or not YAML, repeats a key or holds no
    mapping."""
    try:
        document = yaml.load(read_small_text(path), _UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_yaml_problem(error)}") from None
    if document is None:
        raise ConfigError(f"{path} is empty; write {{}} for the defaults of all settings")
    return as_mapping(document, str(path))


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Describe a YAML error by its line and column, without the text of the line, which may contain a secret."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "it cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def as_mapping(value: Any, where: str) -> dict[str, Any]:
    """Return a section as a mapping; None, an empty section of the file, gives an empty one. Raises ConfigError, with
    the place `where`, for any other value and for keys that are not strings."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: must be a mapping of names to values")
    return value


@dataclass(frozen=True, slots=True)
class Unresolved:
    """Placeholder in a YAML document for a string that references an environment variable which is not set. `convert`
    raises `problem` as a ConfigError."""

    problem: str


def _unresolved(value: Any) -> list[str]:
    """Return the problems of all `Unresolved` placeholders in a value."""
    if isinstance(value, Unresolved):
        return [value.problem]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [problem for item in items for problem in _unresolved(item)]


def resolve(value: Any, env: Mapping[str, str], where: str = "") -> Any:
    """Return a copy of `value` with every ${NAME} and ${NAME:-default} in its strings replaced from `env`. `where` is
    the place of the value in the file, for messages.

    If a variable without a default is not set, or empty, a string inside a mapping or a list becomes `Unresolved`,
    which `convert` refuses; if `value` itself is the string, ConfigError is raised.
    """
    if isinstance(value, dict | list):
        return _resolve_items(value, env, where)
    if not isinstance(value, str):
        return value

    def text_of(match: re.Match[str]) -> str:
        name, default = match.groups()
        text = env.get(name) or default
        if text is None:
            raise ConfigError(f"{where}: the environment variable {name} is not set")
        return text

    return REFERENCE.sub(text_of, value)


def _resolve_items(value: dict[str, Any] | list[Any], env: Mapping[str, str], where: str) -> Any:
    """Resolve each item of a mapping or a list; one that references an unset variable becomes `Unresolved`."""
    items: dict[Any, Any] = {}
    is_list = isinstance(value, list)
    for key, item in enumerate(value) if isinstance(value, list) else value.items():
        place = f"{where}[{key}]" if is_list else f"{where}.{key}" if where else str(key)
        try:
            items[key] = resolve(item, env, place)
        except ConfigError as error:
            items[key] = Unresolved(str(error))
    return list(items.values()) if is_list else items


def check_keys(
    given: Mapping[str, Any], known: list[str], where: str, removed: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ConfigError if `given` has keys that are not in `known`. The message names each of them, with what
    `removed` says of it, or the most similar known key or, if none is similar, all known keys."""
    problems = Problems()
    for key in given:
        if key not in known:
            with problems.noting():
                raise ConfigError(f"{f'{where}.{key}' if where else key}: {_why_unknown(key, known, removed)}")
    problems.raise_all()


def _why_unknown(key: str, known: list[str], removed: Mapping[str, str]) -> str:
    if key in removed:
        return f"this setting was removed: {removed[key]}"
    nearest = get_close_matches(key, known, 1, 0.5)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are: {', '.join(known)}"
    return f"unknown key; {hint}"


def build(cls: type[T], value: Any, where: str, base: Path, **given: Any) -> T:
    """Return an instance of the dataclass `cls`, whose fields a section of the file sets. Raises ConfigError, with all
    problems, if a key is unknown or missing, or a value has a wrong type or is refused by the dataclass. A dataclass
    refuses one value at a time: the others are then tried alone.

    Args:
        value: the section, as a mapping of fields to values; None means an empty one.
        where: place of the section in the file, for messages.
        base: the folder that relative paths start from.
        given: fields that the file may not set, with their values.
    """
    section = as_mapping(value, where)
    hints = get_type_hints(cls)
    own_fields = [field for field in fields(cls) if field.name not in given]  # type: ignore[arg-type]
    problems, values, names = Problems(), {}, [field.name for field in own_fields]
    with problems.noting():
        check_keys(section, names, where)
    for field in own_fields:
        with problems.noting():
            if field.name in section:
                values[field.name] = convert(section[field.name], hints[field.name], f"{where}.{field.name}", base)
            elif field.default is MISSING and field.default_factory is MISSING:
                raise ConfigError(f"{where}.{field.name}: is required")
    if not problems:
        with problems.noting():
            return _made(cls, given | values, where)
    needed = {field.name for field in own_fields if field.default is MISSING and field.default_factory is MISSING}
    if needed <= values.keys():
        base_values = given | {name: values[name] for name in needed}
        for name, value in values.items():
            with problems.noting():
                _check_alone(cls, name, base_values | {name: value}, where, names)
    problems.raise_all()
    raise AssertionError("it has problems")


def _made(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Return an instance of a dataclass. Raises ConfigError, with the place `where`, if it refuses the values."""
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        text, last = str(error), where.rpartition(".")[2]
        if text.startswith(f"{last}."):  # it names the setting, from the name of the section on
            raise ConfigError(f"{where}{text.removeprefix(last)}") from error
        raise ConfigError(f"{where}: {text}") from error


def _check_alone(cls: type[Any], name: str, values: Mapping[str, Any], where: str, names: Collection[str]) -> None:
    """Raise ConfigError if a dataclass refuses the value of one setting while the others have their defaults, and the
    message is about no other of its settings, whose values might make it right."""
    try:
        _made(cls, values, where)
    except ConfigError as error:
        told = set(WORD.findall(str(error).removeprefix(where)))
        if told & set(names) <= {name}:
            raise


def read_each(section: Mapping[str, Any], read: Callable[[str, Any], T]) -> dict[str, T]:
    """Return the results of `read(name, item)` for the entries of a section, by name. Raises ConfigError with the
    problems of all entries."""
    problems, results = Problems(), {}
    for name, item in section.items():
        with problems.noting():
            results[name] = read(name, item)
    problems.raise_all()
    return results


def convert(value: Any, kind: Any, where: str, base: Path) -> Any:
    """Convert a value from the file to the type `kind`, which may be a dataclass. Raises ConfigError, naming the place
    `where`. Numbers and booleans may be strings, as they are when they come from a ${NAME}. Integers may also be
    written like `100k`. Relative paths start from the folder `base`.
    """
    if isinstance(value, Unresolved):
        raise ConfigError(value.problem)
    if section := _section(kind, value):
        return None if value is None and section is not kind else build(section, value, where, base)
    if get_origin(kind) is tuple and is_dataclass(get_args(kind)[0]):
        if not isinstance(value, list):
            raise ConfigError(f"{where}: must be a list")
        return tuple(convert(item, get_args(kind)[0], f"{where}[{index}]", base) for index, item in enumerate(value))

    if get_origin(kind) is Mapping and is_dataclass(get_args(kind)[1]):
        entries, item_kind = as_mapping(value, where), get_args(kind)[1]
        return read_each(entries, lambda name, item: convert(item, item_kind, f"{where}.{name}", base))

    def special(wanted: type, item: Any) -> Any:
        if issubclass(wanted, Path) and isinstance(item, str):
            return (base / Path(item).expanduser()).resolve()
        raise ConfigError(f"{where}: {item!r} is not a {wanted.__name__.lower()}")

    if missing := _unresolved(value):
        raise ConfigError("\n".join(missing))
    if value is False and "off" in _choices(kind):
        return "off"  # YAML 1.1 takes the word for a boolean
    if kind is Lane:
        return parse_lane(value, where)
    if isinstance(value, str) and kind in (int, int | None):
        with suppress(ValueError):  # msgspec reports the problem below
            value = parse_count(value)
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=special)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from error
        if choices := _choices(kind):  # msgspec would quote the value, which may be a misplaced secret
            raise ConfigError(f"{where}: must be one of {', '.join(choices)}") from None
        raise ConfigError(f"{where}: {error}".replace("`", "")) from error


def _section(kind: Any, value: Any) -> type | None:
    """Return the dataclass D if the type `kind` is D or `D | None`, or if it is another union with D and `value` is a
    mapping, otherwise None."""
    is_union = get_origin(kind) in (UnionType, Union)
    kinds = [each for each in get_args(kind) if each is not NoneType] if is_union else [kind]
    sections = [each for each in kinds if isinstance(each, type) and is_dataclass(each)]
    return sections[0] if sections and (len(kinds) == 1 or isinstance(value, dict)) else None


def _choices(kind: Any) -> list[str]:
    """Return the values that a type accepts if it is a Literal or a union with one, in which bool adds true and false.
    For any other type the list is empty."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    kinds = get_args(kind) if get_origin(kind) in (UnionType, Union) else ()
    literal = [choice for each in kinds for choice in _choices(each)]
    return ["true", "false", *literal] if literal and bool in kinds else literal


def parse_lane(value: Any, where: str) -> Lane:
    names = [member.name.lower() for member in Lane]
    if value not in names:
        raise ConfigError(f"{where}: must be one of {', '.join(names)}, not {value!r}")
    return Lane[value.upper()]
