"""A request that is ready to run: what to reserve for it, and what the engine computes for each of its answers."""

from __future__ import annotations

from msgspec import Struct

from engine.core.messages.requests import AdapterHash, Lane, Origin, Request, SamplingParams
from gateway.adapters.record import AdapterRecord
from gateway.core.tenants import Tenant
from gateway.requests.answer.thinking import ThinkingBudget
from gateway.requests.prompt_scores import PromptReader
from gateway.requests.record import RequestRecord
from gateway.requests.types import Chat, GenerateRequest
from gateway.text.reasoning.parser import Thinking
from gateway.text.tools.dialect import Dialect, schemas_of
from gateway.text.tools.parser import ToolParser

SEED_BITS = 64
"""Number of bits of a seed of random draws."""


class GenerationJob(Struct, frozen=True):
    """A checked and tokenized request, which only needs a reservation to run. `RequestIntake.build_job` creates it."""

    request: GenerateRequest
    tenant: Tenant
    adapter: AdapterRecord | None
    lane: Lane
    prompt_ids: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    """Sampling parameters of each prompt, with the seed of its first answer."""
    thinking: Thinking | None = None
    """How the answers' reasoning begins. None means that they have none, or that it is part of their text."""
    budget: ThinkingBudget | None = None
    """Limits the reasoning of each answer. None means no limit."""
    dialect: Dialect | None = None
    """Dialect of the tool calls that are read from the answers. None means that the request offers no tools."""
    prediction: tuple[int, ...] = ()
    """Tokens that the answers will repeat for the most part."""
    average_output: int = 1
    """Average output tokens of earlier answers to this tenant with this adapter, rounded up."""

    @property
    def adapter_hash(self) -> AdapterHash | None:
        """Content hash of the adapter. None means the base model."""
        return self.adapter.version if self.adapter else None

    @property
    def call_marks(self) -> tuple[str, ...]:
        """Marks of tool calls. The detokenizer keeps them in the answers' text even if they are special tokens."""
        return tuple(self.dialect.marks) if self.dialect else ()

    @property
    def calls_apart(self) -> bool:
        """Return whether chunks have tool calls in `calls` instead of in their text. This is so if the request offers
        tools and has stop strings, so that no stop string is found in a call."""
        return self.dialect is not None and bool(self.request.output.stop)

    def call_parser(self) -> ToolParser | None:
        """Return a new parser that separates one answer's tool calls from its text. None means that chunks have the
        calls in their text, or that no tools are offered."""
        offering = self.request.offering
        if self.dialect is None or offering is None or not self.calls_apart:
            return None
        return ToolParser(self.dialect, schemas_of(offering.tools))

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that are read from the answers: those of reasoning and of tool calls."""
        return (*(self.thinking.marks.kept if self.thinking else ()), *self.call_marks)

    @property
    def num_answers(self) -> int:
        return len(self.prompt_ids) * self.request.n

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompt_ids))

    @property
    def ends_by_itself(self) -> bool:
        """Return whether the model decides how long the answers are: EOS ends them, and the context limits them before
        any `max_tokens` does."""
        return not self.request.sampling.ignore_eos and all(map(self._has_ceiling, self.params))

    def reserve_tokens(self) -> int:
        """Return the number of tokens to reserve: every prompt once, and the maximum output of every answer.

        Where the caller set no limit, the reservation assumes `average_output` tokens for each answer, because the rest
        of a long context would be more than most limits allow. The tokens really used are charged at the end.
        """
        if self.request.output.is_limited:
            outputs = sum(max(params.max_tokens, self.request.output.reserve_tokens) for params in self.params)
        else:
            outputs = sum(min(params.max_tokens, self.average_output) for params in self.params)
        return self.prompt_tokens + outputs * self.request.n

    def continued_prompt(self, prompt_index: int) -> tuple[int, ...]:
        """Return the token ids of a prompt if the text of its answers continues it. Empty means that the text starts
        anew, as in a chat that does not continue its last message, or that the answer is a vector."""
        prompt = self.request.prompts[prompt_index]
        if self.request.pooling is not None:
            return ()
        begins = isinstance(prompt, Chat) and not prompt.options.continue_final_message
        return () if begins else self.prompt_ids[prompt_index]

    def prompt_reader(self, prompt_index: int) -> PromptReader | None:
        """Return a reader of a prompt's log probabilities. None means that the request asks for none."""
        width = self.request.sampling.prompt_logprobs
        return None if width is None else PromptReader(self.prompt_ids[prompt_index], width)

    def engine_request(self, record: RequestRecord, index: int, now: float) -> Request:
        """Build the engine's request for one answer, with a unique id. Further answers of a prompt get other seeds.

        Args:
            record: the request's record, with its id, its start and its reserved tokens.
            index: number of the answer over all prompts: the `n` answers of the first prompt, then those of the next.
            now: the time of submission, in seconds on the record's clock. The time that has passed since the request
                arrived is subtracted from the deadline. Only batch requests carry a deadline, which orders batch work;
                in the interactive lane the TTFT and ITL goals suffice.
        """
        prompt_index, number = divmod(index, self.request.n)
        params, urgency, output = self.params[prompt_index], self.request.urgency, self.request.output
        limits, own = self.request.time_limits, self.tenant.class_of(urgency.request_class)
        return Request(
            id=f"{record.id}-{index}",
            prompt_ids=self.prompt_ids[prompt_index],
            params=params if not number else params._replace(seed=(params.seed + number) % 2**SEED_BITS),
            adapter_hash=self.adapter_hash,
            lane=self.lane,
            priority=own.priority if urgency.priority is None else urgency.priority,
            tenant=self.tenant.name,
            weight=self.tenant.weight,
            request_class=urgency.request_class,
            class_weight=own.weight,
            deadline=limits.after(now - record.times.started).deadline if self.lane is Lane.BATCH else None,
            ttft=own.ttft_s if urgency.ttft is None else urgency.ttft,
            itl=own.itl_s if urgency.itl is None else urgency.itl,
            origin=self._origin(record),
            expected_tokens=self._expected_tokens(params),
            cache_salt=self.request.encoding.cache_salt,
            prediction=self.prediction,
            suspect=record.engines.suspect,
            pooling=self.request.pooling,
            # A stop string must end the answer at once, and tokens that are held back would look like a stall.
            whole=output.coalesce and not output.stop and limits.stall is None,
        )

    def _has_ceiling(self, params: SamplingParams) -> bool:
        """Return whether max_tokens is the rest of the context, because no limit or a larger one was set."""
        asked = self.request.output.asked_tokens
        return asked is None or asked > params.max_tokens

    def _expected_tokens(self, params: SamplingParams) -> int | None:
        if not self._has_ceiling(params):
            return None
        return params.max_tokens if params.ignore_eos else min(params.max_tokens, self.average_output)

    def _origin(self, record: RequestRecord) -> Origin:
        adapter, part = record.served.adapter or "", record.bill.reserved_tokens // self.num_answers
        return Origin(record.id, record.request_id, record.caller.key_id, record.asked.model, adapter, part)
