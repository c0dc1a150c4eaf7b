"""Makes up tools with parameters from a list, which create records or extract facts, so that any name can be a tool and
any word a parameter."""

from __future__ import annotations

import random

from lab.demo.tools.kinds import Parameter, Tool, ToolKind, make_tool
from lab.demo.tools.values import ENDS, STARTS

VERBS = ("create", "add", "register", "update", "save", "log", "submit", "open", "start", "record")
NOUNS = (
    "invoice", "project", "booking", "account", "report", "shipment", "recipe", "campaign", "student", "employee",
    "device", "server", "loan", "trip", "workout", "meal", "lesson", "contract", "offer", "claim", "ticket", "member",
    "vehicle", "sample", "visit", "complaint", "playlist", "donation", "survey", "repair",
)  # fmt: skip
FIELDS = (
    ("name", "person"), ("customer", "person"), ("owner", "person"), ("title", "title"), ("amount", "float:1:5000"),
    ("price", "float:1:900"), ("quantity", "int:1:90"), ("age", "int:1:99"), ("city", "city"), ("country", "country"),
    ("date", "day"), ("start_time", "time"), ("color", "colour"), ("email", "email"), ("phone", "phone"),
    ("company", "company"), ("language", "language"), ("duration_minutes", "int:5:240"), ("code", "code"),
    ("priority", "enum:low,medium,high"), ("size", "enum:small,medium,large"), ("status", "enum:open,closed,paused"),
    ("room", "room"), ("team", "team"), ("topic", "topic"), ("weight", "float:1:200"), ("count", "int:1:500"),
    ("address", "street"), ("currency", "currency"), ("product", "item"), ("rating", "int:1:10"),
    ("year", "int:1900:2030"),    ("score", "float:0:100"), ("level", "int:1:50"), ("job", "job"),
    ("genre", "genre"), ("note", "message"),
    ("ingredients", "list"), ("pet", "animal"),
)  # fmt: skip
HELD_OUT_FIELDS = (
    ("patient", "person"), ("weight_kg", "float:30:140"), ("model_year", "int:1980:2030"), ("mileage", "int:100:99999"),
    ("maker", "company"), ("town", "city"), ("profession", "job"), ("supplies", "list"), ("serial_number", "code"),
    ("deadline", "day"), ("budget", "float:10:9000"), ("manager", "person"), ("paint", "colour"), ("floor", "int:1:40"),
    ("mood", "enum:happy,sad,angry"), ("contact_email", "email"),
)  # fmt: skip
HELD_OUT_NOUNS = ("car", "patient", "apartment", "machine", "concert", "expense", "order", "garden", "voyage", "exam")

EXTRACTIONS = ("final_result", "final_result", "CLASS", "CLASS", "extract_NOUN", "extract", "answer", "output")
EXTRACTION_ABOUT = (
    "The final response which ends this conversation",
    "Correctly extracted `CLASS` with all the required parameters with correct types",
    "Extract the NOUN from the text.",
    "Return the result.",
    "CLASS",
)
FACTS = {
    "name": ("{0} is the name", "the name is {0}", "it is called {0}"),
    "age": ("is {0} years old", "the age is {0}", "aged {0}"),
    "city": ("lives in {0}", "the city is {0}", "from {0}"),
    "email": ("can be reached at {0}", "email {0}"),
    "job": ("works as a {0}", "the job is {0}"),
    "price": ("costs {0} dollars", "the price is {0}"),
    "color": ("comes in {0}", "the color is {0}"),
    "company": ("works for {0}", "the company is {0}"),
    "date": ("takes place on {0}", "the date is {0}"),
    "year": ("published in {0}", "from the year {0}"),
    "title": ("the title is {0}", 'it is called "{0}"'),
    "quantity": ("there are {0} of them", "quantity {0}"),
    "language": ("speaks {0}", "the language is {0}"),
    "country": ("comes from {0}", "the country is {0}"),
    "rating": ("gets {0} of 10 points", "rated {0}"),
}
"""Field -> phrases that state it, with the value in slot 0. A field that is missing here is stated by its name."""

PEOPLE = (
    "{0} is {1} years old[ and lives in {2}][, works as a {3}].",
    "My name is {0}, I am {1}[ and I live in {2}][. I am a {3}].",
    "{0}, {1}[, {2}][, {3}]",
    "Extract: {0} is a {1} year old[ {3}][ from {2}].",
    "Meet {0}, aged {1}[, of {2}][. Job: {3}].",
)
PERSON_PARAMETERS = (
    Parameter(("name", "full_name"), "person", ("The person's name",)),
    Parameter(("age",), "int:1:99", ("Age in years",)),
    Parameter(("city", "location"), "city", ("Where the person lives",), optional=True),
    Parameter(("job", "occupation"), "job", ("What the person does",), optional=True),
)


def made_up_tool(rng: random.Random, *, held_out: bool = False) -> Tool:
    """Draw a tool that creates or changes a record with one to four fields. With `held_out`, its noun and fields are
    those that training does not use."""
    noun, fields = _chosen(rng, held_out)
    verb = rng.choice(VERBS)
    words = [name.replace("_", " ") for name, _ in fields]
    lead = rng.choice((f"{verb.capitalize()} a {noun}", f"I want to {verb} a {noun}", f"Please {verb} a new {noun}"))
    slots = [f"{word} {{{i}}}" for i, word in enumerate(words)]
    mentioned = [f"the {word} is {{{i}}}" for i, word in enumerate(words)]
    requests = (
        f"{lead} with {_listed(slots)}.",
        f"{lead}: {', '.join(slots)}.",
        f"{lead}. {_sentence(mentioned)}",
        f"{verb} {noun}, " + ", ".join(f"{word}: {{{i}}}" for i, word in enumerate(words)),
    )
    names = (f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}", f"{verb}_new_{noun}")
    about = (f"{verb.capitalize()} a {noun}.", f"Use this to {verb} a {noun} in the system.", "")
    return make_tool(ToolKind(names, about, _parameters(fields), requests), rng)


def extraction_tool(rng: random.Random, *, held_out: bool = False) -> Tool:
    """Draw a tool whose call only structures the facts of a text. A third are about a person; with `held_out` none, and
    noun and fields are others than in training."""
    person = not held_out and rng.random() < 0.35
    noun, fields = ("person", ()) if person else _chosen(rng, held_out)
    kind = _person_kind(rng) if person else ToolKind((), (), _parameters(fields), _facts(rng, noun, fields))
    class_name = rng.choice(("User", "Person", "UserInfo", "Contact")) if person else _class_name(rng, noun)

    def filled(text: str) -> str:
        return text.replace("CLASS", class_name).replace("NOUN", noun)

    names = (filled(rng.choice(EXTRACTIONS)),)
    return make_tool(ToolKind(names, tuple(map(filled, EXTRACTION_ABOUT)), kind.parameters, kind.requests), rng)


def _person_kind(rng: random.Random) -> ToolKind:
    return ToolKind((), (), PERSON_PARAMETERS[: rng.choice((2, 2, 3, 4))], PEOPLE)


def _facts(rng: random.Random, noun: str, fields: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    said = [_fact(rng, name, i) for i, (name, _) in enumerate(fields)]
    plain = [f"{name.replace('_', ' ')} {{{i}}}" for i, (name, _) in enumerate(fields)]
    return (
        f"Extract the {noun}: {', '.join(said)}.",
        f"{_sentence(said)} What do we know about the {noun}?",
        f"Here is a {noun} with {_listed(plain)}.",
        f"A {noun}: {', '.join(plain)}",
        _sentence(said),
    )


def _fact(rng: random.Random, name: str, index: int) -> str:
    word = name.replace("_", " ")
    forms = FACTS.get(name, (f"the {word} is {{0}}", f"{word} {{0}}", f"its {word} is {{0}}"))
    return rng.choice(forms).replace("{0}", f"{{{index}}}")


def _chosen(rng: random.Random, held_out: bool) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Draw the noun of a made-up tool and one to four fields, each a name and a kind of value, from the training or the
    held-out lists; in training, some nouns are invented."""
    count = rng.choice((1, 2, 2, 3, 3, 4))
    if held_out:
        return rng.choice(HELD_OUT_NOUNS), tuple(rng.sample(HELD_OUT_FIELDS, count))
    noun = rng.choice(NOUNS) if rng.random() < 0.7 else rng.choice(STARTS) + rng.choice(ENDS)
    return noun, tuple(rng.sample(FIELDS, count))


def _parameters(fields: tuple[tuple[str, str], ...]) -> tuple[Parameter, ...]:
    return tuple(Parameter((name,), kind, (f"The {name.replace('_', ' ')}",)) for name, kind in fields)


def _class_name(rng: random.Random, noun: str) -> str:
    return noun.capitalize() + rng.choice(("", "", "Info", "Details"))


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _sentence(parts: list[str]) -> str:
    text = _listed(parts)
    return f"{text[0].upper()}{text[1:]}."
