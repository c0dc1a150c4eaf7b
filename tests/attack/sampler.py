"""Attacks by requests whose tokens or prompts take the engine long: wide nuclei, and log probabilities of prompts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from tests.attack.attacker import Attack, Attacker

WORD = " sea"
"""A text that is one token of the demo's model."""


async def wide_nuclei(attacker: Attacker, count: int = 30, tokens: int = 200) -> Counter[str]:
    """Send `count` chats at once, each of which draws `tokens` tokens from a nucleus of most of the vocabulary."""
    wide = {"top_p": 0.999, "temperature": 2.0, "ignore_eos": True, "max_tokens": tokens}
    return Counter(await asyncio.gather(*[attacker.chat(seed=number, **wide) for number in range(count)]))


async def scored_prompts(attacker: Attacker, count: int = 20, length: int = 1500) -> Counter[str]:
    """Send `count` different prompts of `length` tokens at once, and ask for the log probabilities of their tokens with
    5 alternatives each. Two cores compute one of them in some three seconds."""

    async def one(number: int) -> str:
        body = {"model": attacker.model, "prompt": f"{number}" + WORD * length, "max_tokens": 1}
        answer = await attacker.http.post("/v1/completions", json={**body, "echo": True, "logprobs": 5})
        return str(answer.status_code)

    return Counter(await asyncio.gather(*[one(number) for number in range(count)]))


ATTACKS: Mapping[str, Attack] = {"wide nuclei": wide_nuclei, "scored prompts": scored_prompts}
