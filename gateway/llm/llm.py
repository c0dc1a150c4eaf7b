"""`LLM`: a model in this process, for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from rich.progress import MofNCompleteColumn, Progress

from engine.process.model_source import EMBEDDED
from gateway.adapters.record import AdapterRecord
from gateway.core.errors import invalid_request
from gateway.llm.async_llm import AsyncLLM
from gateway.llm.params import DEFAULTS, ChatMessages, ChatOptions, LaneName, Prompt, SamplingParams
from gateway.llm.results import Answer, Embedding, Result
from gateway.llm.setup import ModelOptions
from gateway.llm.stream import AnswerStream
from gateway.openai.convert import prompts_of
from gateway.terminal.console import Console

MOST_AT_ONCE = 1024
"""Maximum number of prompts of one call that are in the engine's queue at the same time: many more than run at once, so
that the scheduler can choose, and few enough that it does so quickly."""

T = TypeVar("T")


class LLM:
    """A model with its engine in threads of this process, with the scheduler, kernels and sampling of a server. A
    context manager, whose end, like `close`, ends all requests. Thread-safe; raises what `AsyncLLM` raises."""

    def __init__(self, model: str | Path = EMBEDDED, **options: Unpack[ModelOptions]) -> None:
        """Load a model, which takes seconds or minutes. The arguments, and what is raised, are those of `AsyncLLM` and
        its `start`."""
        self._loop = LoopThread()
        self._llm = AsyncLLM(model, **options)
        self._finalizer = weakref.finalize(self, _close, self._loop, self._llm)
        try:
            self._loop.run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all requests with an error, and free the model. Further calls do nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULTS,
        *,
        adapter: str | Path | Sequence[str | Path | None] | None = None,
        lane: LaneName = "interactive",
        progress: bool = True,
    ) -> list[Result]:
        """Continue prompts, and return a result for each, in order.

        Args:
            prompts: a text, token ids, or a list of either.
            params: sampling parameters for all prompts, or a list with those of each.
            adapter: see `AsyncLLM.generate`; for all prompts, or a list with that of each.
            lane: the lane in which the scheduler places the requests.
            progress: show a progress bar for several prompts, on a terminal.
        """
        given = _prompts(prompts)
        each = zip(given, _spread(params, len(given), "params"), _spread(adapter, len(given), "adapter"), strict=True)
        streams = [self._llm.generate(prompt, own, adapter=its, lane=lane) for prompt, own, its in each]
        return self._results(streams, progress=progress)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        params: SamplingParams = DEFAULTS,
        *,
        adapter: str | Path | None = None,
        lane: LaneName = "interactive",
        progress: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[Result]:
        """Answer one conversation or a list of them, as `AsyncLLM.chat` does, and return a result for each, in
        order."""
        streams = [
            self._llm.chat(conversation, params, adapter=adapter, lane=lane, **options)
            for conversation in _conversations(messages)
        ]
        return self._results(streams, progress=progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULTS,
        *,
        adapter: str | Path | None = None,
        lane: LaneName = "interactive",
    ) -> Iterator[Answer]:
        """Continue one prompt, and yield what is new of its answers as it comes. Closing the iterator, as the end of
        its last reference does, ends the request."""
        return self._pieces(self._llm.generate(prompt, params, adapter=adapter, lane=lane))

    def stream_chat(
        self,
        messages: ChatMessages,
        params: SamplingParams = DEFAULTS,
        *,
        adapter: str | Path | None = None,
        lane: LaneName = "interactive",
        **options: Unpack[ChatOptions],
    ) -> Iterator[Answer]:
        """Answer one conversation, like `stream`."""
        return self._pieces(self._llm.chat(messages, params, adapter=adapter, lane=lane, **options))

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: str | Path | None = None,
        lane: LaneName = "interactive",
        **fields: Any,
    ) -> list[Embedding]:
        """Return the vector of each text, in order; see `AsyncLLM.embed`."""
        return self._loop.run(self._llm.embed(_prompts(texts), adapter=adapter, lane=lane, **fields))

    def add_adapter(self, name: str, place: str | Path) -> AdapterRecord:
        """Load an adapter under a name; see `AsyncLLM.add_adapter`."""
        return self._loop.run(self._llm.add_adapter(name, place))

    def remove_adapter(self, adapter: str | Path, drain_seconds: float = 30.0) -> int:
        """Unload an adapter; see `AsyncLLM.remove_adapter`."""
        return self._loop.run(self._llm.remove_adapter(adapter, drain_seconds))

    def adapters(self) -> list[AdapterRecord]:
        """Return the records of all loaded adapters, sorted by name."""
        return self._loop.run(self._llm.adapters())

    def _results(self, streams: Sequence[AnswerStream], *, progress: bool) -> list[Result]:
        with _bar(len(streams), shown=progress) as advance:
            return self._loop.run(_gathered(streams, advance))

    def _pieces(self, stream: AnswerStream) -> Iterator[Answer]:
        try:
            while (piece := self._loop.run(_next(stream))) is not None:
                yield piece
        finally:
            if not self._loop.is_stopped:
                self._loop.run(stream.aclose())


class LoopThread:
    """An event loop that runs in a thread of its own until `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(thread_name_prefix="llm-work")
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. If the caller is interrupted, as by Ctrl-C, the coroutine
        is cancelled. Raises RuntimeError after `stop`."""
        if self.is_stopped:
            work.close()
            raise RuntimeError("this model was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_stopped(self) -> bool:
        return self._loop.is_closed()

    @property
    def is_current(self) -> bool:
        """Return whether the caller runs in the loop's thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Cancel all tasks that are not being cancelled yet, wait for the ends of all, and end the loop and its
        thread."""
        self.run(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._threads.shutdown()
        self._loop.close()


def _close(loop: LoopThread, llm: AsyncLLM) -> None:
    """Free a model and end its loop. The garbage collector may call this in the loop's own thread."""
    if loop.is_current:
        threading.Thread(target=_close, args=(loop, llm), name="llm-close").start()
        return
    loop.run(llm.close())
    loop.stop()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _next(stream: AnswerStream) -> Answer | None:
    """Return the next piece of an answer. None means that there is no more."""
    return await anext(stream, None)


async def _gathered(streams: Sequence[AnswerStream], advance: Callable[[], None]) -> list[Result]:
    """Run requests to their ends, at most MOST_AT_ONCE at a time, and return their results in order; call `advance`
    after each. The first error ends all of them."""
    turns = asyncio.Semaphore(MOST_AT_ONCE)

    async def one(stream: AnswerStream) -> Result:
        async with turns:
            result = await stream
            advance()
            return result

    tasks = [asyncio.ensure_future(one(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar during the block, if `shown`, there are several requests, and standard error is a terminal.
    Yield the function that advances it by one."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=not (shown and total > 1 and console.is_terminal)) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a caller's prompts as a list. The caller gives one text, one list of token ids, or a list of either."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[str | int | list[int]] = [item if isinstance(item, str | int) else list(item) for item in prompts]
    return list(prompts_of(items, "prompts")) if items else []


def _conversations(messages: ChatMessages | Sequence[ChatMessages]) -> Sequence[ChatMessages]:
    """Return a caller's conversations as a list. The caller gives one or several. Raises ApiError (INVALID_REQUEST) for
    a list that mixes messages with conversations."""
    one = [each for each in messages if isinstance(each, dict)]
    several = [each for each in messages if not isinstance(each, dict)]
    if one and several:
        raise invalid_request("messages must be one conversation or a list of conversations", "messages")
    return several or [one]


def _spread(value: Any, count: int, field: str) -> list[Any]:
    """Return a list with a value for each of `count` prompts: the caller's list, or the caller's one value repeated.
    Raises ApiError (INVALID_REQUEST) for a list of another length."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise invalid_request(f"{field} has {len(value)} members for {count} prompts", field)
    return list(value)
