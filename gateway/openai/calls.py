"""Turns the body of a request to an OpenAI endpoint into a generation request and the style of its response, for HTTP
handlers and for the lines of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec import Struct

from gateway.api_schema.chats import ChatRequest, CompletionRequest, Sampled
from gateway.core.errors import invalid_request
from gateway.core.tenants import Tenant
from gateway.core.trace_context import UNKNOWN, Ingress
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import parse
from gateway.openai.render import Envelope, WholeAnswer, whole_answer
from gateway.openai.styles import Additions, ChatStyle, CompletionStyle, Style
from gateway.openai.tools import tool_call_reader
from gateway.requests.served_model import ServedModel
from gateway.requests.service import Gateway
from gateway.requests.types import Admitted, GenerateRequest, Generation

MOST_ECHOED_IDS = 200_000
"""Maximum number of token ids in the prompts of a request that echoes them, as many as log probabilities of prompts
allow. They are decoded on the event loop, a microsecond each: the four million that fit into 8 MiB took four
seconds."""


class ApiCall(Struct, frozen=True):
    """A parsed request and how its response is rendered: streamed if `stream`, with a last chunk for the usage if
    `include_usage`."""

    request: GenerateRequest
    make_style: Callable[[Admitted], Style]
    """Makes the renderer of the response's choices, given the tokenizer and tool-call dialect of the model that answers
    and the ids of its prompts."""
    stream: bool
    include_usage: bool
    continuous_usage: bool

    def envelope(self, admitted: Admitted) -> Envelope:
        num_answers, asked = len(admitted.prompt_ids) * self.request.n, self.request.lane
        return Envelope(
            self.make_style(admitted),
            admitted,
            num_answers=num_answers,
            asked=asked,
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
        )

    async def whole(self, generation: Generation) -> WholeAnswer:
        return await whole_answer(self.envelope(generation.admitted), generation)


def chat_call(gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN) -> ApiCall:
    """Parse `text`, the JSON body of /v1/chat/completions. The tenant's settings decide about unknown fields. Raises
    ApiError: INVALID_JSON; INVALID_REQUEST, a field is missing or invalid; UNSUPPORTED_PARAMETER, a field or its value
    is not supported."""
    body = parse(text, ChatRequest, tenant.unknown_fields)
    request = chat_request(body, request_id, ingress)
    prompt = body.prompt_logprobs is not None

    def make_style(admitted: Admitted) -> ChatStyle:
        tools = tool_call_reader(request, admitted.speech)
        additions = _additions(body, request, admitted)
        return ChatStyle(admitted.speech.tokenizer, additions, tools=tools, prompt_logprobs=prompt)

    return _call(body, request, make_style)


def completion_call(
    gateway: Gateway, tenant: Tenant, text: bytes, request_id: str, ingress: Ingress = UNKNOWN
) -> ApiCall:
    """Parse `text`, the JSON body of /v1/completions. The tenant's settings decide about unknown fields. Raises
    ApiError: INVALID_JSON; INVALID_REQUEST, a field is missing or invalid; UNSUPPORTED_PARAMETER, a field or its value
    is not supported."""
    body = parse(text, CompletionRequest, tenant.unknown_fields)
    request = completion_request(body, request_id, ingress)
    model = gateway.models.likely(tenant, request.model)
    echo = _prompt_texts(model, request) if body.echo else ()

    def make_style(admitted: Admitted) -> CompletionStyle:
        return CompletionStyle(
            admitted.speech.tokenizer,
            _additions(body, request, admitted),
            echo=echo,
            logprobs=body.logprobs,
            prompt_logprobs=body.prompt_logprobs,
        )

    return _call(body, request, make_style)


CallParser = Callable[[Gateway, Tenant, bytes, str, Ingress], ApiCall]

CALLS: Mapping[str, CallParser] = MappingProxyType(
    {"/v1/chat/completions": chat_call, "/v1/completions": completion_call}
)
"""Parsers of request bodies, by the path of the endpoint that generates."""


def _call(body: Sampled, request: GenerateRequest, make_style: Callable[[Admitted], Style]) -> ApiCall:
    return ApiCall(request, make_style, bool(body.stream), body.include_usage, body.continuous_usage)


def _additions(body: Sampled, request: GenerateRequest, admitted: Admitted) -> Additions:
    return Additions(
        token_ids=bool(body.return_token_ids),
        prompt_ids=[ids for ids in admitted.prompt_ids for _ in range(request.n)],
        stop_ids=request.sampling.stop_token_ids,
        names_ids=bool(body.return_tokens_as_token_ids),
    )


def _prompt_texts(model: ServedModel, request: GenerateRequest) -> list[str]:
    """Return the prompt of each answer as text, in the order of the answers: each prompt `n` times, decoded if it was
    token ids. Raises ApiError: INVALID_REQUEST, there are too many token ids, or the model has no token with one."""
    if sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple)) > MOST_ECHOED_IDS:
        raise invalid_request(f"echo allows {MOST_ECHOED_IDS} token ids in all prompts together", "prompt")
    texts = [_text_of(model, prompt) if isinstance(prompt, tuple) else str(prompt) for prompt in request.prompts]
    return [text for text in texts for _ in range(request.n)]


def _text_of(model: ServedModel, prompt_ids: tuple[int, ...]) -> str:
    model.intake.check_ids(prompt_ids, "prompt")
    return model.tokenizer.decode(prompt_ids)
