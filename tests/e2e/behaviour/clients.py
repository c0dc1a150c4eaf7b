"""The clients people have, behind one face, so that one suite asks all of them the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any, Protocol

import openai

from tests.e2e.behaviour.grpc_client import Grpc
from tests.e2e.behaviour.reply import Reply
from tests.e2e.behaviour.responses import read_response, response_body


class Client(Protocol):
    module: str
    """What has to be installed."""
    streams_several: bool
    """Return whether a stream may have several choices."""
    of_chats: bool
    """Return whether the client sends chats, which may have stop strings and several answers."""

    def __init__(self, url: str, key: str, retries: int) -> None: ...

    async def chat(self, **body: Any) -> Reply: ...

    async def stream(self, **body: Any) -> Reply: ...

    async def aclose(self) -> None: ...


class OpenAi:
    module = "openai"
    streams_several = True
    of_chats = True

    def __init__(self, url: str, key: str, retries: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=retries)

    async def chat(self, **body: Any) -> Reply:
        return _read(await self._client.chat.completions.create(**body))

    async def stream(self, **body: Any) -> Reply:
        options = {"include_usage": True}
        return await _collect(await self._client.chat.completions.create(**body, stream=True, stream_options=options))

    async def aclose(self) -> None:
        await self._client.close()


class OpenAiResponses:
    """OpenAI's client on /v1/responses."""

    module = "openai"
    streams_several = False
    of_chats = False

    def __init__(self, url: str, key: str, retries: int) -> None:
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=retries)

    async def chat(self, **body: Any) -> Reply:
        return read_response(await self._client.responses.create(**response_body(body)))

    async def stream(self, **body: Any) -> Reply:
        async with self._client.responses.stream(**response_body(body)) as stream:
            events = [event async for event in stream]
        reply = read_response(events[-1].response)
        told = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(told) == reply.only.text
        reply.pieces = len(events)
        return reply

    async def aclose(self) -> None:
        await self._client.close()


class LiteLlm:
    module = "litellm"
    streams_several = False  # it does, but with one finish_reason for all
    of_chats = True

    def __init__(self, url: str, key: str, retries: int) -> None:
        self._litellm = import_module(self.module)
        self._options = {"api_base": url, "api_key": key, "max_retries": retries}

    async def chat(self, **body: Any) -> Reply:
        return _read(await self._litellm.acompletion(**self._asked(body)))

    async def stream(self, **body: Any) -> Reply:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return await _collect(await self._litellm.acompletion(**self._asked(body), **options))

    async def aclose(self) -> None:
        """What it keeps open it keeps for all."""

    def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**self._options, **body, "model": f"openai/{body['model']}"}


class LangChain:
    module = "langchain_openai"
    streams_several = False
    of_chats = True

    def __init__(self, url: str, key: str, retries: int) -> None:
        self._openai = import_module(self.module)
        self._options = {"base_url": url, "api_key": key, "max_retries": retries, "stream_usage": True}

    async def chat(self, **body: Any) -> Reply:
        model, messages, options = self._asked(body)
        [generations] = (await model.agenerate([messages], **options)).generations
        reply = Reply()
        for index, generation in enumerate(generations):
            _absorb(reply, index, generation.message, generation.generation_info)
        return reply

    async def stream(self, **body: Any) -> Reply:
        model, messages, options = self._asked(body)
        reply, whole = Reply(), None
        async for chunk in model.astream(messages, **options):
            whole = chunk if whole is None else whole + chunk
            reply.pieces += 1
        _absorb(reply, 0, whole, whole.response_metadata)
        return reply

    async def aclose(self) -> None:
        """What it keeps open it keeps for all."""

    def _asked(self, body: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
        """The model, the messages and what goes along with them."""
        own = {name: body[name] for name in ("model", "n") if name in body}
        options = {name: value for name, value in body.items() if name not in {*own, "messages"}}
        messages = import_module("langchain_core.messages").convert_to_messages(body["messages"])
        return self._openai.ChatOpenAI(**self._options, **own), messages, options


CLIENTS: dict[str, type[Client]] = {
    "openai": OpenAi,
    "openai-responses": OpenAiResponses,
    "langchain-openai": LangChain,
    "litellm": LiteLlm,
    "grpc": Grpc,
}


def _read(answer: Any) -> Reply:
    reply = Reply(usage=(answer.usage.prompt_tokens, answer.usage.completion_tokens))
    for choice in answer.choices:
        known = reply.choices[choice.index]
        known.text, known.finish = choice.message.content or "", choice.finish_reason
        known.logprobs = _tokens(choice)
        for number, call in enumerate(choice.message.tool_calls or []):
            known.calls[number] = [call.function.name, call.function.arguments]
    return reply


async def _collect(stream: AsyncIterator[Any]) -> Reply:
    reply = Reply()
    async for chunk in stream:
        reply.pieces += 1
        if getattr(chunk, "usage", None):
            reply.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            known = reply.choices[choice.index]
            known.text += choice.delta.content or ""
            known.finish = choice.finish_reason or known.finish
            known.logprobs += _tokens(choice)
            for call in choice.delta.tool_calls or []:
                known.calls[call.index][0] += call.function.name or ""
                known.calls[call.index][1] += call.function.arguments or ""
    return reply


def _tokens(choice: Any) -> list[Any]:
    logprobs = getattr(choice, "logprobs", None)
    return [(entry.token, len(entry.top_logprobs)) for entry in (logprobs.content if logprobs else None) or []]


def _absorb(reply: Reply, index: int, message: Any, info: dict[str, Any]) -> None:
    """LangChain's message: it parses arguments itself and gives them back as a mapping."""
    choice = reply.choices[index]
    choice.text, choice.finish = message.content, info["finish_reason"]
    entries = (info.get("logprobs") or {}).get("content") or []
    choice.logprobs = [(entry["token"], len(entry["top_logprobs"])) for entry in entries]
    for number, call in enumerate(message.tool_calls):
        choice.calls[number] = [call["name"], call["args"]]
    usage = message.usage_metadata
    reply.usage = (usage["input_tokens"], usage["output_tokens"]) if usage else reply.usage
