"""Attacks by bodies whose values are many, deep, alike or long, and by answers with many log probabilities."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import grpc

from tests.attack.attacker import Attack, Attacker

CHAT = "/v1/chat/completions"
HERE = '"HERE"'
MANY = 2_000_000
"""Members of a list that fits into a body of 8 MiB."""


def many(member: str, count: int = MANY) -> str:
    return f"[{','.join([member] * count)}]"


async def post(attacker: Attacker, path: str, text: str = "0", **fields: Any) -> str:
    """Send a body in which `text` replaces the word HERE. Returns the status."""
    body = json.dumps(attacker.body(**fields)).replace(HERE, text)
    answer = await attacker.http.post(path, content=body, headers={"content-type": "application/json"})
    return str(answer.status_code)


async def colliding_ids(attacker: Attacker, count: int = 25_000) -> Counter[str]:
    """Bias `count` token ids that all have the hash 0."""
    ids = {str((2**61 - 1) * (number + 1)): 1 for number in range(count)}
    return Counter([await attacker.chat(logit_bias=ids)])


async def values_in_arguments(attacker: Attacker) -> Counter[str]:
    """Send histories whose calls have arguments of millions of lists: in one text, and in eighty."""
    answers: Counter[str] = Counter()
    for count in (1, 80):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "HERE"}}
        history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call] * count}]
        arguments = json.dumps(f'{{"a":{many("[]", MANY // count)}}}')
        answers[await post(attacker, CHAT, arguments, messages=history)] += 1
    return answers


async def values_in_fields(attacker: Attacker) -> Counter[str]:
    """Send millions of values in schemas, template variables, tools and fields of a wrong type."""
    text = many("[]")
    objects = many('{"a":1}', MANY // 2)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": "HERE"}}}
    return Counter(
        [
            await post(attacker, CHAT, objects, guided_json={"enum": "HERE"}),
            await post(attacker, CHAT, json.dumps(text), guided_json="HERE"),
            await post(attacker, CHAT, text, chat_template_kwargs={"a": "HERE"}),
            await post(attacker, CHAT, objects, tools=[tool]),
            await post(attacker, CHAT, text, timeout="HERE"),
            await post(attacker, "/v1/responses", text, input="HERE"),
            await post(attacker, "/v1/messages", objects, messages="HERE"),
            await post(attacker, "/tokenize", text, messages="HERE"),
        ]
    )


async def allowed_values(attacker: Attacker, count: int = 13_000) -> Counter[str]:
    """Send as many messages, parts and tools as are just allowed."""
    message, part = '{"role":"user","content":""}', '{"type":"text","text":""}'
    tools = ",".join(f'{{"type":"function","function":{{"name":"f{n}"}}}}' for n in range(count // 2))
    return Counter(
        [
            await post(attacker, CHAT, many(message, count), messages="HERE"),
            await post(attacker, CHAT, many(part, count), messages=[{"role": "user", "content": "HERE"}]),
            await post(attacker, CHAT, f"[{tools}]", tools="HERE"),
            await post(attacker, "/v1/responses", many(message, count), input="HERE"),
        ]
    )


async def long_values(attacker: Attacker) -> Counter[str]:
    """Send texts of 8 MiB that are eight million tokens, long numbers, many token ids, and deep nesting."""
    words = json.dumps("a " * 4_000_000)
    return Counter(
        [
            await post(attacker, "/v1/completions", words, prompt="HERE"),
            await post(attacker, "/tokenize", words, prompt="HERE"),
            await post(attacker, CHAT, words, messages=[{"role": "HERE", "content": ""}]),
            await post(attacker, CHAT, many("9" * 4000, 2000), stop_token_ids="HERE"),
            await post(attacker, "/v1/completions", many("5", 400_000 - 1000), prompt="HERE"),
            await post(attacker, CHAT, "[" * 50_000, guided_json="HERE"),
        ]
    )


async def many_grpc_messages(attacker: Attacker) -> Counter[str]:
    """Send a message with four million empty chat messages, and one with eight million token ids."""
    size = 8 * 2**20 - 64
    bodies = (_field(2, b"\x0a\x00" * (size // 2)), _field(4, _field(1, b"\x01" * size)))
    metadata = (("authorization", f"Bearer {attacker.key}"),)
    answers: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(attacker.grpc_target) as channel:
        generate = channel.unary_unary("/loralane.v1.Generation/Generate")
        for body in bodies:
            try:
                await generate(body, metadata=metadata)
                answers["OK"] += 1
            except grpc.aio.AioRpcError as error:
                answers[error.code().name] += 1
    return answers


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of a protobuf message."""
    length, written = len(content), bytearray([number << 3 | 2])
    while length > 127:
        written.append(length & 127 | 128)
        length >>= 7
    return bytes([*written, length]) + content


async def many_log_probabilities(attacker: Attacker, answers: int = 8, tokens: int = 400) -> Counter[str]:
    """Ask for whole answers with 20 log probabilities of each token."""
    wanted = {"n": answers, "max_tokens": tokens, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    return Counter([await attacker.chat(**wanted)])


ATTACKS: Mapping[str, Attack] = {
    "token ids of one hash": colliding_ids,
    "millions of values in arguments": values_in_arguments,
    "millions of values in fields": values_in_fields,
    "as many values as allowed": allowed_values,
    "long texts and numbers": long_values,
    "millions of gRPC messages": many_grpc_messages,
    "many log probabilities": many_log_probabilities,
}
