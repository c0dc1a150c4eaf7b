"""Checks and tokenizes a request before tokens are reserved for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from msgspec.structs import replace

from engine.core.messages.grammar import GrammarKind
from engine.core.messages.requests import Lane, Pooling, SamplingParams
from engine.grammar_check.pool import GrammarPool
from engine.rpc.api import EngineApi
from gateway.adapters.record import AdapterRecord
from gateway.adapters.registry import AdapterRegistry
from gateway.core.errors import Fault, context_length_exceeded, invalid_request, unavailable, unsupported_parameter
from gateway.core.tenants import Tenant
from gateway.requests.answer.thinking import ThinkingBudget
from gateway.requests.grammars import Constraints
from gateway.requests.job import SEED_BITS, GenerationJob
from gateway.requests.options import ALL_THAT_FIT, ORDINARY_ENCODING, EncodingOptions
from gateway.requests.settings import ServiceSettings
from gateway.requests.turns import EncodingPauses
from gateway.requests.types import Chat, GenerateRequest, PromptInput
from gateway.text.detokenizer import PRIME_TOKENS
from gateway.text.reasoning.parser import ReasoningMarks, Thinking, choose_marks
from gateway.text.tokenizer import MOST_TOKENS, Tokenizer
from gateway.text.tools.dialect import Dialect, spoken_dialect
from gateway.text.tools.dialects import choose_dialect
from gateway.text.tools.harmony import Harmony

CHARACTERS_PER_TOKEN = 8
"""A prediction's text is cut to this many characters for each token that the prediction may have, before it is encoded.
Most texts have about 4 characters per token."""
PREDICTED_PER_TOKEN, LEAST_PREDICTED = 4, 512
"""A prediction may have PREDICTED_PER_TOKEN tokens for each output token that an answer may have, because an answer
leaves parts of its prediction out, and LEAST_PREDICTED more. It is sent to the engine with each answer and never
charged: with 128 answers of one token each, a prediction as long as the context would take hundreds of megabytes
there."""


class RequestIntake:
    """Checks and tokenizes requests for one base model and its adapters."""

    def __init__(
        self,
        engine: EngineApi,
        tokenizer: Tokenizer,
        adapters: AdapterRegistry,
        settings: ServiceSettings,
        grammars: GrammarPool,
    ) -> None:
        """`grammars` compiles grammars of callers to check them, and is not closed here."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._settings = settings
        self._constraints = Constraints(tokenizer.token_id, grammars)

    @cached_property
    def dialect(self) -> Dialect | None:
        """Dialect in which the model writes tool calls. None means that the gateway parses none."""
        return choose_dialect(self._settings.tool_parser, self._tokenizer.tool_template)

    @cached_property
    def marks(self) -> ReasoningMarks | None:
        """Marks around the reasoning in the model's answers. None means that the gateway separates none."""
        return choose_marks(self._settings.reasoning_parser, self._tokenizer.template)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Sampling parameters of this model where a request sets none, and the bound `max_tokens`, if it has one."""
        return self._settings.sampling_defaults

    @property
    def most_counted(self) -> int:
        """Maximum number of tokens of a prompt whose tokens are only counted or returned: at least the context's, so
        that callers learn by how much their prompts exceed it."""
        return max(MOST_TOKENS, self._engine.info.max_model_len)

    async def encode(
        self,
        tenant: Tenant,
        prompt: PromptInput,
        options: EncodingOptions = ORDINARY_ENCODING,
        field: str = "prompt",
        most: int = 0,
    ) -> tuple[int, ...]:
        """Return a whole prompt's token ids. Those of a chat are cached for the tenant's requests with the same salt.
        Errors name `field`. `most` bounds the tokens of long texts; 0 means the context's.

        Raises ApiError: INVALID_REQUEST, the prompt is empty, has ids that are no tokens of this model, or is refused
        by the chat template; UNSUPPORTED_PARAMETER, the chat template does not support tools; CONTEXT_LENGTH_EXCEEDED,
        a long text does not fit into the context.
        """
        most, special = most or self._engine.info.max_model_len, options.add_special_tokens
        if isinstance(prompt, Chat):
            chat = (prompt.messages, prompt.tools, prompt.options)
            salt = options.cache_salt
            prompt_ids = await self._tokenizer.encode_chat(tenant.name, *chat, salt, most, special=bool(special))
        elif isinstance(prompt, str):
            prompt_ids = await self._tokenizer.encode(
                prompt, special=special is not False, tenant=tenant.name, most=most
            )
        else:
            prompt_ids = prompt
        if not prompt_ids:
            raise invalid_request("the prompt is empty" if field == "prompt" else f"{field} is empty", field)
        if len(prompt_ids) <= most:  # others are refused for their length
            self.check_ids(prompt_ids, field)
        return prompt_ids

    def check(self, tenant: Tenant, request: GenerateRequest) -> None:
        """Check what takes no tokenizing. Raises ApiError: INVALID_REQUEST, UNSUPPORTED_PARAMETER."""
        tenant.class_of(request.urgency.request_class)
        sampling, stop, settings = request.sampling, request.output.stop, self._settings
        if not request.prompts:
            raise invalid_request("there is no prompt", "prompt")
        if request.pooling is not None:
            self._check_pooling(request, request.pooling)
        elif len(request.prompts) * request.n > settings.max_choices:
            raise invalid_request(f"at most {settings.max_choices} answers (prompts x n) a request", "n")
        if request.offering is not None:
            spoken_dialect(self.dialect)
        self.check_thinking(needed=request.output.needs_thinking)
        if request.n > 1 and sampling.prompt_logprobs is not None:
            raise unsupported_parameter("n", "above 1 is not supported with log probabilities of the prompt")
        if "" in stop or sum(map(len, stop)) > settings.max_stop_characters:
            bound = (
                f"stop strings must not be empty, nor longer than {settings.max_stop_characters} characters together"
            )
            raise invalid_request(bound, "stop")
        for param, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ):
            if len(ids) > settings.max_listed_ids:
                raise invalid_request(f"{param} must have at most {settings.max_listed_ids} token ids", param)
            self.check_ids(ids, param)

    async def build_job(
        self,
        tenant: Tenant,
        request: GenerateRequest,
        adapter: AdapterRecord | None,
        lane: Lane,
        engine_wait: float | None = None,
    ) -> GenerationJob:
        """Tokenize a request, which `check` has passed, for an adapter of this model (None: none), check what that
        needs, and wait up to `engine_wait` seconds (None: those of the settings) for an engine that is not ready.

        The job has the adapter's version at the end of this call, not at its start; `average_output` is yet to be set.

        Raises:
            ApiError: INVALID_REQUEST, UNSUPPORTED_PARAMETER, CONTEXT_LENGTH_EXCEEDED, MODEL_NOT_FOUND (the adapter was
                unloaded meanwhile), ENGINE_UNAVAILABLE (the engine is not ready in time or lacks the adapter, or a
                grammar could not be checked), RATE_LIMIT_EXCEEDED (too many grammars of the tenant wait to be
                compiled).
        """
        request = self.with_defaults(request)
        prompt_ids = await self._encoded(tenant, request)
        thinking = self._thinking(request, prompt_ids)
        request = await self._constraints.with_checked_grammar(tenant.name, request, self.dialect, thinking)
        most = min(request.output.reserve_tokens, self._engine.info.max_model_len)
        request = replace(request, output=replace(request.output, reserve_tokens=most))
        params = tuple(self._fit(request, index, len(ids)) for index, ids in enumerate(prompt_ids))
        if not self._engine.ready:
            await self._wait_for_engine(self._settings.engine_wait if engine_wait is None else engine_wait)
        budget = await self._budget(request, thinking)
        dialect = self.dialect if request.offering is not None else None
        prediction = await self._predicted(tenant, request, max(one.max_tokens for one in params))
        picked = None if adapter is None else self._adapters.pick(adapter.name)  # last: no await follows it
        return GenerationJob(request, tenant, picked, lane, prompt_ids, params, thinking, budget, dialect, prediction)

    async def _predicted(self, tenant: Tenant, request: GenerateRequest, max_tokens: int) -> tuple[int, ...]:
        """Return the token ids of the request's prediction, as many as the context has room for and answers of
        `max_tokens` may need. Of a very long text, only the beginning is encoded."""
        if not (request.prediction and request.sampling.speculates):
            return ()
        most = min(self._engine.info.max_model_len, PREDICTED_PER_TOKEN * max_tokens + LEAST_PREDICTED)
        text = request.prediction[: most * CHARACTERS_PER_TOKEN]
        prediction = (await self._tokenizer.encode(text, special=False, tenant=tenant.name))[:most]
        self.check_ids(prediction, "prediction")
        return prediction

    async def _budget(self, request: GenerateRequest, thinking: Thinking | None) -> ThinkingBudget | None:
        """Return what limits the reasoning of each answer. None means that no limit was asked for, or that the gateway
        reads no reasoning from the answers."""
        tokens = request.output.thinking_budget
        if tokens is None or thinking is None:
            return None
        closing = await self._tokenizer.encode(thinking.marks.closing, special=False)
        return ThinkingBudget(tokens, thinking, closing, self._tokenizer)

    def _thinking(self, request: GenerateRequest, prompt_ids: Sequence[tuple[int, ...]]) -> Thinking | None:
        """Return how the reasoning of a chat's answers begins. A chat that continues its last message continues the
        reasoning in it. None means that the gateway separates no reasoning from the answers, or that they have none: a
        context-free grammar of the caller leaves no room for it."""
        marks, prompt, grammar = self.marks, request.prompts[0], request.sampling.grammar
        if marks is None or not isinstance(prompt, Chat):
            return None
        if grammar is not None and grammar.kind is GrammarKind.CONTEXT_FREE:
            return None
        if marks.in_channels:
            calls = request.offering is not None and isinstance(self.dialect, Harmony)
            return Thinking(marks, prompt.options.continue_final_message, calls)
        if prompt.options.continue_final_message:
            begun = marks.are_open_in(str(prompt.messages[-1]["content"]))
            return Thinking(marks, begun=True) if begun else None
        tail = self._tokenizer.decode(prompt_ids[0][-PRIME_TOKENS:], skip_special=False)
        return Thinking(marks, begun=tail.rstrip().endswith(marks.opening))

    async def _encoded(self, tenant: Tenant, request: GenerateRequest) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each prompt. Other requests take turns on the event loop after some prompts. Raises
        what `encode` raises, and ApiError: INVALID_REQUEST, prompts to pool or to score have too many tokens
        together."""
        encoded, total, most, pauses = [], 0, self._most_tokens(request), EncodingPauses()
        for index, prompt in enumerate(request.prompts):
            ids = await self._prompt(tenant, request, index)
            total += len(ids)
            if most is not None and total > most:
                field, kind = request.prompt_field(index), "" if request.pooling else " for so many log probabilities"
                raise invalid_request(f"a request may have {most} tokens{kind}; up to {field} it has {total}", field)
            encoded.append(ids)
            await pauses.after(0 if isinstance(prompt, Chat) else len(prompt))
        return tuple(encoded)

    async def _prompt(self, tenant: Tenant, request: GenerateRequest, index: int) -> tuple[int, ...]:
        """Return the token ids of one prompt, as many as the request keeps. Raises what `encode` raises."""
        prompt, field, cut = request.prompts[index], request.prompt_field(index), request.encoding.truncation
        encode = partial(self.encode, tenant, prompt, request.encoding, field)
        if cut is None:
            return await encode()
        asked = request.output.asked_tokens
        room = self._engine.info.max_model_len - (1 if asked is None else asked)
        if cut.most == ALL_THAT_FIT and room < 1:
            raise invalid_request("max_tokens takes the whole context, and leaves no room for the prompt", "max_tokens")
        ids = cut.cut(await encode(most=self.most_counted), room)
        self.check_ids(ids, field)
        return ids

    def _most_tokens(self, request: GenerateRequest) -> int | None:
        """Return the maximum number of tokens of all prompts together, for a request that pools its prompts or asks for
        their log probabilities. None means no maximum, as for all other requests."""
        if request.pooling is not None:
            return max(self._settings.max_pooled_tokens, self._engine.info.max_model_len)
        width = request.sampling.prompt_logprobs
        return None if width is None else self._settings.max_prompt_logprobs // (1 + width)

    async def _wait_for_engine(self, seconds: float) -> None:
        """Wait until the engine is ready. Raises ApiError: ENGINE_UNAVAILABLE after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._engine.wait_ready()
        except TimeoutError as error:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not ready") from error

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError (INVALID_REQUEST, naming `param`) if any of the token ids is outside the vocabulary."""
        vocab_size = self._engine.info.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise invalid_request(f"token ids in {param} must be from 0 to {vocab_size - 1}, not {wrong}", param)

    def check_thinking(self, *, needed: bool) -> None:
        """Raise ApiError (UNSUPPORTED_PARAMETER) if thinking is `needed` and the gateway cannot read it from the
        model's answers."""
        if needed and self.marks is None:
            raise unsupported_parameter("thinking", "is not supported by this model (model.reasoning_parser)")

    def _check_pooling(self, request: GenerateRequest, pooling: Pooling) -> None:
        most, hidden_size = self._settings.max_pooled, self._engine.info.hidden_size
        if len(request.prompts) > most:
            raise invalid_request(f"a request may have at most {most} texts", request.prompt_field(most).split("[")[0])
        if pooling.dimensions > hidden_size:
            raise invalid_request(f"dimensions must be from 1 to {hidden_size} for this model", "dimensions")

    def with_defaults(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the model's defaults for those sampling parameters that the caller did not set, and a
        random seed if it set none."""
        known = {**self.sampling_defaults, "seed": random.getrandbits(SEED_BITS)}
        given = {name: one for name, one in known.items() if name in request.defaulted}
        return replace(request, sampling=request.sampling._replace(**given), defaulted=frozenset())

    def _fit(self, request: GenerateRequest, index: int, prompt_tokens: int) -> SamplingParams:
        """Return the sampling parameters of one prompt. As in vLLM, max_tokens is cut to the context's room after the
        prompt. Raises ApiError: CONTEXT_LENGTH_EXCEEDED, the prompt leaves no room; INVALID_REQUEST, min_tokens is
        above max_tokens."""
        room = self._engine.info.max_model_len - prompt_tokens
        sampling, asked = request.sampling, request.output.asked_tokens
        if room < (asked != 0):
            needed = prompt_tokens + (asked != 0)
            raise context_length_exceeded(needed, self._engine.info.max_model_len, request.prompt_field(index))
        room = min(room, int(self.sampling_defaults.get("max_tokens", room)))
        max_tokens = room if asked is None else min(room, asked)
        if sampling.min_tokens > max_tokens:
            raise invalid_request(f"min_tokens must not be above max_tokens ({max_tokens})", "min_tokens")
        return sampling.with_greedy._replace(max_tokens=max_tokens, seed=sampling.seed % 2**SEED_BITS)
