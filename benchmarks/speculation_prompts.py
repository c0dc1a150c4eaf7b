"""Requests whose answers can be proposed, or not: of `make bench-speculation`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle

from tokenizers import Tokenizer

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import Request, SamplingParams
from lab.demo.questions import plain_pairs

PEOPLE = ("Ada Lovelace", "Alan Turing", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov", "Donald Knuth")
TEXT = """Order {n}42 was placed by {who} on 3 March and delivered to 17 Harbour Street, Bristol, on 9 March.
The parcel held two copper kettles, a set of six glasses and a table lamp with a green shade.
{who} reported that one of the glasses had arrived broken and asked for a replacement to be sent to the same address.
The replacement for order {n}42 left the warehouse on 12 March and is expected within four working days."""
CODE = """def total_{n}(orders, rate):
    result = 0.0
    for order in orders:
        if order.is_paid:
            result += order.amount * (1.0 + rate)
        else:
            result += order.amount
    return round(result, 2)


def largest_{n}(orders):
    best = orders[0]
    for order in orders[1:]:
        if order.amount > best.amount:
            best = order
    return best


def by_customer_{n}(orders):
    groups = {{}}
    for order in orders:
        groups.setdefault(order.customer, []).append(order)
    return groups
"""
FIELDS = {
    "order_number": {"type": "string", "pattern": "[0-9]{2,6}"},
    "customer_name": {"type": "string"},
    "delivery_address": {"type": "string"},
    "delivered_on": {"type": "string"},
    "products": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"product_name": {"type": "string"}, "quantity": {"type": "integer"}},
            "required": ["product_name", "quantity"],
            "additionalProperties": False,
        },
        "maxItems": 4,
    },
    "problem_reported": {"type": "string"},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
MOST = 128
KINDS = ("extraction", "code edit", "predicted edit", "JSON", "chat")
GRAMMARS = {"JSON": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def prompts(kind: str) -> Iterator[str]:
    """Yield prompts of one kind, without end."""
    people, questions = cycle(PEOPLE), cycle(question for question, _ in plain_pairs())
    for number in range(1, 1 << 30):
        who = next(people)
        if kind == "extraction":
            yield CHAT.format(f"{TEXT.format(n=number, who=who)}\n\nQuote the text above in full, word by word.")
        elif kind == "JSON":
            asked = f"Describe it in JSON, with the fields {', '.join(FIELDS)}."
            yield CHAT.format(f"{TEXT.format(n=number, who=who)}\n\n{asked}")
        elif kind in ("code edit", "predicted edit"):
            code = CODE.format(n=number)
            yield CHAT.format(f"Rename order to item in this file and return all of it:\n\n{code}") + _begun(code)
        else:
            yield CHAT.format(f"{next(questions)} Explain your answer in detail, {who.split()[0]} is listening.")


def _begun(code: str) -> str:
    """Return the first function of the answer to a code edit. Without it, the embedded model explains the code."""
    return code.replace("order", "item").partition("def largest")[0]


def make_request(tokenizer: Tokenizer, name: str, kind: str, text: str) -> Request:
    """Return a greedy request; that of a predicted edit has the file to edit as its prediction."""
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    params = SamplingParams(MOST, temperature=0.0, grammar=GRAMMARS.get(kind))
    predicted = (
        text.partition("return all of it:\n\n")[2].partition("<|im_end|>")[0] if kind == "predicted edit" else ""
    )
    return Request(name, tokens, params, prediction=tuple(tokenizer.encode(predicted, add_special_tokens=False).ids))
