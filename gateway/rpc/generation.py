"""The service loralane.v1.Generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from msgspec.structs import replace

from gateway.core.errors import Fault, unavailable
from gateway.core.tenants import Authenticator, Principal
from gateway.openai.tools import text_content, tool_call_reader
from gateway.pb import generation_pb2 as pb
from gateway.pb import generation_pb2_grpc as pb_grpc
from gateway.requests.prompt_scores import off_the_loop
from gateway.requests.served_model import ModelCard
from gateway.requests.service import Gateway
from gateway.requests.types import Generation
from gateway.rpc.calls import RpcCall, respond, respond_authenticated
from gateway.rpc.pooled import PooledCall, embed_call, rerank_call, score_call
from gateway.rpc.wire import (
    Read,
    TokenText,
    chunk_to_pb,
    generate_request,
    model_query,
    prompt_input,
    response_to_pb,
    usage_metadata,
)

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"]
GENERATE, GENERATE_STREAM, EMBED, RERANK, SCORE = (
    f"/{SERVICE.full_name}/{SERVICE.methods_by_name[name].name}"
    for name in ("Generate", "GenerateStream", "Embed", "Rerank", "Score")
)


class GenerationService(pb_grpc.GenerationServicer):
    """Handlers of Generation. gRPC cancels a handler's task when its caller disconnects or its deadline passes; the
    gateway then aborts the request."""

    def __init__(self, gateway: Gateway, keys: Authenticator) -> None:
        self._gateway = gateway
        self._keys = keys

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        return await respond(context, partial(self._generate, request))

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        # Not an async generator: gRPC would leave a cancelled one to the garbage collector, with the request running.
        await respond(context, partial(self._stream, request))

    async def Embed(  # noqa: N802
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> pb.EmbedResponse:
        return await respond(context, partial(self._pool, EMBED, partial(embed_call, request)))

    async def Rerank(  # noqa: N802
        self, request: pb.RerankRequest, context: grpc.aio.ServicerContext
    ) -> pb.RerankResponse:
        return await respond(context, partial(self._pool, RERANK, partial(rerank_call, request)))

    async def Score(  # noqa: N802
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> pb.ScoreResponse:
        return await respond(context, partial(self._pool, SCORE, partial(score_call, request)))

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        return await respond_authenticated(context, self._keys, partial(self._tokenize, request))

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        return await respond_authenticated(context, self._keys, self._list_models)

    async def _list_models(self, call: RpcCall, principal: Principal) -> pb.ListModelsResponse:
        """Return the models that the caller's tenant may name. Raises ApiError (FORBIDDEN): it is an administrator."""
        cards = self._gateway.models.cards(principal.as_tenant().tenant)
        return pb.ListModelsResponse(models=map(_model_to_pb, cards))

    async def _generate(self, request: pb.GenerateRequest, call: RpcCall) -> pb.GenerateResponse:
        async with self._admitted(request, call, GENERATE) as (generation, read, token_text):
            chunks = [chunk async for chunk in generation]
            if usage := chunks[-1].usage:
                call.set_trailing(usage_metadata(usage))
            scores = (chunk.prompt_scores for chunk in chunks)
            return await off_the_loop(scores, lambda: response_to_pb(generation.admitted, chunks, read, token_text))

    async def _stream(self, request: pb.GenerateRequest, call: RpcCall) -> None:
        async with self._admitted(request, call, GENERATE_STREAM) as (generation, read, token_text):
            async for chunk in generation:
                told = read(chunk)
                if chunk.usage:
                    call.set_trailing(usage_metadata(chunk.usage))
                if told.text or told.calls or chunk.has_output or chunk.finish_reason:
                    await call.send(chunk_to_pb(generation.admitted, chunk, told, token_text))

    async def _pool(self, method: str, parse: Callable[[str], PooledCall], call: RpcCall) -> Any:
        """Run an Embed, Rerank or Score call and return its response message. `parse` converts the request message,
        given the request id."""
        with self._gateway.arriving(call.request_id, call.ingress(method)) as arrival:
            principal = arrival.identify(self._keys.authenticate(call.token))
            await self._gateway.turns.take(principal.tenant.name)
            parsed = parse(call.request_id)
            wanted = replace(parsed.request, ingress=arrival.ingress, deadline=call.time_remaining)
        async with self._gateway.generate(principal, wanted) as generation:
            await call.open(generation.admitted.headers())
            usage = None
            async for chunk in generation:
                if chunk.vector:
                    parsed.answer.add(chunk.answer, chunk.vector)
                usage = chunk.usage
            assert usage is not None, "the last chunk carries it"
            call.set_trailing(usage_metadata(usage))
            return parsed.answer.complete(generation.admitted, usage)

    async def _tokenize(self, request: pb.TokenizeRequest, call: RpcCall, principal: Principal) -> pb.TokenizeResponse:
        """Return a prompt's token ids and the context length in tokens. Raises ApiError: FORBIDDEN, the caller is an
        administrator; MODEL_NOT_FOUND; ENGINE_UNAVAILABLE, the engine, which alone knows the context length, is not
        ready; INVALID_REQUEST or UNSUPPORTED_PARAMETER, the model is not named or the prompt cannot be used."""
        tenant = principal.as_tenant().tenant
        await self._gateway.turns.take(tenant.name)
        model, _ = self._gateway.models.resolve(tenant, model_query(request.model))
        if not model.engine.ready:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not ready")
        prompt = prompt_input(request)
        with self._gateway.wire.hold(tenant) as hold:
            hold.take(request.ByteSize())
            async with self._gateway.encoding.take(hold):
                prompt_ids = await model.intake.encode(tenant, prompt)
        return pb.TokenizeResponse(ids=prompt_ids, max_model_len=model.engine.info.max_model_len)

    @asynccontextmanager
    async def _admitted(
        self, request: pb.GenerateRequest, call: RpcCall, method: str
    ) -> AsyncIterator[tuple[Generation, Read, TokenText]]:
        """Authenticate and admit a request; yield its generation, the function that separates the tool calls of its
        chunks from text, and the one that returns the text of a token of its model. Initial metadata are sent on
        admission, not before, so that a refusal can be a status alone. On exit the request is settled, or aborted if it
        has not ended."""
        with self._gateway.arriving(call.request_id, call.ingress(method)) as arrival:
            principal = arrival.identify(self._keys.authenticate(call.token))
            await self._gateway.turns.take(principal.tenant.name)
            wanted = generate_request(request, call.request_id, call.time_remaining)
            wanted = replace(wanted, ingress=arrival.ingress, coalesce=method == GENERATE)
        async with self._gateway.generate(principal, wanted) as generation:
            await call.open(generation.admitted.headers())
            speech = generation.admitted.speech
            calls = tool_call_reader(wanted, speech)
            yield generation, calls.read if calls else text_content, speech.tokenizer.token_text


def _model_to_pb(card: ModelCard) -> pb.Model:
    info = card.model.engine.info
    return pb.Model(
        id=card.name,
        root=card.root,
        parent=card.parent or "",
        created=card.created,
        max_model_len=info.max_model_len,
        weights=info.weights,
    )
