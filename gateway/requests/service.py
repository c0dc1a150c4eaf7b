"""The gateway's core: `Gateway.generate` is the path of every request, for all protocols."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from types import MappingProxyType

from msgspec.structs import replace

from engine.core.messages.requests import Lane, TokenEvent
from engine.rpc.coalesce import merge_events, split_per_token
from engine.rpc.stream import EventStream
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.record import AdapterRecord
from gateway.core.errors import Fault, internal, unavailable
from gateway.core.estimate import OutputAverages
from gateway.core.lanes import lane_name
from gateway.core.routing import ModelQuery
from gateway.core.tenant_room import TenantRoom
from gateway.core.tenants import Principal, Tenant
from gateway.core.trace_context import Ingress
from gateway.limiter.base import Limiter, ReserveRequest
from gateway.requests.admission import ServiceSettings
from gateway.requests.deadlines import Timer
from gateway.requests.decoder import AnswerDecoder
from gateway.requests.encoding_turns import EncodingTurns
from gateway.requests.frame import RequestFrame
from gateway.requests.job import GenerationJob
from gateway.requests.loop_turns import LoopTurns
from gateway.requests.member_run import MemberRun
from gateway.requests.observers import ArrivingRequest, Observer
from gateway.requests.parsing import ParsingTurns
from gateway.requests.record import RequestRecord, engine_failures, refuse_failed
from gateway.requests.route_runner import RouteRunner, RouteTable
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.submission import Submission
from gateway.requests.types import Admitted, GenerateRequest, Generation, GenerationChunk, Speech, merge_streams
from gateway.requests.upstreams import UpstreamServer
from gateway.requests.wire_room import WireRoom
from gateway.text.stop_strings import StopStrings
from gateway.text.tokenizer import Tokenizer

MOST_WATCHES = 128
"""Maximum number of streams, over HTTP and gRPC together, by which one tenant follows its batches and stored responses
in this process. Each reads Redis up to 10 times a second for a batch, and up to 20 times for a response, and no other
limit of the tenant applies to it."""
TOO_MANY_WATCHES = (
    "you have {held} open streams of batches and stored responses here, the maximum; close some, or get the batch or "
    "response itself from time to time"
)


class Gateway:
    """Runs each request through its stages: check and tokenize, reserve, generate, detokenize, settle.

    Even if the client, the engine or the limiter fails, every request is removed from the live table, its engine
    streams are closed, and its reservation is settled exactly once.
    """

    def __init__(
        self,
        models: ServedModels,
        adapters: AdapterAdmin,
        limiter: Limiter,
        *,
        settings: ServiceSettings | None = None,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        routes: RouteTable | None = None,
    ) -> None:
        """Create the gateway. It does not start or close what it is given.

        `adapters` administers the adapters of all models; `clock` returns monotonic seconds; `routes` has the virtual
        models, None means that there are none.
        """
        self._settings = settings or ServiceSettings()
        self.models = models
        self.adapters = adapters
        self.limiter = limiter
        self._outputs = OutputAverages()
        self.frame = RequestFrame(limiter, self._settings, observers, clock)
        self._clock = clock
        self._routes = self._route_runner(routes) if routes else None
        self.turns = LoopTurns()
        self.encoding = EncodingTurns()
        """Turns of the requests that only count, encode or decode tokens."""
        self.parsing = ParsingTurns()
        """Runs the parsers of request bodies."""
        self.watches = TenantRoom(MOST_WATCHES, TOO_MANY_WATCHES)
        """Open streams of batches and stored responses."""
        self.wire = WireRoom()
        """Bytes of requests that arrive and of answers that leave, over all protocols."""

    @property
    def live(self) -> Mapping[str, RequestRecord]:
        """Records of the requests in progress, by their unique ids."""
        return MappingProxyType(self.frame.live)

    @property
    def active(self) -> int:
        """Number of requests in progress, plus ended ones whose reservation the limiter has not settled yet; 0 means
        that the gateway is idle."""
        return self.frame.active

    @property
    def virtual_models(self) -> Collection[str]:
        """The names of the virtual models."""
        return self._routes.names if self._routes is not None else ()

    def batch_homes(self, virtual_model: str, tenant: Tenant | None) -> Sequence[str]:
        """Return the base models that may answer a tenant's batch requests for a virtual model, by name; see
        `RouteRunner.batch_homes`."""
        return self._routes.batch_homes(virtual_model, tenant) if self._routes is not None else ()

    def arriving(self, request_id: str, ingress: Ingress) -> ArrivingRequest:
        """Return a context manager for what a protocol does with a request before `generate`, such as authentication
        and parsing. It yields an `ArrivingRequest`, and reports the request to the observers if the block raises."""
        return ArrivingRequest(request_id, ingress, self.frame.observers, self._clock)

    def generate(
        self, principal: Principal, request: GenerateRequest, begun: Callable[[], None] = lambda: None
    ) -> AbstractAsyncContextManager[Generation]:
        """Return an async context manager that runs a request, and yields its generation once the first chunk has come,
        which the engine sends when it begins to work on the request. Leaving the block early aborts the request.

        `begun` is called once, when that chunk has come. A virtual model may hold back its members' answers; then it is
        called long before the block is entered, when the first member begins to work.

        Enter, iterate and leave in the same task: when a deadline passes, the gateway cancels that task, and the
        cancellation becomes DEADLINE_EXCEEDED on exit. The reservation is settled by the time the context has exited.

        Raises:
            ApiError: on entry, every error that a generation can have; later ENGINE_UNAVAILABLE, PREEMPTED,
                DEADLINE_EXCEEDED, INTERNAL.
        """
        if self._routes is not None and request.model.model in self._routes:
            return self._routes.generate(principal, request, begun)
        return self.serve(principal, request, begun=begun)

    def _route_runner(self, table: RouteTable) -> RouteRunner:
        upstreams = UpstreamServer(table.upstreams, self.frame, self._outputs, self.models.default.tokenizer)
        return RouteRunner(self, upstreams, table, self._settings, self._clock)

    @asynccontextmanager
    async def serve(
        self,
        principal: Principal,
        request: GenerateRequest,
        run: MemberRun | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[Generation]:
        """Run a request as `generate` does, with a base model or an adapter: the one that the request names or, for a
        virtual model, the one in `run`."""
        lane = principal.tenant.effective_lane(request.lane)
        first_wait = run.engine_wait if run else None
        with self._tracked(principal, request, lane, run) as (record, model, adapter):
            model.intake.check(principal.tenant, request)
            async with self.frame.timer(request, lane, record) as timer, self.frame.admitting(request, record, run):
                model, job = await self._build_job(model, principal, request, adapter, lane, record, first_wait)
                wanted = self._wanted(job, record, run)
                submission = Submission(model.engine, job, record, self._clock, self._settings, first_wait)
                is_charged = run is None or run.is_charged
                reserved = self.frame.reserved(wanted, record, submission.begin, is_charged=is_charged)
                with model.adapters.using(job.adapter_hash):
                    async with (
                        aclosing(submission),
                        reserved as headers,
                        timer.lifted_at_exit(),
                        aclosing(self._run(model, job, record, submission, timer)) as chunks,
                    ):
                        first = await anext(chunks)
                        begun()
                        yield Generation(self._admitted(model, job, headers, record), first, chunks)

    def end_requests(self) -> None:
        """End all requests, and later ones as they start, with ApiError (ENGINE_UNAVAILABLE), because the gateway is
        stopping. Tenants are charged for what was generated."""
        self.frame.end_requests()

    async def close(self) -> None:
        """Cancel the shadow copies of requests for virtual models, and wait until the reservations of all ended
        requests are settled."""
        if self._routes is not None:
            await self._routes.close()
        await self.frame.close()

    @contextmanager
    def _tracked(
        self, principal: Principal, request: GenerateRequest, lane: Lane, run: MemberRun | None
    ) -> Iterator[tuple[RequestRecord, ServedModel, AdapterRecord | None]]:
        """Yield a new record for the request (see `RequestFrame.recorded`), and the base model and adapter that serve
        it. During the block, the request's answers count towards the capacity of the model's lane.

        Raises ApiError: LANE_QUEUE_FULL, the lane is full; and the errors of `ServedModels.resolve`.
        """
        query, permitted = request.model, principal.tenant
        if run is not None:
            query, permitted = ModelQuery(run.member), run.permitted or principal.tenant
        answers = max(1, min(len(request.prompts) * request.n, self._settings.max_choices))
        with self.frame.recorded(principal, request, lane, run) as record:
            is_named = run is None or not run.for_policy
            model, adapter = self.models.resolve(permitted, query) if is_named else self.models.member(query.model)
            record.base_model, record.adapter = model.name, adapter.name if adapter else None
            if full := model.refusal(lane, principal.tenant, answers):
                if not request.is_batch_line:
                    self.turns.refused(principal.tenant.name)
                raise unavailable(Fault.LANE_QUEUE_FULL, f"the {lane_name(lane)} lane is full: {full}")
            with model.answering(lane, principal.tenant, answers):
                yield record, model, adapter

    async def _build_job(
        self,
        model: ServedModel,
        principal: Principal,
        request: GenerateRequest,
        adapter: AdapterRecord | None,
        lane: Lane,
        record: RequestRecord,
        engine_wait: float | None,
    ) -> tuple[ServedModel, GenerationJob]:
        """Return the request's job, and the model as the version in the job sees it. Raises what `build_job` raises."""
        model, job = await model.build_job(principal.tenant, request, adapter, lane, engine_wait)
        if job.adapter is not None:
            record.adapter_hash = job.adapter.version
        record.prompt_tokens = job.prompt_tokens
        record.n, record.max_tokens = request.n, job.params[0].max_tokens
        average = math.ceil(self._outputs.average(record.tenant, record.served_name))
        return model, replace(job, average_output=average)

    def _wanted(self, job: GenerationJob, record: RequestRecord, run: MemberRun | None) -> ReserveRequest:
        tokens = job.reserve_tokens() * (run.reserved_runs if run else 1)
        least = None if job.limits_output else job.prompt_tokens + job.num_answers
        return self.frame.reservation(record, run, tokens, least)

    def _admitted(
        self, model: ServedModel, job: GenerationJob, headers: Mapping[str, str], record: RequestRecord
    ) -> Admitted:
        return Admitted(
            id=record.id,
            request_id=record.request_id,
            created=int(time.time()),
            model=record.model,
            lane=job.lane,
            fingerprint=model.intake.fingerprint(job.adapter),
            prompt_ids=job.prompt_ids,
            rate_headers=headers,
            speech=Speech(model.tokenizer, None, calls_apart=True) if job.calls_apart else model.speech,
            temperature=job.request.sampling.temperature,
            top_p=job.request.sampling.top_p,
        )

    async def _run(
        self, model: ServedModel, job: GenerationJob, record: RequestRecord, submission: Submission, timer: Timer
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Submit the request if it is not yet, and yield the chunks of all answers as they come; the very last carries
        the usage. Also reports progress to the timer, and at the end completes the record."""
        streams = submission.begin()
        stops = StopStrings(job.request.stop) if job.request.stop else None
        answers = [
            self._answer(model.tokenizer, job, index, record, stream, stops) for index, stream in enumerate(streams)
        ]
        unfinished = len(answers)
        merged = answers[0] if unfinished == 1 else merge_streams(answers, self._settings.max_choices)
        async with aclosing(merged) as chunks:
            async for chunk in chunks:
                unfinished -= chunk.finish_reason is not None
                if chunk.finish_reason is not None and not unfinished:
                    timer.on_answered()
                    record.end(chunk.finish_reason, 200)
                    self._note_output(job, record)
                    yield replace(chunk, usage=record.usage)
                elif chunk.has_output:
                    timer.on_token()
                    yield chunk
                    timer.on_waiting()
                else:
                    yield chunk

    def _note_output(self, job: GenerationJob, record: RequestRecord) -> None:
        if job.ends_by_itself and job.request.pooling is None:
            self._outputs.add(record.tenant, record.served_name, record.completion_tokens / job.num_answers)

    async def _answer(
        self,
        tokenizer: Tokenizer,
        job: GenerationJob,
        index: int,
        record: RequestRecord,
        stream: EventStream,
        stops: StopStrings | None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield chunks of text from one engine stream until the engine or a stop string ends the answer, and update the
        record. Closing the generator early aborts the answer. Raises ApiError if the engine fails or refuses."""
        prompt_index = index // job.request.n
        detokenizer = tokenizer.detokenizer(job.continued_prompt(prompt_index), job.marks)
        reasoning, calls = job.thinking.parser() if job.thinking else None, job.call_parser()
        prompt = job.prompt_reader(prompt_index)
        answer = AnswerDecoder(index, detokenizer, job.request, stops, reasoning, prompt, job.call_marks, calls)
        last_token: float | None = None
        with engine_failures(record):
            async with aclosing(stream) as arrivals:
                async for events in arrivals:
                    for left, event in _with_remaining(events, job.request.coalesce):
                        if event.finish_reason is not None:
                            refuse_failed(event, record, job.request)
                        chunk, now = answer.decode(event, more=left > 0), self._clock()
                        record.note_event(prompt_index, index, event, now)
                        if chunk.token_ids:
                            self._note_tokens(job.lane, record, chunk, last_token, now)
                            last_token = now
                        if prompt is not None and len(chunk.prompt_scores.token_ids) > 1:
                            *parts, last = chunk.prompt_scores.split()
                            for part in parts:
                                yield GenerationChunk(index, prompt_scores=part)
                                await asyncio.sleep(0)  # rendering them all at once would stop the event loop
                            chunk = replace(chunk, prompt_scores=last)
                        if chunk.finish_reason is not None:
                            if answer.lacks_scores:
                                raise internal(record.request_id)
                            record.reasoning_tokens += answer.reasoning_tokens
                            yield chunk
                            return
                        yield chunk
        raise internal(record.request_id)

    def _note_tokens(
        self, lane: Lane, record: RequestRecord, chunk: GenerationChunk, last_token: float | None, now: float
    ) -> None:
        """Record that a chunk's tokens came `now`, and report the latency per token to the observers. `last_token` is
        when this answer last had a token, None before its first; both are in seconds of the gateway's clock."""
        record.first_token = record.first_token or now
        record.last_token = now
        count = len(chunk.token_ids)
        record.note_tokens(chunk.answer, count)
        if last_token is not None:
            for observer in self.frame.observers:
                observer.inter_token(record.base_model, lane, (now - last_token) / count)


def _with_remaining(events: Sequence[TokenEvent], coalesce: bool) -> Iterator[tuple[int, TokenEvent]]:
    """Merge the events if `coalesce`, otherwise split them into one for each token; yield each in a pair, after the
    number of events that follow it. A refusal is not merged with the tokens before it, because those tokens count."""
    told = merge_events(events) if coalesce else [piece for event in events for piece in split_per_token(event)]
    return zip(range(len(told) - 1, -1, -1), told, strict=True)
