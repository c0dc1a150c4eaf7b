"""What any language's gRPC client does with loralane.v1: it finds the service through reflection, and waits where the
server says that waiting helps."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.e2e.behaviour.reply import Reply
from tests.e2e.reflected import ReflectedClient

SERVICE = "loralane.v1.Generation"
MODES = {"auto": "MODE_AUTO", "none": "MODE_NONE", "required": "MODE_REQUIRED"}
FINISHES = {"FINISH_REASON_STOP": "stop", "FINISH_REASON_LENGTH": "length", "FINISH_REASON_TOOL_CALLS": "tool_calls"}
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class Refused(Exception):
    """Attributes:
    status_code: HTTP's word for the status.
    """

    def __init__(self, error: grpc.RpcError) -> None:
        super().__init__(error.details())
        self.status_code = STATUSES[error.code()]


class Grpc:
    module = "grpc"
    streams_several = True
    of_chats = True

    def __init__(self, url: str, key: str, retries: int) -> None:
        self._reflected = ReflectedClient(url, key)
        self._retries = retries
        self.answered: list[int] = []

    async def chat(self, **body: Any) -> Reply:
        return await asyncio.to_thread(self._ask, "Generate", body)

    async def stream(self, **body: Any) -> Reply:
        return await asyncio.to_thread(self._ask, "GenerateStream", body)

    async def aclose(self) -> None:
        self._reflected.close()

    def _ask(self, method: str, body: dict[str, Any]) -> Reply:
        for attempt in range(self._retries + 1):
            try:
                reply = _collect(list(self._reflected.call(SERVICE, method, request_of(body))))
            except grpc.RpcError as error:
                refused, wait = Refused(error), _wait(error)
                self.answered.append(refused.status_code)
                if wait is None or attempt == self._retries:
                    raise refused from error
                time.sleep(wait)
            else:
                self.answered.append(200)
                return reply
        raise AssertionError("the last attempt returns or raises")


def _wait(error: grpc.RpcError) -> float | None:
    """Seconds after which the server expects the same request to succeed; None: it never will."""
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None


def request_of(body: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's body as a GenerateRequest."""
    sampling = {name: body[name] for name in ("seed", "temperature", "stop") if name in body}
    limits = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    sampling |= {"max_tokens": limits[0]} if limits else {}
    sampling |= {"logprobs": body["top_logprobs"]} if body.get("logprobs") else {}
    chat = {"messages": [_message(message) for message in body["messages"]]}
    chat |= {"tools": [_tool(tool["function"]) for tool in body.get("tools", [])]}
    chat |= {"tool_choice": _choice(body["tool_choice"])} if "tool_choice" in body else {}
    chat |= {name: body[name] for name in ("parallel_tool_calls",) if name in body}
    request = {"model": body["model"], "chat": chat, "sampling": sampling, "n": body.get("n", 1)}
    if "response_format" in body:
        request["structured_outputs"] = {"json": json.dumps(body["response_format"]["json_schema"]["schema"])}
    return request


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "parameters": json.dumps(function["parameters"])}


def _choice(choice: str | dict[str, Any]) -> dict[str, Any]:
    return {"mode": MODES[choice]} if isinstance(choice, str) else {"name": choice["function"]["name"]}


def _collect(messages: list[dict[str, Any]]) -> Reply:
    """A unary answer holds its choices in one message, a stream news of one choice in each."""
    reply = Reply(pieces=len(messages))
    for message in messages:
        if usage := message.get("usage"):
            reply.usage = usage.get("prompt_tokens", 0), usage["completion_tokens"]
        for choice in message.get("choices") or [message["choice"]]:
            _absorb(reply, choice)
    return reply


def _absorb(reply: Reply, choice: dict[str, Any]) -> None:
    known, text = reply.choices[choice.get("index", 0)], choice.get("text", "")
    known.text += text
    known.finish = FINISHES.get(choice.get("finish_reason"), known.finish)
    entries = [(entry["token"], len(entry.get("top", []))) for entry in choice.get("logprobs", [])]
    known.logprobs += [entry for entry in entries if entry[0] in text]  # a stop token has one, and no text
    for call in choice.get("tool_calls", []):
        known.calls[call.get("index", 0)][0] += call.get("name", "")
        known.calls[call.get("index", 0)][1] += call.get("arguments", "")
