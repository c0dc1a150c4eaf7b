"""`AsyncLLM`: a model in this process, for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from engine.process.model_source import EMBEDDED
from gateway.adapters.record import AdapterRecord
from gateway.llm.adapters import adapter_source, folder_name
from gateway.llm.params import (
    DEFAULTS,
    ChatMessages,
    ChatOptions,
    LaneName,
    Prompt,
    SamplingParams,
    chat_request_of,
    text_request,
    vectors_request,
)
from gateway.llm.results import Embedding, embedding_of
from gateway.llm.setup import CALLER, ModelOptions, Parts, opened
from gateway.llm.stream import AnswerStream, Opened
from gateway.openai.tools import tool_call_reader
from gateway.requests.types import GenerateRequest

TEXTS_AT_ONCE = 256
"""Maximum number of texts of one request for vectors: enough to fill every step of an engine."""
T = TypeVar("T")
MakeRequest = Callable[..., GenerateRequest]
"""Makes a request, given the name of its model. `streams` says whether the caller takes tokens as they come."""


class AsyncLLM:
    """A model with its engine in a thread of this process. `async with` or the first call loads it; the end of the
    block, or `close`, frees it. All methods belong to one event loop, and raise ApiError and EngineFailed."""

    def __init__(self, model: str | Path = EMBEDDED, **options: Unpack[ModelOptions]) -> None:
        """Create the model, which is not loaded yet.

        Args:
            model: a Hugging Face folder or id, a GGUF file, or `embedded`, which is SmolLM2-135M-Instruct.
            options: see `ModelOptions`.
        """
        self._model = str(model)
        self._options = options
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._parts: Parts | None = None
        self._is_closed = False

    async def start(self) -> Self:
        """Load the model, unless it is loaded. Raises ValueError, TypeError or OSError if the model or an option cannot
        be used, ApiError if an adapter cannot, RuntimeError after `close`."""
        await self._running()
        return self

    async def close(self) -> None:
        """End all requests with an error, and free the model. A model that is being loaded is freed once it is loaded.
        Further calls do nothing."""
        self._is_closed = True
        async with self._starting:
            self._parts = None
            await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULTS,
        *,
        adapter: str | Path | None = None,
        lane: LaneName = "interactive",
    ) -> AnswerStream:
        """Continue a text, or token ids. `adapter` is the name of a loaded adapter or the folder of one, which is
        loaded when it is first named; None means the base model."""
        return AnswerStream(
            partial(self._opened, adapter, partial(text_request, prompt=prompt, params=params, lane=lane))
        )

    def chat(
        self,
        messages: ChatMessages,
        params: SamplingParams = DEFAULTS,
        *,
        adapter: str | Path | None = None,
        lane: LaneName = "interactive",
        **options: Unpack[ChatOptions],
    ) -> AnswerStream:
        """Answer a conversation, whose messages are those of OpenAI's API, with `tools` and the other `options` of it.
        `adapter` is as in `generate`."""
        request = partial(chat_request_of, messages=messages, params=params, options=options, lane=lane)
        return AnswerStream(partial(self._opened, adapter, request))

    async def embed(
        self,
        texts: Sequence[Prompt],
        *,
        adapter: str | Path | None = None,
        lane: LaneName = "interactive",
        **fields: Any,
    ) -> list[Embedding]:
        """Return the vector of each text, in order. `fields` are those of /v1/embeddings: `pooling`, `dimensions`,
        `normalize`. `adapter` is as in `generate`."""
        parts = await self._running()
        vectors: list[Embedding] = []
        with parts.failures():
            name = await parts.folders.name_of(adapter)
            for first in range(0, len(texts), TEXTS_AT_ONCE):
                request = vectors_request(name, texts[first : first + TEXTS_AT_ONCE], fields, lane)
                vectors += await _vectors(parts, request)
        return vectors

    async def add_adapter(self, name: str, place: str | Path) -> AdapterRecord:
        """Load an adapter from a folder or the Hugging Face hub under a name, in place of the former one of that name,
        whose running requests end with the weights that they began with. Return its record."""
        return await self._adapters(lambda parts: parts.adapters.load(name, adapter_source(place), replace=True))

    async def remove_adapter(self, adapter: str | Path, drain_seconds: float = 30.0) -> int:
        """Unload an adapter, given its name or its folder, once its running requests have ended; those left after
        `drain_seconds` are aborted, and their number is returned."""

        def unload(parts: Parts) -> Awaitable[int]:
            known = isinstance(adapter, str) and adapter in parts.adapters.records
            name = str(adapter) if known else folder_name(adapter)
            return parts.adapters.unload(name, drain_seconds)

        return await self._adapters(unload)

    async def adapters(self) -> list[AdapterRecord]:
        """Return the records of all loaded adapters, sorted by name."""
        records = (await self._running()).adapters.records
        return [records[name] for name in sorted(records)]

    async def _adapters(self, change: Callable[[Parts], Awaitable[T]]) -> T:
        parts = await self._running()
        with parts.failures():
            return await change(parts)

    async def _running(self) -> Parts:
        """Load the model if that was not done yet, and return its parts. Raises RuntimeError after `close`."""
        async with self._starting:
            if self._is_closed:
                raise RuntimeError("this model was closed")
            if self._parts is None:
                self._parts = await self._stack.enter_async_context(opened(self._model, self._options))
            return self._parts

    @asynccontextmanager
    async def _opened(self, adapter: str | Path | None, make: MakeRequest, streams: bool) -> AsyncIterator[Opened]:
        parts = await self._running()
        with parts.failures():
            request = make(await parts.folders.name_of(adapter), streams=streams)
            async with parts.gateway.generate(CALLER, request) as generation:
                yield Opened(generation, tool_call_reader(request, generation.admitted.speech))


async def _vectors(parts: Parts, request: GenerateRequest) -> list[Embedding]:
    found: dict[int, Embedding] = {}
    async with parts.gateway.generate(CALLER, request) as generation:
        async for chunk in generation:
            if chunk.vector:  # the first chunk of an answer says only that the engine has begun
                found[chunk.answer] = embedding_of(chunk.vector)
    return [found[index] for index in sorted(found)]
