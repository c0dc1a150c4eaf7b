"""A batch job as a caller sees it who tries again until he is answered: uploaded, created, watched, downloaded."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import pytest

from tests.chaos.deployment import Deployment
from tests.chaos.load import Ask, client
from tests.chaos.patience import Late
from tests.chaos.settings import ADAPTERS, FREE, Caller

ENDPOINT = "/v1/completions"
TERMINAL = {"completed", "failed", "expired", "cancelled"}
POLL_SECONDS = 0.2
LONGEST_SECONDS = 1800.0
BROKEN_LINES = 20
"""One line in so many has a prompt that no model has room for, and is answered with an error."""
TOO_LONG = 3000
"""Tokens of such a prompt: more than the context of the engine under test."""


def lines_of(seed: int, count: int, longest: int = 20) -> list[Ask]:
    """The same seed asks the same."""
    random = Random(f"job/{seed}")
    return [
        Ask(
            id=f"line-{number}",
            caller=FREE,
            adapter=random.choice((None, *ADAPTERS)),
            tier="auto",
            prompt=tuple(
                random.choices(range(1, 1000), k=random.randint(1, 40) if number % BROKEN_LINES else TOO_LONG)
            ),
            max_tokens=random.randint(1, longest),
            seed=random.randrange(1000),
            stream=False,
            manner="reads",
        )
        for number in range(count)
    ]


def text_of(asks: Iterable[Ask]) -> bytes:
    lines = ({"custom_id": ask.id, "method": "POST", "url": ENDPOINT, "body": _body(ask)} for ask in asks)
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _body(ask: Ask) -> dict[str, Any]:
    body = ask.body()
    del body["service_tier"]
    return body


@dataclass
class Customer:
    """A client that repeats its requests for as long as the system is down."""

    deployment: Deployment
    caller: Caller = FREE

    async def submit(self, asks: Sequence[Ask], window: str = "24h") -> dict[str, Any]:
        """Upload the input, create the batch and return it."""
        async with client(self.deployment.url) as http:
            files = {"file": ("job.jsonl", text_of(asks), "application/jsonl")}
            answer = await http.post("/v1/files", headers=self._headers, data={"purpose": "batch"}, files=files)
            fields = {"input_file_id": answer.raise_for_status().json()["id"], "endpoint": ENDPOINT}
            fields["completion_window"] = window
            answer = await http.post("/v1/batches", headers=self._headers, json=fields)
            return answer.raise_for_status().json()

    async def ask(self, method: str, path: str) -> httpx.Response:
        """Send a request until it is answered. Raises HTTPStatusError if no retry would change the answer, or Late."""
        deadline = asyncio.get_running_loop().time() + LONGEST_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            try:
                async with client(self.deployment.url) as http:
                    answer = await http.request(method, path, headers=self._headers, timeout=10.0)
                if answer.status_code < 500:
                    return answer.raise_for_status()
            except httpx.TransportError:
                pass  # the gateway is dead, or its connection was; it will be asked again
            await asyncio.sleep(POLL_SECONDS)
        raise Late(f"waited {LONGEST_SECONDS:g} s for {method} {path}")

    async def job(self, batch_id: str) -> dict[str, Any]:
        return (await self.ask("GET", f"/v1/batches/{batch_id}")).json()

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        return (await self.ask("POST", f"/v1/batches/{batch_id}/cancel")).json()

    async def until_ended(self, batch_id: str) -> dict[str, Any]:
        """Wait until the batch has ended, and return it. Raises Late."""
        deadline = asyncio.get_running_loop().time() + LONGEST_SECONDS
        while (job := await self.job(batch_id))["status"] not in TERMINAL:
            if asyncio.get_running_loop().time() > deadline:
                raise Late(f"waited {LONGEST_SECONDS:g} s for {job}")
            await asyncio.sleep(POLL_SECONDS)
        return job

    async def touch_files(self) -> None:
        """Delete a file that does not exist, because any call about a tenant's files cleans up its expired uploads."""
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            await self.ask("DELETE", f"/v1/files/file-{0:024}")

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of an output or error file. There are none if there is no file."""
        if file_id is None:
            return []
        text = (await self.ask("GET", f"/v1/files/{file_id}/content")).text
        return [json.loads(line) for line in text.splitlines()]  # as most people would

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.caller.key}"}


@dataclass
class Result:
    """The outcome of a job: the batch as the client last saw it, and its answers."""

    job: dict[str, Any]
    output: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    async def of(cls, customer: Customer, job: dict[str, Any]) -> Result:
        return cls(job, await customer.lines(job["output_file_id"]), await customer.lines(job["error_file_id"]))

    def complaints(self, asks: Sequence[Ask], statuses: Sequence[str], *, checks_answers: bool = True) -> list[str]:
        """`statuses`: in which the job may have ended. Every line must be there once, in one file or the other."""
        wrong = [] if self.job["status"] in statuses else [f"the job is {self.job['status']}: {self.job['errors']}"]
        times = Counter(line["custom_id"] for line in (*self.output, *self.errors))
        wrong += [f"{ask.id} is there {times[ask.id]} times" for ask in asks if times[ask.id] != 1]
        wrong += [f"{name} is no line of the job" for name in times.keys() - {ask.id for ask in asks}]
        wrong += self._miscounted(len(asks)) + self._misbilled()
        if checks_answers:
            wrong += self._misanswered({ask.id: ask for ask in asks})
        return wrong

    def _miscounted(self, total: int) -> list[str]:
        counts, ran = self.job["request_counts"], [line for line in self.errors if line["response"] is not None]
        never = len(self.errors) - len(ran)
        wrong = [] if counts["total"] == total else [f"counts {counts} of {total} lines"]
        if counts["completed"] != len(self.output):
            wrong.append(f"counts {counts}, and {len(self.output)} lines of output")
        if counts["failed"] not in (len(ran), len(ran) + never):
            wrong.append(f"counts {counts}, and {len(ran)} lines of errors beside {never} that never ran")
        if self.job["status"] == "completed" and never:
            wrong.append(f"{never} lines of a completed job never ran")
        return wrong

    def _misbilled(self) -> list[str]:
        used = [line["response"]["body"]["usage"] for line in self.output]
        sums = {"input_tokens": sum(each["prompt_tokens"] for each in used)}
        sums["output_tokens"] = sum(each["completion_tokens"] for each in used)
        told = self.job["usage"] or {}
        return [f"usage {told}, and answers of {sums}"] if any(told.get(name, 0) != sums[name] for name in sums) else []

    def _misanswered(self, asks: dict[str, Ask]) -> list[str]:
        wrong = [f"{line['custom_id']} is no success" for line in self.output if line["response"]["status_code"] != 200]
        for line in self.output:
            [choice] = line["response"]["body"]["choices"]
            if choice["token_ids"] != asks[line["custom_id"]].expected():
                wrong.append(f"{line['custom_id']} has another answer than its own")
        for line in self.errors:
            if line["response"] is not None and len(asks[line["custom_id"]].prompt) < TOO_LONG:
                wrong.append(f"{line['custom_id']} failed: {line['response']}")
        return wrong
