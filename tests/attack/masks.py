"""Attacks by grammars whose masks take long: sound grammars, of which each token costs many times the usual."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from tests.attack.attacker import Attack, Attacker


def slow_grammar(size: int) -> str:
    """Return a grammar in Lark's notation whose masks take, on one core, 3 ms with a `size` of 60, 35 ms with 120."""
    rules = "|".join(f"T{number} a" for number in range(size))
    terminals = "\n".join(f"T{number}: /[a-z]{{1,{number + 1}}}/" for number in range(size))
    return f"start: a\na: {rules}|\n{terminals}"


async def slow_masks(attacker: Attacker, count: int = 2, answers: int = 30, size: int = 80) -> Counter[str]:
    """Send `count` chats at once, each for as many `answers` as fill the slots of an engine, with one slow grammar."""
    fields = {"n": answers, "max_tokens": 12, "temperature": 1.0, "guided_grammar": slow_grammar(size)}
    return Counter(await asyncio.gather(*[attacker.chat(**fields) for _ in range(count)]))


async def many_slow_grammars(attacker: Attacker, count: int = 12) -> Counter[str]:
    """Send `count` chats at once, each with a slow grammar of its own."""
    chats = [attacker.chat(max_tokens=12, guided_grammar=slow_grammar(70 + number)) for number in range(count)]
    return Counter(await asyncio.gather(*chats))


ATTACKS: Mapping[str, Attack] = {
    "a grammar with slow masks and n = 30": slow_masks,
    "many grammars with slow masks": many_slow_grammars,
}
"""Attacks by name."""
