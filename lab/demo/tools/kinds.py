"""Reads kinds of tools from trained_tools.txt and held_out_tools.txt, and makes tools with varying names and
schemas."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.demo.tools.values import Value, Values, json_type

Json = dict[str, Any]

OPTIONAL_PART = re.compile(r"\[([^\]]*)\]")
SLOT = re.compile(r"\{(\d)\}")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kind of tool. Names and descriptions (`about`) are alternatives to choose from."""

    names: tuple[str, ...]
    kind: str
    """Kind of the parameter's values, as `Values.draw` takes it."""
    about: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ToolKind:
    """A kind of tool that training conversations offer, with alternative names, descriptions (`about`) and requests.
    These have slots such as {0} for values, and parts in [ ] for optional parameters."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """One concrete tool of a kind, as a conversation offers it: with a name, names of parameters and a JSON schema."""

    kind: ToolKind
    name: str
    parameter_names: tuple[str, ...]
    all_required: bool
    """True means that every parameter is required, as in OpenAI's strict schemas. Requests then name all parameters
    where one of the kind's requests can."""
    schema: Json
    """The tool as an API request lists it in `tools`."""

    def ask(self, values: Values) -> tuple[str, Json]:
        """Draw a request for this tool. Return its text and the right call's arguments: those that the text names."""
        parameters = self.kind.parameters
        drawn = _drawn(parameters, values)
        wanted = [not p.optional or self.all_required or values.rng.random() < 0.4 for p in parameters]
        usable = [request for request in self.kind.requests if _says(request, wanted)] or list(self.kind.requests)
        request = values.rng.choice(usable)
        said = {int(slot) for slot in SLOT.findall(request)}
        given = {i for i in said if i < len(wanted) and wanted[i]}
        text = OPTIONAL_PART.sub(lambda part: part[1] if _slots(part[1]) <= given else "", request)
        text = SLOT.sub(lambda slot: drawn[int(slot[1])].text, text)
        return text, {self.parameter_names[i]: drawn[i].json for i in sorted(given)}


def read_kinds(path: Path) -> list[ToolKind]:
    """Read the kinds of tools in a file, in the notation that the head of trained_tools.txt describes."""
    blocks = re.split(r"\n\s*\n", "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#")))
    return [_kind(block.strip().splitlines()) for block in blocks if block.strip()]


def make_tool(kind: ToolKind, rng: random.Random) -> Tool:
    """Make a tool of a kind with random names and descriptions and a random style of the JSON schema."""
    title = rng.random() < 0.3
    all_required = rng.random() < 0.25
    names = tuple(rng.choice(parameter.names) for parameter in kind.parameters)
    with_about = rng.random() < 0.6
    properties = {
        name: _property(parameter, name, rng, titled=title, about=with_about)
        for name, parameter in zip(names, kind.parameters, strict=True)
    }
    required = [n for n, p in zip(names, kind.parameters, strict=True) if all_required or not p.optional]
    name = rng.choice(kind.names)
    about = rng.choice(kind.about) if rng.random() < 0.9 else ""
    function = {"name": name, "description": about, "parameters": _object(properties, required, rng)}
    return Tool(kind, name, names, all_required, {"type": "function", "function": function})


def _object(properties: Json, required: list[str], rng: random.Random) -> Json:
    schema: Json = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if rng.random() < 0.4:
        schema["additionalProperties"] = False
    return schema if rng.random() < 0.7 else dict(reversed(schema.items()))


def _property(parameter: Parameter, name: str, rng: random.Random, *, titled: bool, about: bool) -> Json:
    schema: Json = json_type(parameter.kind)
    if parameter.optional and titled:  # as Pydantic writes a parameter with a default of None
        schema = {"anyOf": [schema, {"type": "null"}], "default": None}
    if about and parameter.about:
        schema["description"] = rng.choice(parameter.about)
    if titled:
        schema["title"] = name.replace("_", " ").title()
    return schema


def _kind(lines: list[str]) -> ToolKind:
    names, _, about = lines[0].partition(" :: ")
    parameters = tuple(_parameter(line) for line in lines[1:] if not line.startswith(">"))
    requests = tuple(line[2:] for line in lines if line.startswith("> "))
    return ToolKind(tuple(names.split("|")), tuple(about.split("|")), parameters, requests)


def _parameter(line: str) -> Parameter:
    names, _, rest = line.partition(" = ")
    kind, _, about = rest.partition(" : ")
    return Parameter(tuple(names.lstrip("?").split("|")), kind, tuple(about.split("|")), names.startswith("?"))


def _slots(text: str) -> set[int]:
    return {int(slot) for slot in SLOT.findall(text)}


def _says(request: str, wanted: list[bool]) -> bool:
    """Return whether a request has slots for all wanted parameters."""
    return {i for i, want in enumerate(wanted) if want} <= _slots(request)


def _drawn(parameters: tuple[Parameter, ...], values: Values) -> list[Value]:
    """Draw a value of each parameter's kind, in order. All values are different."""
    drawn: list[Value] = []
    for parameter in parameters:
        value = values.draw(parameter.kind)
        while any(value == other for other in drawn):
            value = values.draw(parameter.kind)
        drawn.append(value)
    return drawn
