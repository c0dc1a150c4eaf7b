"""Turns the body of a request to /v1/responses into a generation request and the renderer of its response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from engine.core.messages.requests import SamplingParams
from gateway.api_schema.chats import JsonSchema, ResponseFormat
from gateway.core.errors import invalid_request, unsupported_parameter
from gateway.core.lanes import requested_lane
from gateway.core.routing import ModelQuery
from gateway.core.tenants import Tenant
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.openai.convert import extensions, sampling_of
from gateway.openai.render import WholeAnswer, whole_answer
from gateway.openai.structured import Constraint, by_format, constraint
from gateway.openai.tools import tool_call_reader
from gateway.requests.types import Admitted, Chat, GenerateRequest, Generation, Speech
from gateway.responses.parse import own_names, parse
from gateway.responses.prompt import chat_of
from gateway.responses.render import AnswerReader, Keep, ResponseRenderer, echo_of
from gateway.responses.schema import LOGPROBS, InputItem, ResponsesRequest, TextFormat

MOST_LOGGED = 8
"""Maximum number of skipped tools that the log names for one request."""


if TYPE_CHECKING:  # the process that validates a batch needs no gateway, which imports numpy and Redis' client
    from gateway.requests.service import Gateway


class ResponseCall(Struct, frozen=True):
    """A parsed request, whose response may be a stream."""

    body: ResponsesRequest
    request: GenerateRequest
    echo: dict[str, Any]
    """Fields of the response that repeat the request's."""
    keep: Keep | None = None
    """Stores the complete response. None means that it is not stored."""

    @property
    def chat(self) -> Chat:
        """Return the conversation that the model continues."""
        [chat] = self.request.prompts
        assert isinstance(chat, Chat), "responses have no other prompts"
        return chat

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def in_background(self) -> bool:
        """Return whether the caller gets the response's id at once and polls for the answer."""
        return bool(self.body.background)

    def envelope(self, admitted: Admitted) -> ResponseRenderer:
        return ResponseRenderer(self.echo, self.request, admitted, self.reader(admitted.speech), self.keep)

    def reader(self, speech: Speech) -> AnswerReader:
        """Return a new reader that makes output items from the answer of the model with this `speech`."""
        return AnswerReader(speech.tokenizer, tool_call_reader(self.request, speech))

    async def whole(self, generation: Generation) -> WholeAnswer:
        return await whole_answer(self.envelope(generation.admitted), generation)


def stateless_call(
    gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
) -> ResponseCall:
    """Parse `text`, the JSON body of a response that is not stored. The tenant's settings decide about unknown fields.
    Raises what `response_call` raises, and ApiError: INVALID_JSON."""
    body = parse(text, tenant.unknown_fields)
    refuse_storage(body)
    return response_call(body, request_id, ingress)


def response_call(
    body: ResponsesRequest,
    request_id: str,
    ingress: Ingress = UNKNOWN,
    history: Sequence[InputItem] = (),
    keep: Keep | None = None,
) -> ResponseCall:
    """Convert a parsed body to a call that continues `history`; `keep` stores the response (None: it is not stored).
    Tools that the model cannot call are skipped and logged. Raises ApiError: INVALID_REQUEST, UNSUPPORTED_PARAMETER."""
    with own_names():
        request = response_request(body, request_id, ingress, history)
    if skipped := [f"{tool.type} {tool.name or ''}".strip()[:80] for tool in body.tools or () if not tool.is_function]:
        import structlog  # Imported here: processes that validate batches are to start fast.

        structlog.get_logger("responses").info("tools_skipped", request_id=request_id, tools=skipped[:MOST_LOGGED])
    return ResponseCall(body, request, echo_of(body), keep)


def refuse_storage(body: ResponsesRequest) -> None:
    """Raise ApiError (UNSUPPORTED_PARAMETER) if a body asks to store its response, to run it in the background or to
    continue a stored one, for callers that have no store of responses."""
    for name in ("store", "background", "previous_response_id"):
        if getattr(body, name):
            raise unsupported_parameter(name, "is not supported here; send the earlier items in input")


def response_request(
    body: ResponsesRequest, request_id: str, ingress: Ingress = UNKNOWN, history: Sequence[InputItem] = ()
) -> GenerateRequest:
    """Convert a body, which continues the conversation `history`, to a request with one prompt. Raises ApiError:
    INVALID_REQUEST, fields contradict each other or an item, tool or schema is invalid; UNSUPPORTED_PARAMETER, such a
    part is of an unsupported kind."""
    if body.stream_options is not None and not body.stream:
        raise invalid_request("stream_options needs stream to be true", "stream_options")
    output_constraint = _constraint(body)
    return GenerateRequest(
        model=ModelQuery(body.model, body.adapter_id, body.lora_path),
        prompts=(chat_of(body, history),),
        request_id=request_id,
        ingress=ingress,
        sampling=_sampling(body, output_constraint),
        grammar_field=output_constraint.field,
        max_tokens=body.max_output_tokens,
        thinking_budget=body.thinking_token_budget,
        seed=body.seed,
        stop=body.stop_strings,
        keep_stop=bool(body.include_stop_str_in_output),
        coalesce=not body.stream,
        lane=requested_lane(body.service_tier),
        **extensions(body),
    )


def _sampling(body: ResponsesRequest, output_constraint: Constraint) -> SamplingParams:
    wants_logprobs = body.top_logprobs or LOGPROBS in (body.include or ())
    return sampling_of(body, (body.top_logprobs or 0) if wants_logprobs else None, output_constraint.grammar)


def _constraint(body: ResponsesRequest) -> Constraint:
    wanted = body.text.format if body.text else None
    text_constraint = by_format(_chat_format(wanted)) if wanted else Constraint()
    return constraint(body, Constraint(text_constraint.grammar, "text.format" if text_constraint.grammar else None))


def _chat_format(wanted: TextFormat) -> ResponseFormat:
    """Convert `text.format` to the `response_format` of chats, which has the JSON schema in a nested object."""
    if wanted.type != "json_schema":
        if wanted.schema is not None:
            raise invalid_request("text.format.schema needs type json_schema", "text.format.schema")
        return ResponseFormat(wanted.type)
    if wanted.schema is None:
        raise invalid_request("text.format.schema is required", "text.format.schema")
    return ResponseFormat(wanted.type, JsonSchema(schema=wanted.schema, name=wanted.name, strict=wanted.strict))
