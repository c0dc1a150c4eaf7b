"""The base models of a gateway as backends of requests: they choose the model, keep its lanes, prepare jobs, and turn
the engine's events into the chunks of the answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager

from msgspec.structs import replace

from engine.core.messages.requests import Lane, TokenEvent
from engine.rpc.coalesce import merge_events, split_per_token
from engine.rpc.stream import EventStream
from gateway.adapters.record import AdapterRecord
from gateway.core.errors import Fault, internal, unavailable
from gateway.core.lanes import lane_name
from gateway.core.routing import ModelQuery
from gateway.core.tenants import Tenant
from gateway.requests.backend import Instruments, NeededTokens
from gateway.requests.deadlines import Timer
from gateway.requests.decoder import AnswerDecoder
from gateway.requests.job import GenerationJob
from gateway.requests.record import RequestRecord, engine_failures, refuse_failed
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.streams import merge_streams
from gateway.requests.submission import Submission
from gateway.requests.turns import LoopTurns
from gateway.requests.types import Admitted, GenerateRequest, GenerationChunk, Speech
from gateway.text.stop_strings import StopStrings


class EngineBackends:
    """Chooses the base model and adapter of each request."""

    def __init__(self, models: ServedModels, instruments: Instruments, turns: LoopTurns) -> None:
        """`turns` hears of the tenants that a full lane refuses."""
        self.models = models
        self._instruments = instruments
        self._turns = turns

    def named(self, tenant: Tenant, query: ModelQuery) -> EngineBackend:
        """Return the backend of the model that a tenant's request names. Raises what `ServedModels.resolve` raises."""
        return EngineBackend(*self.models.resolve(tenant, query), self._instruments, self._turns)

    def member(self, name: str) -> EngineBackend:
        """Return the backend of a member that the operator chose, also for tenants that may not name it. Raises
        what `ServedModels.member` raises."""
        return EngineBackend(*self.models.member(name), self._instruments, self._turns)


class EngineBackend:
    """A base model, and perhaps one of its adapters, as the `Backend` of one request."""

    def __init__(
        self, model: ServedModel, adapter: AdapterRecord | None, instruments: Instruments, turns: LoopTurns
    ) -> None:
        self._model = model
        self._adapter = adapter
        self._instruments = instruments
        self._turns = turns

    @property
    def name(self) -> str:
        return self._model.name

    @property
    def adapter_name(self) -> str | None:
        return self._adapter.name if self._adapter else None

    @contextmanager
    def place(self, tenant: Tenant, lane: Lane, request: GenerateRequest) -> Iterator[None]:
        answers = max(1, min(len(request.prompts) * request.n, self._instruments.settings.max_choices))
        if full := self._model.refusal(lane, tenant, answers):
            if not request.is_batch_line:
                self._turns.refused(tenant.name)
            raise unavailable(Fault.LANE_QUEUE_FULL, f"the {lane_name(lane)} lane is full: {full}")
        with self._model.answering(lane, tenant, answers):
            yield

    def check(self, tenant: Tenant, request: GenerateRequest) -> None:
        self._model.intake.check(tenant, request)

    async def prepare(
        self, tenant: Tenant, lane: Lane, request: GenerateRequest, record: RequestRecord, engine_wait: float | None
    ) -> EngineRun:
        """Raises what `ServedModel.build_job` raises."""
        model, job = await self._model.build_job(tenant, request, self._adapter, lane, engine_wait)
        if job.adapter is not None:
            record.served.adapter_hash = job.adapter.version
        record.work.prompt_tokens = job.prompt_tokens
        record.asked.max_tokens = job.params[0].max_tokens
        tools = self._instruments
        job = replace(job, average_output=math.ceil(tools.outputs.average(record.caller.tenant, record.served.name)))
        submission = Submission(model.engine, job, record, tools.clock, tools.settings, engine_wait)
        return EngineRun(model, job, record, submission, tools)


class EngineRun:
    """The `Run` of a request that an engine computes."""

    def __init__(
        self,
        model: ServedModel,
        job: GenerationJob,
        record: RequestRecord,
        submission: Submission,
        instruments: Instruments,
    ) -> None:
        """`model` is the base model as the job's adapter sees it. `submission` has the engine's streams."""
        self._model = model
        self._job = job
        self._record = record
        self._submission = submission
        self._instruments = instruments
        self._clock = instruments.clock

    @property
    def needed(self) -> NeededTokens:
        job = self._job
        least = None if job.request.output.is_limited else job.prompt_tokens + job.num_answers
        return NeededTokens(job.reserve_tokens(), least)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the version of the adapter, and the engine's streams."""
        with self._model.adapters.using(self._job.adapter_hash):
            async with aclosing(self._submission):
                yield

    def begin(self) -> Sequence[EventStream]:
        return self._submission.begin()

    async def chunks(self, timer: Timer) -> AsyncGenerator[GenerationChunk, None]:
        record, streams, stop = self._record, self._submission.begin(), self._job.request.output.stop
        stops = StopStrings(stop) if stop else None
        answers = [self._answer(index, stream, stops) for index, stream in enumerate(streams)]
        unfinished = len(answers)
        merged = answers[0] if unfinished == 1 else merge_streams(answers, self._instruments.settings.max_choices)
        async with aclosing(merged) as chunks:
            async for chunk in chunks:
                unfinished -= chunk.finish_reason is not None
                if chunk.finish_reason is not None and not unfinished:
                    timer.on_answered()
                    record.end(chunk.finish_reason, 200)
                    self._note_output()
                    yield replace(chunk, usage=record.work.usage)
                elif chunk.has_output:
                    timer.on_token()
                    yield chunk
                    timer.on_waiting()
                else:
                    yield chunk

    def admitted(self, headers: Mapping[str, str]) -> Admitted:
        model, job, record = self._model, self._job, self._record
        return Admitted(
            id=record.id,
            request_id=record.request_id,
            created=int(time.time()),
            model=record.asked.model,
            lane=job.lane,
            fingerprint=model.fingerprint(job.adapter),
            prompt_ids=job.prompt_ids,
            rate_headers=headers,
            speech=Speech(model.tokenizer, None, calls_apart=True) if job.calls_apart else model.speech,
            temperature=job.request.sampling.temperature,
            top_p=job.request.sampling.top_p,
        )

    def _note_output(self) -> None:
        job, record = self._job, self._record
        if job.ends_by_itself and job.request.pooling is None:
            average = record.work.completion_tokens / job.num_answers
            self._instruments.outputs.add(record.caller.tenant, record.served.name, average)

    async def _answer(
        self, index: int, stream: EventStream, stops: StopStrings | None
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield chunks of text from one engine stream until the engine or a stop string ends the answer, and update the
        record. Closing the generator early aborts the answer. Raises ApiError if the engine fails or refuses."""
        job, record = self._job, self._record
        prompt_index = index // job.request.n
        detokenizer = self._model.tokenizer.detokenizer(job.continued_prompt(prompt_index), job.marks)
        reasoning, calls = job.thinking.parser() if job.thinking else None, job.call_parser()
        prompt = job.prompt_reader(prompt_index)
        answer = AnswerDecoder(index, detokenizer, job.request, stops, reasoning, prompt, job.call_marks, calls)
        last_token: float | None = None
        with engine_failures(record.bill):
            async with aclosing(stream) as arrivals:
                async for events in arrivals:
                    for left, event in _with_remaining(events, job.request.output.coalesce):
                        if event.finish_reason is not None:
                            refuse_failed(event, record, job.request)
                        chunk, now = answer.decode(event, more=left > 0), self._clock()
                        record.note_event(prompt_index, index, event, now)
                        if chunk.token_ids:
                            self._note_tokens(chunk, last_token, now)
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
                            record.work.reasoning_tokens += answer.reasoning_tokens
                            yield chunk
                            return
                        yield chunk
        raise internal(record.request_id)

    def _note_tokens(self, chunk: GenerationChunk, last_token: float | None, now: float) -> None:
        """Record that a chunk's tokens came `now`, and report the latency per token to the observers. `last_token` is
        when this answer last had a token, None before its first; both are in seconds of the gateway's clock."""
        record, count = self._record, len(chunk.token_ids)
        record.times.note_output(now)
        record.work.note_tokens(chunk.answer, count)
        if last_token is not None:
            for observer in self._instruments.observers:
                observer.inter_token(record.served.base_model, self._job.lane, (now - last_token) / count)


def _with_remaining(events: Sequence[TokenEvent], coalesce: bool) -> Iterator[tuple[int, TokenEvent]]:
    """Merge the events if `coalesce`, otherwise split them into one for each token; yield each in a pair, after the
    number of events that follow it. A refusal is not merged with the tokens before it, because those tokens count."""
    told = merge_events(events) if coalesce else [piece for event in events for piece in split_per_token(event)]
    return zip(range(len(told) - 1, -1, -1), told, strict=True)
