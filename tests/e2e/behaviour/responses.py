"""Chats as requests to /v1/responses, and the answers to these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.e2e.behaviour.reply import Reply

SAME = ("model", "temperature", "parallel_tool_calls", "top_logprobs", "extra_body")


def response_body(body: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's body as one of /v1/responses, which has no seed."""
    asked = {name: body[name] for name in SAME if name in body}
    asked["input"] = [item for message in body["messages"] for item in _items(message)]
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    asked |= {"max_output_tokens": limits[0]} if limits else {}
    asked |= {"tools": [_flat(tool) for tool in body["tools"]]} if "tools" in body else {}
    if "tool_choice" in body:
        choice = body["tool_choice"]
        asked["tool_choice"] = choice if isinstance(choice, str) else _flat(choice)
    if "response_format" in body:
        asked["text"] = {"format": {"type": "json_schema", **body["response_format"]["json_schema"]}}
    return asked


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool["type"], **tool["function"]}


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        return
    if message["content"]:
        yield {"role": message["role"], "content": message["content"]}
    for call in message.get("tool_calls", []):
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def read_response(response: Any) -> Reply:
    reply = Reply(usage=(response.usage.input_tokens, response.usage.output_tokens))
    known = reply.choices[0]
    for item in response.output:
        if item.type == "function_call":
            known.calls[len(known.calls)] = [item.name, item.arguments]
            continue
        [part] = item.content
        known.text += part.text
        known.logprobs += [(entry.token, len(entry.top_logprobs)) for entry in part.logprobs]
    known.finish = "length" if response.status == "incomplete" else "tool_calls" if known.calls else "stop"
    return reply
