"""Routes that count, encode or decode tokens without a generation: no limit applies, and nothing is charged."""

from __future__ import annotations

from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.anthropic.calls import count_tokens
from gateway.api_schema.tokens import DetokenizeRequest, TokenizeRequest
from gateway.core.errors import invalid_request
from gateway.core.routing import ModelQuery
from gateway.core.tenants import Tenant
from gateway.http.body import read_body
from gateway.http.caller import hold_of, tenant_of
from gateway.http.settings import PortSettings
from gateway.http.stream import json_response
from gateway.openai.convert import chat_messages
from gateway.openai.parse import parse
from gateway.openai.tools import offered_tools
from gateway.requests.served_model import ServedModel
from gateway.requests.types import Chat
from gateway.services import Services
from gateway.text.chat_template import template_options


class TokensApi:
    """Handlers and routes of the endpoints that count, encode or decode tokens."""

    def __init__(self, services: Services, settings: PortSettings) -> None:
        self._gateway = services.gateway
        self._accounts = services.accounts
        self._max_body_bytes = settings.max_body_bytes

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages/count_tokens", self.message_tokens, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def message_tokens(self, request: Request) -> Response:
        tenant, body = await self._begin(request)
        async with self._gateway.encoding.take(hold_of(request)):
            return json_response({"input_tokens": await count_tokens(self._gateway, tenant, body)})

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a chat, their number and the context length in tokens, as vLLM's API does.

        With `return_token_strs` the response also has each token as the vocabulary spells it. Raises what `_begin` and
        `EncodingTurns.take` raise, and ApiError: INVALID_JSON; MODEL_NOT_FOUND; INVALID_REQUEST, there is not exactly
        one of prompt and messages, or the chat is invalid; UNSUPPORTED_PARAMETER, for example tools that the chat
        template does not support.
        """
        tenant, raw = await self._begin(request)
        asked = await self._gateway.parsing.run(tenant.name, len(raw), partial(_tokenized, raw))
        model, prompt = self._served_model(tenant, asked.model), asked.prompt
        tokenizer, most = model.tokenizer, model.intake.most_counted
        async with self._gateway.encoding.take(hold_of(request)):
            if isinstance(prompt, str):
                ids = await tokenizer.encode(prompt, special=asked.special is not False, tenant=tenant.name, most=most)
            else:
                chat = (prompt.messages, prompt.tools, prompt.options)
                ids = await tokenizer.encode_chat(tenant.name, *chat, most=most, special=bool(asked.special))
            pieces = await tokenizer.pieces(ids) if asked.pieces else None
        answer = {
            "count": len(ids),
            "max_model_len": model.engine.info.max_model_len,
            "tokens": ids,
            "token_strs": pieces,
        }
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        tenant, raw = await self._begin(request)
        body = await self._gateway.parsing.run(tenant.name, len(raw), partial(parse, raw, DetokenizeRequest))
        model = self._served_model(tenant, body.model)
        model.intake.check_ids(body.tokens, "tokens")
        async with self._gateway.encoding.take(hold_of(request)):
            return json_response({"prompt": await model.tokenizer.decode_apart(body.tokens, skip_special=False)})

    async def _begin(self, request: Request) -> tuple[Tenant, bytes]:
        """Authenticate the caller, read the body, and wait until the gateway lets the tenant begin another request (a
        few per iteration of the event loop). Raises ApiError: the key is missing, not valid or an administrator's, or
        the body is too large."""
        tenant = tenant_of(self._accounts, request).tenant
        body = await read_body(request, self._max_body_bytes)
        await self._gateway.turns.take(tenant.name)
        return tenant, body

    def _served_model(self, tenant: Tenant, name: str | None) -> ServedModel:
        """Return the base model that serves a name; None means the only one. Raises ApiError: MODEL_NOT_FOUND, the
        caller may not use the named model; INVALID_REQUEST, the name is None and there are several models."""
        models = self._gateway.models
        if name is not None:
            return models.resolve(tenant, ModelQuery(name))[0]
        if len(models) > 1:
            names = ", ".join(model.name for model in models)
            raise invalid_request(f"model is required: name one of {names}, or one of their adapters", "model")
        return models.default


class Tokenized(Struct, frozen=True):
    """What a body of /tokenize asks for."""

    model: str | None
    prompt: Chat | str
    special: bool | None
    """True means that special tokens are added. None means that they are to a text, and not to a chat."""
    pieces: bool
    """True means that the answer has each token as the vocabulary spells it."""


def _tokenized(raw: bytes) -> Tokenized:
    """Parse the body of /tokenize. Raises ApiError: INVALID_JSON; INVALID_REQUEST, there is not exactly one of prompt
    and messages, or the chat is invalid; UNSUPPORTED_PARAMETER."""
    body = parse(raw, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_request("give either prompt or messages", "prompt")
    prompt: Chat | str = body.prompt or ""
    if body.messages is not None:
        options = template_options(body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs)
        prompt = Chat(chat_messages(body.messages), offered_tools(body.tools or ()), options=options)
    return Tokenized(body.model, prompt, body.add_special_tokens, bool(body.return_token_strs))
