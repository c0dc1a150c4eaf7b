"""Upstreams as backends of requests: servers elsewhere, which are members of virtual models."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext
from typing import Protocol

from msgspec.structs import replace

from engine.core.messages.requests import Lane
from gateway.core.errors import ApiError, Fault, model_not_found
from gateway.core.tenants import Tenant
from gateway.requests.backend import Instruments, NeededTokens
from gateway.requests.deadlines import Timer
from gateway.requests.record import RequestRecord
from gateway.requests.turns import EncodingPauses
from gateway.requests.types import Admitted, Chat, GenerateRequest, GenerationChunk, PromptInput, Speech, TokenUsage
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


class UpstreamBackends:
    """The upstreams of a gateway, by name."""

    def __init__(self, upstreams: Mapping[str, Upstream], instruments: Instruments, tokenizer: Tokenizer) -> None:
        """`tokenizer` estimates numbers of tokens."""
        self._upstreams = upstreams
        self._instruments = instruments
        self._tokenizer = tokenizer

    def __contains__(self, member: str) -> bool:
        return member in self._upstreams

    def __getitem__(self, member: str) -> Upstream:
        return self._upstreams[member]

    def member(self, name: str, tenant: Tenant, lane: Lane) -> UpstreamBackend:
        """Return an upstream as the backend of a tenant's request. Raises ApiError (MODEL_NOT_FOUND) if the
        configuration does not let the tenant's data leave this installation for that upstream."""
        upstream = self._upstreams[name]
        if not upstream.permits(tenant, lane):
            raise model_not_found(name)
        return UpstreamBackend(upstream, self._instruments, self._tokenizer)


class UpstreamBackend:
    """An upstream as the `Backend` of one request."""

    adapter_name = None

    def __init__(self, upstream: Upstream, instruments: Instruments, tokenizer: Tokenizer) -> None:
        self._upstream = upstream
        self._instruments = instruments
        self._tokenizer = tokenizer

    @property
    def name(self) -> str:
        return self._upstream.name

    def place(self, tenant: Tenant, lane: Lane, request: GenerateRequest) -> AbstractContextManager[None]:
        """Hold nothing: the upstream counts the requests that it has itself."""
        return nullcontext()

    def check(self, tenant: Tenant, request: GenerateRequest) -> None:
        tenant.class_of(request.urgency.request_class)  # raises if the tenant has no such class
        self._upstream.check(request, tenant)

    async def prepare(
        self, tenant: Tenant, lane: Lane, request: GenerateRequest, record: RequestRecord, engine_wait: float | None
    ) -> UpstreamRun:
        record.asked.max_tokens = request.output.asked_tokens or 0
        record.work.prompt_tokens = await estimated_tokens(self._tokenizer, tenant.name, request.prompts)
        stream = self._upstream.stream(request, tenant)
        return UpstreamRun(stream, request, record, Speech(self._tokenizer, None, calls_apart=True), self._instruments)


class UpstreamRun:
    """The `Run` of a request that an upstream answers."""

    def __init__(
        self,
        stream: AsyncGenerator[GenerationChunk, None],
        request: GenerateRequest,
        record: RequestRecord,
        speech: Speech,
        instruments: Instruments,
    ) -> None:
        """`stream` is the upstream's, which sends the request when it is first read."""
        self._stream = stream
        self._request = request
        self._record = record
        self._speech = speech
        self._outputs = instruments.outputs
        self._clock = instruments.clock

    @property
    def needed(self) -> NeededTokens:
        request, record = self._request, self._record
        average = math.ceil(self._outputs.average(record.caller.tenant, record.served.name))
        asked = max(request.output.asked_tokens or 0, request.output.reserve_tokens)
        outputs = 0 if request.pooling else (asked or average) * self._num_answers
        least = None if asked else record.work.prompt_tokens + self._num_answers
        return NeededTokens(record.work.prompt_tokens + outputs, least)

    def held(self) -> AbstractAsyncContextManager[object]:
        return nullcontext()

    def begin(self) -> None:
        """Do nothing: what an upstream has begun is not taken back for free."""

    async def chunks(self, timer: Timer) -> AsyncGenerator[GenerationChunk, None]:
        """Yield the chunks of the upstream's stream. The answer's tokens are estimated until the upstream tells the
        usage. A failure before the first output is not charged, unless the upstream has answered without what the
        request asks for (UNSUPPORTED_PARAMETER). A caller who leaves is charged for the prompt and the output so
        far."""
        record, times = self._record, self._record.times
        times.submitted = self._clock()
        record.bill.fall_due()
        try:
            async with aclosing(self._stream) as chunks:
                async for chunk in chunks:
                    now = self._clock()
                    times.admitted = times.admitted or now
                    if chunk.has_output:
                        timer.on_token()
                        times.note_output(now)
                        record.work.note_tokens(chunk.answer, _estimated_length(chunk))
                    if chunk.usage is not None:
                        timer.on_answered()
                        self._end(chunk.usage, chunk.finish_reason or "stop")
                        chunk = replace(chunk, usage=record.work.usage)
                    yield chunk
                    timer.on_waiting()
        except ApiError as error:
            is_answered = error.fault is Fault.UNSUPPORTED_PARAMETER and times.admitted is not None
            if not (is_answered or times.first_token):
                record.bill.waive()
            raise

    def admitted(self, headers: Mapping[str, str]) -> Admitted:
        request, record = self._request, self._record
        assert record.lane is not None, "its lane is known"
        return Admitted(
            id=record.id,
            request_id=record.request_id,
            created=int(time.time()),
            model=record.asked.model,
            lane=record.lane,
            fingerprint=FINGERPRINT,
            prompt_ids=((),) * len(request.prompts),
            rate_headers=headers,
            speech=self._speech,
            temperature=request.given("temperature"),
            top_p=request.given("top_p"),
        )

    @property
    def _num_answers(self) -> int:
        return len(self._request.prompts) * self._request.n

    def _end(self, usage: TokenUsage, finish: str) -> None:
        """Complete the record of an answered request with the usage that the upstream reported; where it reported 0
        tokens, the estimates remain."""
        record, work = self._record, self._record.work
        if usage.prompt:
            work.prompt_tokens, work.completion_tokens = usage.prompt, usage.completion
            work.cached, work.reasoning_tokens = {0: usage.cached}, usage.reasoning
        record.times.first_token = record.times.first_token or self._clock()
        if self._request.pooling is None:
            average = work.completion_tokens / self._num_answers
            self._outputs.add(record.caller.tenant, record.served.name, average)
        record.end(finish, 200)


async def estimated_tokens(tokenizer: Tokenizer, tenant: str, prompts: Sequence[PromptInput]) -> int:
    """Return the estimated number of tokens of all prompts of a request, for its reservation: texts are encoded with
    this gateway's tokenizer, although the upstream's model may have another, and token ids are counted. Of chats, the
    texts of messages and tools are counted. `tenant` is whose share of the encoding threads is used."""
    total, pauses = 0, EncodingPauses()
    for prompt in prompts:
        if isinstance(prompt, tuple):
            total += len(prompt)
            continue
        text = _text_of(prompt)
        total += len(await tokenizer.encode(text, special=False, tenant=tenant))
        await pauses.after(len(text))
    return total


def _estimated_length(chunk: GenerationChunk) -> int:
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
