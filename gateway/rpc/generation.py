"""The service loralane.v1.Generation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message
from msgspec.structs import replace

from gateway.core.errors import Fault, unavailable
from gateway.openai.tools import text_content, tool_call_reader
from gateway.pb import generation_pb2 as pb
from gateway.pb import generation_pb2_grpc as pb_grpc
from gateway.requests.rendering import off_the_loop
from gateway.requests.served_model import ModelCard
from gateway.requests.service import Gateway
from gateway.requests.types import Generation
from gateway.rpc.calls import RpcCall
from gateway.rpc.pooled import PooledCall, embed_call, rerank_call, score_call
from gateway.rpc.wire import (
    Read,
    TokenText,
    chunk_to_pb,
    generate_request,
    model_query,
    prompt_input,
    response_bytes,
    usage_metadata,
)

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"]
REQUESTS = tuple(
    f"/{SERVICE.full_name}/{SERVICE.methods_by_name[name].name}"
    for name in ("Generate", "GenerateStream", "Embed", "Rerank", "Score")
)
"""Names of the methods whose calls are requests for a generation."""

T = TypeVar("T")


class GenerationService(pb_grpc.GenerationServicer):
    """Handlers of Generation. gRPC cancels a handler's task when its caller disconnects or its deadline passes; the
    gateway then aborts the request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.GenerateRequest, call: RpcCall) -> bytes:  # noqa: N802
        admitted = self._admitted(request, call, coalesce=True)
        del request  # see `_admitted`
        async with admitted as (generation, read, token_text):
            chunks = [chunk async for chunk in generation]
            if usage := chunks[-1].usage:
                call.set_trailing(usage_metadata(usage))
            return await off_the_loop(chunks, lambda: response_bytes(generation.admitted, chunks, read, token_text))

    async def GenerateStream(self, request: pb.GenerateRequest, call: RpcCall) -> None:  # noqa: N802
        # Not an async generator: gRPC would leave a cancelled one to the garbage collector, with the request running.
        admitted = self._admitted(request, call)
        del request  # see `_admitted`
        async with admitted as (generation, read, token_text):
            async for chunk in generation:
                told = read(chunk)
                if chunk.usage:
                    call.set_trailing(usage_metadata(chunk.usage))
                if told.text or told.calls or chunk.has_output or chunk.finish_reason:
                    await call.send(chunk_to_pb(generation.admitted, chunk, told, token_text))

    def Embed(self, request: pb.EmbedRequest, call: RpcCall) -> Awaitable[Message]:  # noqa: N802
        return self._pool(embed_call, request, call)

    def Rerank(self, request: pb.RerankRequest, call: RpcCall) -> Awaitable[Message]:  # noqa: N802
        return self._pool(rerank_call, request, call)

    def Score(self, request: pb.ScoreRequest, call: RpcCall) -> Awaitable[Message]:  # noqa: N802
        return self._pool(score_call, request, call)

    async def Tokenize(self, request: pb.TokenizeRequest, call: RpcCall) -> pb.TokenizeResponse:  # noqa: N802
        """Return a prompt's token ids and the context length in tokens. Raises ApiError: MODEL_NOT_FOUND;
        ENGINE_UNAVAILABLE, the engine, which alone knows the context length, is not ready; INVALID_REQUEST or
        UNSUPPORTED_PARAMETER, the model is not named or the prompt cannot be used."""
        tenant = call.principal.tenant
        model, _ = self._gateway.models.resolve(tenant, model_query(request.model))
        if not model.engine.ready:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not ready")
        prompt = await self._parsed(call, partial(prompt_input, request))
        async with self._gateway.encoding.take(call.hold or self._gateway.wire.hold(tenant)):
            prompt_ids = await model.intake.encode(tenant, prompt, most=model.intake.most_counted)
        return pb.TokenizeResponse(ids=prompt_ids, max_model_len=model.engine.info.max_model_len)

    async def ListModels(self, request: pb.ListModelsRequest, call: RpcCall) -> pb.ListModelsResponse:  # noqa: N802
        """Return the models that the caller's tenant may name."""
        cards = self._gateway.models.cards(call.principal.tenant)
        return pb.ListModelsResponse(models=map(_model_to_pb, cards))

    async def _parsed(self, call: RpcCall, read: Callable[[], T]) -> T:
        """Return what `read` makes of the request message: of a long one in a thread, when it is the tenant's turn."""
        return await self._gateway.parsing.run(call.tenant, call.message_bytes, read)

    async def _pool(self, parse: Callable[[Any, str], PooledCall], request: Message, call: RpcCall) -> Message:
        """Run an Embed, Rerank or Score call and return its response message. `parse` converts the request message,
        given the request id."""
        with call.arriving(self._gateway) as arrival:
            parsed = await self._parsed(call, partial(parse, request, call.request_id))
            wanted = replace(parsed.request, ingress=arrival.ingress, deadline=call.time_remaining)
        del request
        call.free()
        async with self._gateway.generate(call.principal, wanted) as generation:
            await call.open(generation.admitted.headers())
            usage = None
            async for chunk in generation:
                if chunk.vector:
                    parsed.answer.add(chunk.answer, chunk.vector)
                usage = chunk.usage
            assert usage is not None, "the last chunk carries it"
            call.set_trailing(usage_metadata(usage))
            return parsed.answer.complete(generation.admitted, usage)

    @asynccontextmanager
    async def _admitted(
        self, request: pb.GenerateRequest, call: RpcCall, *, coalesce: bool = False
    ) -> AsyncIterator[tuple[Generation, Read, TokenText]]:
        """Admit a request; yield its generation, what separates tool calls from text, and what returns a token's text.
        Initial metadata are sent on admission. On exit the request is settled, or aborted."""
        # The message is let go when it has been understood: an answer may take minutes, and a message can have 8 MiB
        # that no limit of tokens knows of.
        with call.arriving(self._gateway) as arrival:
            read = partial(generate_request, request, call.request_id, call.time_remaining)
            wanted = await self._parsed(call, read)
            wanted = replace(wanted, ingress=arrival.ingress, coalesce=coalesce)
        del request, read
        call.free()
        async with self._gateway.generate(call.principal, wanted) as generation:
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
