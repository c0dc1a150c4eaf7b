"""The service loralane.v1.Generation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc

from gateway.core.errors import Fault, unavailable
from gateway.core.tenants import Authenticator, Principal
from gateway.generation import GenerateRequest, Generation
from gateway.grpc_calls import Call, answer
from gateway.grpc_wire import (
    Read,
    chunk_to_pb,
    generate_request,
    model_query,
    prompt_input,
    response_to_pb,
    usage_metadata,
)
from gateway.openai_tools import as_text, call_reader
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
        return await answer(context, self._keys, partial(self._generate, request))

    async def GenerateStream(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        # Not an async generator: gRPC would leave a cancelled one to the garbage collector, and the engine running.
        await answer(context, self._keys, partial(self._stream, request))

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.TokenizeResponse:
        return await answer(context, self._keys, partial(self._tokenize, request))

    async def _generate(self, request: pb.GenerateRequest, call: Call, principal: Principal) -> pb.GenerateResponse:
        wanted, read = self._understand(request, call)
        async with self._admitted(wanted, call, principal) as generation:
            chunks = [chunk async for chunk in generation]
        if usage := chunks[-1].usage:
            call.set_trailing(usage_metadata(usage))
        return response_to_pb(generation.admitted, chunks, read, self._token_text)

    async def _stream(self, request: pb.GenerateRequest, call: Call, principal: Principal) -> None:
        wanted, read = self._understand(request, call)
        async with self._admitted(wanted, call, principal) as generation:
            async for chunk in generation:
                told = read(chunk)
                if chunk.usage:
                    call.set_trailing(usage_metadata(chunk.usage))
                if told.text or chunk.token_ids or chunk.finish_reason:
                    await call.send(chunk_to_pb(generation.admitted, chunk, told, self._token_text))

    async def _tokenize(self, request: pb.TokenizeRequest, call: Call, principal: Principal) -> pb.TokenizeResponse:
        """A context length is known only from an engine that was there."""
        intake, engine = self._gateway.intake, self._gateway.engine
        if not engine.ready:
            raise unavailable(Fault.ENGINE_UNAVAILABLE, "the engine is not ready")
        intake.resolve(principal.tenant, model_query(request.model))
        ids = await intake.encode(prompt_input(request))
        return pb.TokenizeResponse(ids=ids, max_model_len=engine.info.max_model_len)

    def _understand(self, request: pb.GenerateRequest, call: Call) -> tuple[GenerateRequest, Read]:
        """What is wanted, and what reads the answers."""
        wanted = generate_request(request, call.request_id, call.time_remaining)
        calls = call_reader(wanted, self._gateway.intake.dialect)
        return wanted, calls.read if calls else as_text

    @asynccontextmanager
    async def _admitted(self, wanted: GenerateRequest, call: Call, principal: Principal) -> AsyncIterator[Generation]:
        """Initial metadata go out with admission, not before: until then a status can still be the whole answer."""
        async with self._gateway.generate(principal, wanted) as generation:
            await call.open(generation.admitted.headers())
            yield generation
