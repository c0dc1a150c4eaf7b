"""Asks a running gateway what training needs: both members' answers to a request, and the vector of its prompt."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import httpx
import numpy as np
import numpy.typing as npt

from lab.route_training.examples import Example, Json

AT_ONCE = 16
"""Requests that are sent at the same time."""
TRIES = 6
MOST_WAIT = 30.0
"""Maximum seconds between a temporary refusal (a status in FOR_NOW) and the next attempt."""
DEFAULT_TOKENS = 512
"""Maximum tokens of an answer whose request names none."""
FOR_NOW = (429, 503)
RENDERING = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")

Vector = npt.NDArray[np.float32]
T = TypeVar("T")


class AskError(Exception):
    """The gateway could not be reached or refused a request; the message is shown to users."""


class Asker:
    """Sends requests in the batch lane, at most AT_ONCE at a time."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        """`http` has the gateway's address and the key; it is not closed here."""
        self._http = http
        self._turns = asyncio.Semaphore(AT_ONCE)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, key: str, verify: Any = True) -> AsyncIterator[Self]:
        headers, timeout = {"authorization": f"Bearer {key}"}, httpx.Timeout(10.0, read=600.0)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, verify=verify) as http:
            yield cls(http)

    async def answer(self, example: Example, model: str) -> Json:
        """Send an example's request to `model` with temperature 0, and return its answer as an assistant message of
        the chat API; an answer of the completions API has only `content`."""
        limit = {} if {"max_tokens", "max_completion_tokens"} & example.body.keys() else {"max_tokens": DEFAULT_TOKENS}
        fixed = {"model": model, "temperature": 0, "n": 1, "stream": False, "service_tier": "flex"}
        body = {name: value for name, value in example.body.items() if name not in ("stream_options", "best_of")}
        path = "/v1/chat/completions" if example.is_chat else "/v1/completions"
        [choice] = (await self._ask(path, {**limit, **body, **fixed}))["choices"]
        return choice["message"] if example.is_chat else {"content": choice["text"]}

    async def vector(self, example: Example, model: str, pooling: str) -> Vector:
        """Return the vector of a prompt, as the gateway renders it for the model: fp32 [hidden_size], of length 1."""
        body = {"model": model, "input": await self._prompt(example, model), "pooling": pooling}
        answer = await self._ask("/v1/embeddings", {**body, "encoding_format": "base64", "service_tier": "flex"})
        return np.frombuffer(b64decode(answer["data"][0]["embedding"]), dtype="<f4")

    async def _prompt(self, example: Example, model: str) -> str | list[int]:
        if not example.is_chat:
            return example.body["prompt"]
        fields = {name: example.body[name] for name in RENDERING if example.body.get(name) is not None}
        return (await self._ask("/tokenize", {"model": model, **fields}))["tokens"]

    async def _ask(self, path: str, body: Json) -> Json:
        """Send a request, at most TRIES times while it is refused temporarily, and return the body of its response.
        Raises AskError."""
        for attempt in range(TRIES):
            try:
                async with self._turns:
                    response = await self._http.post(path, json=body)
            except httpx.TransportError as error:
                raise AskError(f"no gateway answers at {self._http.base_url}: {error}") from error
            if response.status_code not in FOR_NOW or attempt == TRIES - 1:
                break
            await asyncio.sleep(_wait(response, attempt))
        if response.is_error:
            raise AskError(f"{path} with model {body['model']!r}: {_refusal(response)}")
        return response.json()


async def gather_all(
    work: Callable[[int], Awaitable[T]], numbers: Sequence[int], on_done: Callable[[], None]
) -> dict[int, T]:
    """Run `work` for each number, and return the results by number; call `on_done` after each. The first error cancels
    the rest."""
    results: dict[int, T] = {}

    async def run(number: int) -> None:
        results[number] = await work(number)
        on_done()

    tasks = [asyncio.ensure_future(run(number)) for number in numbers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return results


def _wait(response: httpx.Response, attempt: int) -> float:
    try:
        wait_s = float(response.headers.get("retry-after", ""))
    except ValueError:
        wait_s = 0.0
    return min(MOST_WAIT, max(wait_s, 0.5 * 2**attempt))


def _refusal(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
