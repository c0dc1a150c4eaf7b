"""The service loralane.v1.Generation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from gateway.core.errors import Fault, unavailable
from gateway.core.tenants import Authenticator, Principal
from gateway.generation import Generation
from gateway.grpc_calls import Call, serve
from gateway.grpc_wire import chunk_to_pb, generate_request, model_query, prompt_input, response_to_pb, usage_metadata
from gateway.pb import generation_pb2 as pb
from gateway.pb import generation_pb2_grpc as pb_grpc
from gateway.service import Gateway


class GenerationService(pb_grpc.GenerationServicer):
    """gRPC cancels a handler's task when its caller leaves or its deadline passes; the gateway does the rest."""

    def __init__(self, gateway: Gateway, keys: Authenticator) -> None:
        self._gateway = gateway
        self._keys = keys
        self._token_text = gateway.tokenizer.token_text

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> pb.GenerateResponse:
        return await serve(context, self._keys, partial(self._generate, request))

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        # Not an async generator: gRPC would leave a cancelled one to the garbage collector, and the engine running.
        await serve(context, self._keys, partial(self._stream, request))

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        return await serve(context, self._keys, partial(self._tokenize, request))

    async def _generate(self, request: pb.GenerateRequest, call: Call, principal: Principal) -> pb.GenerateResponse:
        async with self._admitted(request, call, principal) as generation:
            chunks = [chunk async for chunk in generation]
        if usage := chunks[-1].usage:
            call.set_trailing(usage_metadata(usage))
        return response_to_pb(generation.admitted, chunks, self._token_text)

    async def _stream(self, request: pb.GenerateRequest, call: Call, principal: Principal) -> None:
        async with self._admitted(request, call, principal) as generation:
            async for chunk in generation:
                if chunk.usage:
                    call.set_trailing(usage_metadata(chunk.usage))
                if chunk.text or chunk.token_ids or chunk.finish_reason:
                    await call.send(chunk_to_pb(generation.admitted, chunk, self._token_text))

    async def _tokenize(self, request: pb.TokenizeRequest, call: Call, principal: Principal) -> pb.TokenizeResponse:
        """A context length is known only from an engine that was there."""
        intake, engine = self._gateway.intake, self._gateway.engine
        if not engine.ready:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not ready")
        intake.resolve(principal.tenant, model_query(request.model))
        ids = await intake.encode(prompt_input(request))
        return pb.TokenizeResponse(ids=ids, max_model_len=engine.info.max_model_len)

    @asynccontextmanager
    async def _admitted(
        self, request: pb.GenerateRequest, call: Call, principal: Principal
    ) -> AsyncIterator[Generation]:
        """Initial metadata go out with admission, not before: until then a status can still be the whole answer."""
        wanted = generate_request(request, call.request_id, call.time_remaining)
        async with self._gateway.generate(principal, wanted) as generation:
            await call.open(generation.admitted.headers())
            yield generation
