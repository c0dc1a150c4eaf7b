"""Grammar of a call in Qwen3-Coder's dialect: each parameter is a text between marks, as its schema allows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from engine.grammar_check.source import inline_schema
from gateway.text.reasoning.grammar import text_term
from gateway.text.tools.arguments import EMPTY, arguments_of
from gateway.text.tools.frame import Json, Rules
from gateway.text.tools.schemas import NOTES, Schema

PARAMETER, END_VALUE = "<parameter=", "</parameter>"
LAST = f"\n{END_VALUE}\n"
ANY = r"/(.|\n)*/"
LENGTHS = frozenset(("minLength", "maxLength"))
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9-]{1,63}\.){1,4}[A-Za-z]{2,63}",
}
"""Regular expressions of the values of `format` that a tool's schema may use: dates and times as in RFC 3339, UUIDs and
common e-mail addresses."""
WORDS = {"boolean": '("true" | "false" | "True" | "False")', "null": '("null" | "None")'}


def _without(mark: str) -> str:
    """Return the regular expression of texts without `mark`, whose first character must not occur in it again."""
    # With the negation `~` in its place, llguidance looks through all lengths of a text at each end mark, and gives up
    # at about 100.
    first, begun, other = re.escape(mark[0]), "", ""
    for at in range(len(mark) - 1, 0, -1):
        following = mark[at].replace("/", r"\/")
        other = f"([^{first}{following}]{f'|{following}{other}' if other else ''})"
        begun = f"({following}{begun})?" if at < len(mark) - 1 else ""
    return f"/([^{first}]|({first}{begun})*{first}{other})*({first}{begun})*/"


def xml_call(name: str, schema: Json, rules: Rules) -> str:
    """Return the expression for a call, without its marks. Parameters come in the schema's order; a schema that names
    none allows any. Raises ValueError: the schema has a keyword that no grammar of this dialect can follow."""
    head = rules.text(f"<function={name}>\n")
    arguments = arguments_of(Schema(schema, schema).resolved())
    if arguments is None:
        key = rules.add(r"/[^<>\n]{1,64}/", terminal=True)
        return f"{head} ({text_term(PARAMETER)} {key} {text_term('>' + chr(10))} {_free(ANY, rules)})*"
    terms = []
    for key, inner, required in arguments:
        if not key or set("<>\n") & set(key):
            raise ValueError(f"the name of the property {key[:80]!r} cannot be written in calls of this model")
        term = rules.add(f"{text_term(f'{PARAMETER}{key}>' + chr(10))} {_value(inner, rules)}")
        terms.append(term if required else f"{term}?")
    return " ".join([head, *terms])


def _value(schema: Schema, rules: Rules) -> str:
    """Return the expression for a value with the end mark after it."""
    options = schema.alternatives()
    texts = [one for one in options if _is_text(one)]
    if texts and any(one.keywords - {"type"} for one in options if one not in texts and one.values is None):
        raise ValueError("a text beside bounded values of other types cannot be told apart in calls of this model")
    terms = [_free(_text(one), rules) if one in texts else f"{_exact(one)} {text_term(LAST)}" for one in options]
    return f"({' | '.join(terms)})"


def _is_text(schema: Schema) -> bool:
    """Return whether the schema allows free text: any string, or any value at all, whose type is then guessed from its
    text."""
    return schema.values is None and (
        not schema.keywords or (isinstance(schema.body, Mapping) and schema.body.get("type") == "string")
    )


def _text(schema: Schema) -> str:
    """Return the regular expression of a text of the schema's lengths and format. Raises ValueError if it has other
    keywords, or a format that is not in `FORMATS`."""
    schema.check_keywords(frozenset(("type", "format", *LENGTHS)))
    parts = []
    if "format" in schema.keywords:
        if (form := FORMATS.get(str(schema.body["format"]))) is None:
            raise ValueError(f"the format {schema.body['format']!r} is not supported in calls of this model")
        parts.append(f"/{form}/")
    if LENGTHS & schema.keywords:
        least, most = int(schema.body.get("minLength", 0)), schema.body.get("maxLength")
        parts.append(rf"/(.|\n){{{least},{'' if most is None else int(most)}}}/")
    return " & ".join(parts) or ANY


def _free(text: str, rules: Rules) -> str:
    """Return the name of the terminal that matches the regular expression `text`, without the end mark inside, and the
    end mark after it."""
    return rules.once(f"text {text}", lambda: f"({text} & {_without(END_VALUE)}) {json.dumps(LAST)}", terminal=True)


def _exact(schema: Schema) -> str:
    """Return the grammar expression of a value that is no free text: listed values, a boolean or null, or JSON."""
    if schema.values is not None:
        return f"({' | '.join(text_term(_written(value)) or EMPTY for value in schema.values)})"
    body = schema.body if isinstance(schema.body, Mapping) else {}
    if word := WORDS.get(str(body.get("type"))):
        return word
    return inline_schema({**{key: value for key, value in body.items() if key not in NOTES}, **_definitions(schema)})


def _written(value: Any) -> str:
    """Return one of the allowed values as the model writes it. Raises ValueError: it is a text with the end mark."""
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if END_VALUE in written:
        raise ValueError(f"the value {short(value)} cannot be written in calls of this model")
    return written


def _definitions(schema: Schema) -> dict[str, Any]:
    """Return `$defs` and `definitions` of the schema's document, which its `$ref`s may name."""
    return {key: schema.root[key] for key in ("$defs", "definitions") if key in schema.root}
