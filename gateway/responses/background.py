"""Background responses: they run in tasks of one gateway process, which holds a lease on each in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog

from gateway.core.errors import ApiError, Fault, internal
from gateway.core.tenants import Principal
from gateway.openai.render import encode_json
from gateway.requests.rendering import off_the_loop
from gateway.requests.service import Gateway
from gateway.requests.types import GenerateRequest, Generation, Speech
from gateway.responses.parse import own_names
from gateway.responses.record import Json, State, count_parts
from gateway.responses.render import AnswerReader, ResponseRenderer
from gateway.responses.store import MAX_EVENTS, MAX_STORED_BYTES, ResponseStore

RENEW_SECONDS = 2.0
"""Seconds between two renewals of a lease, which also learn of a cancellation in another gateway."""
EVENT_SECONDS = 0.02
"""Minimum seconds between two calls to Redis that append events. Each call appends the events that came since the last
one."""
FINISH_TRIES = 30
"""Number of attempts to store an answer while Redis is away, RENEW_SECONDS apart."""

log = structlog.get_logger("responses")


class BackgroundRun:
    """One background response: runs its request, and stores how it ended unless it was cancelled or deleted. If it is
    streamed, its events are stored, too."""

    def __init__(
        self,
        store: ResponseStore,
        tenant: str,
        response_id: str,
        renderer: ResponseRenderer,
        reader_of: Callable[[Speech], AnswerReader],
        *,
        streams: bool = False,
    ) -> None:
        """`reader_of` returns the reader of the answer. It is called once it is known which model answers."""
        self._reader_of = reader_of
        self._store, self._tenant, self._id = store, tenant, response_id
        self._renderer = renderer
        self._head = renderer.queued()
        self._state: State = "queued"
        self._streams = streams
        self.opening = renderer.events_as("queued", "created", "queued") if streams else []
        """First events of a streamed response: `created` and `queued`. Empty if the response is not streamed."""
        self._unsent = list(self.opening)
        """Events that Redis does not have yet."""
        self._num_sent = 0
        self._more = asyncio.Event()
        if streams:
            self._more.set()

    async def run(self, gateway: Gateway, principal: Principal, request: GenerateRequest) -> None:
        """Run the request and store its answer or its error. If the response is cancelled or deleted, or its lease has
        run out, the current task is cancelled, and the request is aborted."""
        task = asyncio.current_task()
        assert task is not None
        renewing = asyncio.create_task(self._keep_renewing(task), name="background-lease")
        try:
            await self._finish(await self._answer(gateway, principal, request, task))
        finally:
            renewing.cancel()

    async def _answer(
        self, gateway: Gateway, principal: Principal, request: GenerateRequest, task: asyncio.Task[None]
    ) -> Json:
        try:
            with own_names():
                async with gateway.generate(principal, request) as generation:
                    self._state = "in_progress"
                    await self._renew(task)
                    admitted = generation.admitted
                    self._renderer.answered_by(admitted, self._reader_of(admitted.speech))
                    return await self._read(generation)
        except ApiError as error:
            return self._renderer.failed(error)
        except Exception:  # as in the HTTP server, a bug fails only this response
            log.exception("background_response_failed", request_id=request.request_id)
            return self._renderer.failed(internal(request.request_id))

    async def _read(self, generation: Generation) -> Json:
        """Read the generation to its end, and return the response object."""
        if not self._streams:
            chunks = [chunk async for chunk in generation]
            return await off_the_loop(chunks, lambda: self._renderer.completed(chunks))
        self._add(self._renderer.events_as("in_progress", "in_progress"))
        usage = None
        async for chunk in generation:
            self._add(self._renderer.events(chunk))
            usage = chunk.usage
        assert usage is not None, "the last chunk carries it"
        return self._renderer.ended(usage)

    def _add(self, events: list[bytes]) -> None:
        if events:
            self._unsent += events
            self._more.set()

    async def _finish(self, response: Json) -> None:
        """Store the response object or, if it is too large to be stored, a failed one that says so. Retry while Redis
        is away, up to FINISH_TRIES attempts in all."""
        for _ in range(FINISH_TRIES):
            try:
                if not await self._stored(response):
                    log.info("background_response_dropped", tenant=self._tenant, response=self._id)
                return
            except ApiError as error:
                if error.fault is Fault.REGISTRY_UNAVAILABLE:
                    await asyncio.sleep(RENEW_SECONDS)
                else:  # the answer is too large
                    response = self._renderer.failed(error) | {"output": []}
        log.warning("background_response_lost", tenant=self._tenant, response=self._id)

    async def _stored(self, response: Json) -> bool:
        """Store the last events and how the response ended; returns False if it has ended already or was deleted.
        Raises ApiError: REGISTRY_UNAVAILABLE; INSUFFICIENT_QUOTA, the answer is too large."""
        while self._unsent:
            if not await self._send():
                return False
        ending, output = self._split(response)
        if len(ending) + len(output) > MAX_STORED_BYTES:
            raise ApiError(Fault.INSUFFICIENT_QUOTA, f"a stored answer may have {MAX_STORED_BYTES} bytes")
        state: State = "failed" if response["status"] == "failed" else "ended"
        parts = count_parts(response["output"])
        return await self._store.finish(self._tenant, self._id, state, ending, output, parts)

    def _split(self, response: Json) -> tuple[bytes, bytes]:
        """Return two JSON texts to store: the fields of a response object that differ from those stored when it was
        queued, without its output, and its output."""
        changed = {name: value for name, value in response.items() if self._head.get(name) != value}
        output = encode_json(response["output"])
        return encode_json({name: value for name, value in changed.items() if name != "output"}), output

    async def _keep_renewing(self, task: asyncio.Task[None]) -> None:
        """Renew the lease every RENEW_SECONDS, or as soon as there are events."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):  # wait_for of Python 3.11 may swallow a cancellation
                    await self._more.wait()
            self._more.clear()
            await self._renew(task)
            if self._streams:
                await asyncio.sleep(EVENT_SECONDS)

    async def _renew(self, task: asyncio.Task[None]) -> None:
        """Renew the lease. Cancel `task` if the response has ended or was deleted; a failure of Redis is ignored."""
        with suppress(ApiError):
            if not await self._send():
                task.cancel()

    async def _send(self) -> bool:
        """Renew the lease and append events to those in Redis. Return False if the response has ended or was deleted.
        Raises ApiError: REGISTRY_UNAVAILABLE."""
        start, events = self._num_sent, self._unsent[:MAX_EVENTS]
        if not await self._store.renew(self._tenant, self._id, self._state, start, events):
            return False
        sent = start + len(events) - self._num_sent  # another call may have sent some of them meanwhile
        if sent > 0:
            del self._unsent[:sent]
            self._num_sent += sent
            if self._unsent:
                self._more.set()
        return True


class BackgroundRuns:
    """The background responses that run in this gateway process."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(
        self, response_id: str, run: BackgroundRun, gateway: Gateway, principal: Principal, request: GenerateRequest
    ) -> None:
        task = asyncio.create_task(run.run(gateway, principal, request), name="background-response")
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id))

    def stop(self, response_id: str) -> None:
        """Cancel a response's task, if this process runs it, because the response was cancelled or deleted."""
        if response_id in self._tasks:
            self._tasks[response_id].cancel()

    async def wait_idle(self) -> None:
        """Wait until all responses have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def drain(self, seconds: float) -> None:
        """Wait until all responses have ended. Cancel those that run after `seconds`; they fail for readers when their
        leases have run out."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
