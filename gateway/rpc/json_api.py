"""The service loralane.v1.JsonApi: responses and messages, with the JSON of the HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, nullcontext
from functools import partial

from msgspec.structs import replace

from gateway.anthropic.calls import count_tokens
from gateway.anthropic.errors import MESSAGES
from gateway.core.errors import ApiError, invalid_request
from gateway.openai.render import Json, encoded, event_data, list_page
from gateway.pb import json_api_pb2 as pb
from gateway.pb import json_api_pb2_grpc as pb_grpc
from gateway.protocols.generation import RESPONSES, Begun, Call, PooledCall, Protocols
from gateway.requests.service import Gateway
from gateway.requests.types import GenerateRequest, Generation
from gateway.responses.events import EventFeed
from gateway.responses.service import DEFAULT_PAGE, MAX_PAGE, Responses
from gateway.rpc.answers import usage_metadata
from gateway.rpc.calls import RpcCall

SERVICE = pb.DESCRIPTOR.services_by_name["JsonApi"]
CALL, STREAM = (f"/{SERVICE.full_name}/{name}" for name in ("Call", "Stream"))
REQUESTS = (CALL, STREAM)
"""Names of the methods whose calls are, or may be, requests for a generation."""
PATHS = {"create_response": RESPONSES, "create_message": MESSAGES}
"""Paths over HTTP of what a call creates."""


class JsonApiService(pb_grpc.JsonApiServicer):
    """Handlers of JsonApi. gRPC cancels a handler's task when its caller disconnects or its deadline passes; the
    gateway then aborts the request, unless it runs in the background."""

    def __init__(self, gateway: Gateway, responses: Responses) -> None:
        self._gateway = gateway
        self._responses = responses
        self._protocols = Protocols(gateway, responses)

    async def Call(self, request: pb.JsonRequest, call: RpcCall) -> pb.JsonResponse:  # noqa: N802
        call.field_of = str
        answering = (self._create if _creates(request) else self._other)(request, call)
        with self._field_names(request):
            del request  # `_create` lets it go, too, when it has been understood
            return pb.JsonResponse(json=b"".join(await encoded(await answering)).decode())

    async def Stream(self, request: pb.JsonRequest, call: RpcCall) -> None:  # noqa: N802
        call.field_of = str
        answering = (self._stream_new if _creates(request) else self._stream_stored)(request, call)
        with self._field_names(request):
            del request
            await answering

    async def _create(self, request: pb.JsonRequest, call: RpcCall) -> Json:
        beginning = self._begin(request, call, CALL)
        del request
        begun = await beginning
        if begun.queued is not None:
            return begun.queued[0]
        async with self._generation(begun, call) as generation:
            whole = await begun.call.whole(generation)
            call.set_trailing(usage_metadata(whole.usage))
            return whole.body

    async def _stream_new(self, request: pb.JsonRequest, call: RpcCall) -> None:
        beginning, usage = self._begin(request, call, STREAM), None
        del request
        begun = await beginning
        if begun.queued is not None:
            await _send_feed(call, begun.queued[1])
            return
        assert not isinstance(begun.call, PooledCall), "what has a stream is no vector"
        async with self._generation(begun, call) as generation:
            renderer = begun.call.envelope(generation.admitted)
            await _send(call, renderer.opening())
            async for chunk in generation:
                await _send(call, renderer.delta(chunk))
                usage = chunk.usage
        assert usage is not None, "the last chunk carries it"
        call.set_trailing(usage_metadata(usage))
        await _send(call, await renderer.closing(usage))

    async def _other(self, request: pb.JsonRequest, call: RpcCall) -> Json:
        """Count tokens, or do an operation on a stored response, and return the answer."""
        tenant, kind = call.principal.tenant, request.WhichOneof("call")
        if kind == "count_message_tokens":
            body = await self._gateway.parsing.run(tenant.name, call.message_bytes, partial(_body, request))
            async with self._gateway.encoding.take(call.hold or self._gateway.wire.hold(tenant)):
                return {"input_tokens": await count_tokens(self._gateway, tenant, body)}
        match kind:
            case "get_response":
                if request.get_response.HasField("starting_after"):
                    raise invalid_request("starting_after is for Stream", "starting_after")
                async with self._gateway.encoding.take(call.hold or self._gateway.wire.hold(tenant)):
                    return await self._responses.get(tenant.name, request.get_response.response_id)
            case "list_input_items":
                async with self._gateway.encoding.take(call.hold or self._gateway.wire.hold(tenant)):
                    return await self._input_items(tenant.name, request.list_input_items)
            case "cancel_response":
                return await self._responses.cancel(tenant.name, request.cancel_response)
            case "delete_response":
                return await self._responses.delete(tenant.name, request.delete_response)
        raise _missing()

    async def _input_items(self, tenant: str, asked: pb.ListInputItemsRequest) -> Json:
        limit = asked.limit or DEFAULT_PAGE
        if not 1 <= limit <= MAX_PAGE:
            raise invalid_request(f"limit must be at most {MAX_PAGE}", "limit")
        after, newest_first = asked.after or None, not asked.oldest_first
        page = await self._responses.input_items(
            tenant, asked.response_id, after=after, limit=limit, newest_first=newest_first
        )
        return list_page(page.data, page.has_more)

    async def _stream_stored(self, request: pb.JsonRequest, call: RpcCall) -> None:
        kind = request.WhichOneof("call")
        if kind is None:
            raise _missing()
        if kind != "get_response":
            raise invalid_request(f"{kind} has no stream; use Call", kind)
        asked = request.get_response
        after = asked.starting_after if asked.HasField("starting_after") else -1
        await _send_feed(call, self._responses.events(self._gateway, call.tenant, asked.response_id, after))

    async def _begin(self, request: pb.JsonRequest, call: RpcCall, method: str) -> Begun:
        """Parse the body of a new response or message. A response in the background is started at once; the deadline of
        the call does not apply to it."""

        def limited(parsed: Call) -> GenerateRequest:
            call.free()
            if isinstance(parsed, PooledCall) or parsed.stream != (method == STREAM):
                raise invalid_request("stream must be true in Stream, and false or absent in Call", "stream")
            return parsed.request

        with call.arriving(self._gateway) as arrival:
            path, ingress = PATHS[request.WhichOneof("call")], arrival.ingress
            body = await self._gateway.parsing.run(call.tenant, call.message_bytes, partial(_body, request))
            del request
            beginning = self._protocols.begin(path, call.principal, body, (call.request_id, ingress), limited)
            del body
            return await beginning

    def _field_names(self, request: pb.JsonRequest) -> AbstractContextManager[None]:
        """Return a context manager in which errors call fields by their names in the body of the request."""
        path = PATHS.get(request.WhichOneof("call"))
        return nullcontext() if path is None else self._protocols.by_path[path].field_names()

    @asynccontextmanager
    async def _generation(self, begun: Begun, call: RpcCall) -> AsyncIterator[Generation]:
        """Admit the request, with the earlier one of the deadlines of its body and of the call, and yield its
        generation."""
        limits = begun.wanted.time_limits.within(call.time_remaining)
        limited = replace(begun.wanted, time_limits=limits)
        async with self._gateway.generate(call.principal, limited) as generation:
            await call.open(generation.admitted.headers())
            yield generation


def _creates(request: pb.JsonRequest) -> bool:
    return request.WhichOneof("call") in PATHS


def _body(request: pb.JsonRequest) -> bytes:
    return str(getattr(request, request.WhichOneof("call"))).encode()


def _missing() -> ApiError:
    names = ", ".join(field.name for field in pb.JsonRequest.DESCRIPTOR.oneofs_by_name["call"].fields)
    return invalid_request(f"one of {names} is required", "call")


async def _send_feed(call: RpcCall, feed: EventFeed) -> None:
    async with aclosing(feed.pages()) as pages:
        async for page in pages:
            await call.open()
            await _send(call, page)


async def _send(call: RpcCall, frames: bytes) -> None:
    """Send server-sent events as messages, one for each."""
    for data in event_data(frames):
        await call.send(pb.JsonResponse(json=data))
