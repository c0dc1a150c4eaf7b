"""Prompts whose answers can be checked, easy and hard ones mixed: extraction, JSON by a schema, sums, dates, totals.

All are generated from a seed: names, places and numbers differ between seeds. EASY kinds are what the small member of
benchmarks/routing.py was trained with, HARD ones only the large member.
"""

from __future__ import annotations

import calendar
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

FIRST = "Ada Ben Carla David Elena Felix Greta Hugo Irene Jonas Karin Leo Maria Nils Olga Paul Rosa Simon Tara Victor"
LAST = "Adler Bauer Costa Diaz Evans Fischer Garcia Hansen Ivanov Jensen Keller Lopez Meyer Novak Olsen Peters Rossi"
CITIES = "Lisbon Madrid Rome Berlin Athens Dublin Oslo Vienna Warsaw Prague Paris London Cairo Delhi Lima Tokyo Boston"
ITEMS = "lamps chairs books plates clocks tables shirts knives cups boxes pens bikes ropes tents maps radios"
MONTHS = tuple(calendar.month_name)[1:]
FIELDS = ("customer", "city", "item", "count", "price")
QUESTIONS = {
    "customer": "Who is the customer?",
    "city": "In which city does the customer live?",
    "item": "What was bought?",
    "count": "How many were bought?",
    "price": "What is the price of one in euros?",
}


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its only right answer."""

    kind: str
    prompt: str
    answer: str

    def is_right(self, text: str) -> bool:
        """Return whether an answer is right: the same text, or the same JSON."""
        if self.kind.startswith("json"):
            return same_json(text, self.answer)
        return text.strip().rstrip(".").strip() == self.answer


def same_json(text: str, answer: str) -> bool:
    try:
        return bool(json.loads(text) == json.loads(answer))
    except ValueError:
        return False


def order(rng: random.Random) -> dict[str, str | int]:
    name = f"{rng.choice(FIRST.split())} {rng.choice(LAST.split())}"
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    return dict(zip(FIELDS, (name, rng.choice(CITIES.split()), rng.choice(ITEMS.split()), count, price), strict=True))


def note(values: Mapping[str, str | int], rng: random.Random) -> str:
    forms = (
        "{customer} from {city} ordered {count} {item} at {price} euros each.",
        "Order of {count} {item}, {price} euros each, for {customer} in {city}.",
        "{customer} ({city}): {count} {item}, {price} euros each.",
    )
    return rng.choice(forms).format(**values)


def pick(rng: random.Random) -> Task:
    values, field = order(rng), rng.choice(FIELDS)
    return Task("pick", f"{note(values, rng)} {QUESTIONS[field]}", str(values[field]))


def json_few(rng: random.Random) -> Task:
    values, fields = order(rng), rng.sample(FIELDS, 2)
    return Task("json", f"{note(values, rng)} JSON: {', '.join(fields)}", json.dumps({f: values[f] for f in fields}))


def sum_short(rng: random.Random) -> Task:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    return Task("sum", f"What is {a} + {b}?", str(a + b))


def sum_long(rng: random.Random) -> Task:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    return Task("sum_long", f"What is {a} + {b}?", str(a + b))


def total(rng: random.Random) -> Task:
    values = order(rng)
    return Task(
        "total", f"{note(values, rng)} What is the total in euros?", str(int(values["count"]) * int(values["price"]))
    )


def date(rng: random.Random) -> Task:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(2000, 2029)
    forms = (f"{day} {MONTHS[month - 1]} {year}", f"{MONTHS[month - 1]} {day}, {year}")
    return Task("date", f"Write the date in digits: {rng.choice(forms)}", f"{year}-{month:02}-{day:02}")


def json_all(rng: random.Random) -> Task:
    values = order(rng)
    shaped = {"who": {"name": values["customer"], "city": values["city"]}, "what": {k: values[k] for k in FIELDS[2:]}}
    return Task(
        "json_nested", f"{note(values, rng)} JSON: who (name, city), what (item, count, price)", json.dumps(shaped)
    )


Maker = Callable[[random.Random], Task]
EASY: tuple[Maker, ...] = (pick, json_few, sum_short)
HARD: tuple[Maker, ...] = (sum_long, total, date, json_all)


def tasks(count: int, seed: int, hard: float) -> list[Task]:
    """Return `count` different tasks, of which a share `hard` is of HARD kinds, in random order."""
    rng = random.Random(seed)
    found: dict[str, Task] = {}
    while len(found) < count:
        task = rng.choice(HARD if rng.random() < hard else EASY)(rng)
        found[task.prompt] = task
    return list(found.values())
