"""Serves requests with upstreams: servers elsewhere, which are members of virtual models."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from msgspec.structs import replace

from engine.core.messages.requests import Lane
from gateway.core.errors import ApiError, Fault, model_not_found
from gateway.core.estimate import OutputAverages
from gateway.core.tenants import Principal, Tenant
from gateway.limiter.base import ReserveRequest
from gateway.requests.deadlines import Timer
from gateway.requests.frame import RequestFrame
from gateway.requests.loop_turns import EncodingPauses
from gateway.requests.member_run import MemberRun
from gateway.requests.record import RequestRecord
from gateway.requests.types import Admitted, Chat, GenerateRequest, Generation, GenerationChunk, Speech, TokenUsage
from gateway.text.tokenizer import Tokenizer

FINGERPRINT = "fp_upstream"
"""`system_fingerprint` of answers whose model the gateway does not know."""


BYTES_PER_TOKEN = 4
"""Bytes of an answer in UTF-8 that count as one token where the upstream tells no usage; most texts have about 4."""


class Upstream(Protocol):
    """A server elsewhere that answers requests."""

    name: str
    """Name of the member, under which its usage is counted."""
    model: str
    """Name of the model there."""

    def is_ready(self, tenant: Tenant) -> bool:
        """Return whether it takes a tenant's requests now, as far as is known."""

    def permits(self, tenant: Tenant, lane: Lane) -> bool:
        """Return whether the configuration allows a tenant's requests in a lane to be sent to it."""

    def check(self, request: GenerateRequest, tenant: Tenant) -> None:
        """Raise ApiError: UNSUPPORTED_PARAMETER, the upstream cannot do what a tenant's request asks for;
        LANE_QUEUE_FULL, UPSTREAM_UNAVAILABLE, it takes no request now."""

    def stream(self, request: GenerateRequest, tenant: Tenant) -> AsyncGenerator[GenerationChunk, None]:
        """Send a request, and yield the chunks of all answers as they come. The first one, which may be empty, says
        that the answer has begun; the very last one has the usage, with 0 tokens where the upstream told none. Closing
        the generator cancels the request. Raises ApiError: UPSTREAM_UNAVAILABLE, INVALID_REQUEST,
        CONTEXT_LENGTH_EXCEEDED."""


class UpstreamServer:
    """Serves single requests of one gateway with its upstreams."""

    def __init__(
        self, upstreams: Mapping[str, Upstream], frame: RequestFrame, outputs: OutputAverages, tokenizer: Tokenizer
    ) -> None:
        """`outputs` has the average length of answers. `tokenizer` estimates numbers of tokens."""
        self._upstreams = upstreams
        self._frame = frame
        self._outputs = outputs
        self._tokenizer = tokenizer
        self._speech = Speech(tokenizer, None, calls_apart=True)

    def __contains__(self, member: str) -> bool:
        return member in self._upstreams

    @asynccontextmanager
    async def serve(self, principal: Principal, request: GenerateRequest, run: MemberRun) -> AsyncIterator[Generation]:
        """Run a request with the upstream in `run`, as `Gateway.serve` does with an engine. Raises ApiError
        (MODEL_NOT_FOUND) if the configuration does not let the tenant's data leave this installation for that
        upstream."""
        upstream, lane = self._upstreams[run.member], principal.tenant.effective_lane(request.lane)
        with self._frame.recorded(principal, request, lane, run) as record:
            if not upstream.permits(run.permitted or principal.tenant, lane):
                raise model_not_found(run.member)
            record.base_model = upstream.name
            record.n, record.max_tokens = request.n, request.asked_tokens or 0
            async with self._frame.timer(request, lane, record) as timer:
                principal.tenant.class_of(request.request_class)  # raises if the tenant has no such class
                upstream.check(request, principal.tenant)
                async with self._frame.admitting(request, record, run):
                    record.prompt_tokens = await self._estimated_prompt(record.tenant, request)
                    wanted = self._wanted(request, record, run)
                    reserved = self._frame.reserved(wanted, record, lambda: None, is_charged=run.is_charged)
                    stream = upstream.stream(request, principal.tenant)
                    async with (
                        reserved as headers,
                        timer.lifted_at_exit(),
                        aclosing(self._run(stream, request, record, timer)) as chunks,
                    ):
                        first = await anext(chunks)
                        yield Generation(self._admitted(request, record, lane, headers), first, chunks)

    async def _run(
        self,
        stream: AsyncGenerator[GenerationChunk, None],
        request: GenerateRequest,
        record: RequestRecord,
        timer: Timer,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of an upstream's stream, and update the record. The answer's tokens are estimated until the
        upstream tells the usage. A failure before the first output is not charged, unless the upstream has answered
        without what the request asks for (UNSUPPORTED_PARAMETER). A caller who leaves is charged for the prompt and the
        output so far."""
        record.submit(self._frame.clock())
        record.fall_due()
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    now = self._frame.clock()
                    record.admitted = record.admitted or now
                    if chunk.has_output:
                        timer.on_token()
                        record.first_token, record.last_token = record.first_token or now, now
                        record.note_tokens(chunk.answer, _estimated_tokens(chunk))
                    if chunk.usage is not None:
                        timer.on_answered()
                        self._end(request, record, chunk.usage, chunk.finish_reason or "stop")
                        chunk = replace(chunk, usage=record.usage)
                    yield chunk
                    timer.on_waiting()
        except ApiError as error:
            is_answered = error.fault is Fault.UNSUPPORTED_PARAMETER and record.admitted is not None
            if not (is_answered or record.first_token):
                record.waive()
            raise

    def _end(self, request: GenerateRequest, record: RequestRecord, usage: TokenUsage, finish: str) -> None:
        """Complete the record of an answered request with the usage that the upstream reported; where it reported 0
        tokens, the estimates remain."""
        if usage.prompt:
            record.prompt_tokens, record.completion_tokens = usage.prompt, usage.completion
            record.cached, record.reasoning_tokens = {0: usage.cached}, usage.reasoning
        record.first_token = record.first_token or self._frame.clock()
        if request.pooling is None:
            answers = len(request.prompts) * request.n
            self._outputs.add(record.tenant, record.served_name, record.completion_tokens / answers)
        record.end(finish, 200)

    async def _estimated_prompt(self, tenant: str, request: GenerateRequest) -> int:
        """Return the estimated number of tokens of all prompts of a request, for its reservation: texts are encoded
        with this gateway's tokenizer, although the upstream's model may have another, and token ids are counted. Of
        chats, the texts of messages and tools are counted. `tenant` is whose share of the encoding threads is used."""
        total, pauses = 0, EncodingPauses()
        for prompt in request.prompts:
            if isinstance(prompt, tuple):
                total += len(prompt)
                continue
            text = _text_of(prompt)
            total += len(await self._tokenizer.encode(text, special=False, tenant=tenant))
            await pauses.after(len(text))
        return total

    def _wanted(self, request: GenerateRequest, record: RequestRecord, run: MemberRun) -> ReserveRequest:
        answers = len(request.prompts) * request.n
        average = math.ceil(self._outputs.average(record.tenant, record.served_name))
        asked = max(request.asked_tokens or 0, request.reserve_tokens)
        outputs = 0 if request.pooling else (asked or average) * answers
        tokens = (record.prompt_tokens + outputs) * run.reserved_runs
        least = None if asked else record.prompt_tokens + answers
        return self._frame.reservation(record, run, tokens, least)

    def _admitted(
        self, request: GenerateRequest, record: RequestRecord, lane: Lane, headers: Mapping[str, str]
    ) -> Admitted:
        return Admitted(
            id=record.id,
            request_id=record.request_id,
            created=int(time.time()),
            model=record.model,
            lane=lane,
            fingerprint=FINGERPRINT,
            prompt_ids=((),) * len(request.prompts),
            rate_headers=headers,
            speech=self._speech,
            temperature=request.given("temperature"),
            top_p=request.given("top_p"),
        )


def _estimated_tokens(chunk: GenerationChunk) -> int:
    """Return about how many tokens a piece of an answer has. Some upstreams send dozens in a piece: if it counted as
    one token, a caller who leaves before the upstream tells the usage would pay too little."""
    if chunk.vector:
        return 0
    written = (chunk.text, chunk.reasoning, *(f"{call.name}{call.arguments}" for call in chunk.calls))
    return max(1, sum(len(text.encode("utf-8", "replace")) for text in written) // BYTES_PER_TOKEN)


def _text_of(prompt: Chat | str) -> str:
    if isinstance(prompt, str):
        return prompt
    return f"{[said.get('content') for said in prompt.messages]} {prompt.tools or ''}"
