"""Turns the bodies of the Messages API into generation requests and the renderers of their responses."""

from __future__ import annotations

from msgspec import Struct

from engine.core.messages.grammar import Grammar
from engine.core.messages.requests import SamplingParams
from gateway.anthropic.parse import parse
from gateway.anthropic.prompt import chat_of
from gateway.anthropic.render import AnswerReader, MessageRenderer
from gateway.anthropic.schema import STANDARD_ONLY, CountTokensRequest, MessagesRequest, OutputConfig, Prompted
from gateway.core.errors import unsupported_parameter
from gateway.core.tenants import Tenant
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.openai.convert import defaulted_by, time_limits_of, urgency_of
from gateway.openai.render import WholeAnswer, whole_answer
from gateway.openai.structured import schema_grammar
from gateway.openai.tools import tool_call_reader
from gateway.requests.options import EncodingOptions, FieldNames, OutputOptions
from gateway.requests.service import Gateway
from gateway.requests.types import Admitted, Chat, GenerateRequest, Generation

FORMAT = "output_config.format"


class MessageCall(Struct, frozen=True):
    """A parsed request, whose response may be a stream."""

    request: GenerateRequest
    stream: bool

    def envelope(self, admitted: Admitted) -> MessageRenderer:
        return MessageRenderer(admitted, AnswerReader(tool_call_reader(self.request, admitted.speech)))

    async def whole(self, generation: Generation) -> WholeAnswer:
        return await whole_answer(self.envelope(generation.admitted), generation)


def message_call(
    gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
) -> MessageCall:
    """Parse `text`, the JSON body of /v1/messages. The tenant's settings decide about unknown fields. Raises ApiError:
    INVALID_JSON; INVALID_REQUEST, a field is missing or invalid; UNSUPPORTED_PARAMETER, a field or its value is not
    supported."""
    body = parse(text, MessagesRequest, tenant.unknown_fields)
    return MessageCall(_request(body, request_id, ingress), bool(body.stream))


async def count_tokens(gateway: Gateway, tenant: Tenant, text: bytes) -> int:
    """Return the number of tokens of the prompt in `text`, the JSON body of /v1/messages/count_tokens. Raises what
    `message_call` raises, and ApiError: MODEL_NOT_FOUND."""
    body, chat = await gateway.parsing.run(tenant.name, len(text), lambda: _counted(text, tenant))
    model, _ = gateway.models.resolve(tenant, body.query)
    if body.query.model not in gateway.virtual_models:  # which member will answer is not known yet
        model.intake.check_thinking(needed=_needs_thinking(body))
    return len(
        await model.intake.encode(
            tenant, chat, EncodingOptions(cache_salt=body.cache_salt or ""), most=model.intake.most_counted
        )
    )


def _counted(text: bytes, tenant: Tenant) -> tuple[CountTokensRequest, Chat]:
    body = parse(text, CountTokensRequest, tenant.unknown_fields)
    return body, chat_of(body)


def _needs_thinking(body: Prompted) -> bool:
    """Return whether the answer must reason. `adaptive`, which Claude Code always sends, leaves that to the model."""
    return body.thinking is not None and body.thinking.type == "enabled"


def _request(body: MessagesRequest, request_id: str, ingress: Ingress) -> GenerateRequest:
    grammar = _grammar(body.output_config)
    tier = None if body.service_tier == STANDARD_ONLY else body.service_tier
    return GenerateRequest(
        model=body.query,
        prompts=(chat_of(body),),
        request_id=request_id,
        ingress=ingress,
        sampling=_sampling(body, grammar),
        defaulted=defaulted_by(body),
        output=OutputOptions(
            max_tokens=body.max_tokens,
            thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
            needs_thinking=_needs_thinking(body),
            stop=tuple(body.stop_sequences or ()),
            coalesce=not body.stream,
        ),
        urgency=urgency_of(body, tier),
        time_limits=time_limits_of(body),
        encoding=EncodingOptions(cache_salt=body.cache_salt or ""),
        fields=FieldNames(grammar=FORMAT if grammar else ""),
    )


def _grammar(config: OutputConfig | None) -> Grammar | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise unsupported_parameter(f"{FORMAT}.type", f"{config.format.type[:80]!r} is not supported")
    return schema_grammar(config.format.schema, f"{FORMAT}.schema")


def _sampling(body: MessagesRequest, grammar: Grammar | None) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        grammar=grammar,
        speculates=body.speculation != "off",
    )
