"""How the requests of every protocol are understood, and begun where they run in the background. HTTP and gRPC carry
bodies in and answers out; in between there is this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from msgspec import Struct

from gateway.anthropic.calls import MessageCall, message_call
from gateway.anthropic.errors import MESSAGES
from gateway.core.tenants import Principal, Tenant
from gateway.core.trace_context import Ingress
from gateway.embeddings.calls import PooledCall, embeddings_call, rerank_call, score_call
from gateway.openai.calls import ApiCall, chat_call, completion_call
from gateway.openai.render import Json
from gateway.protocols.invocations import invocation_call
from gateway.requests.service import Gateway
from gateway.requests.types import GenerateRequest
from gateway.responses.calls import ResponseCall
from gateway.responses.events import EventFeed
from gateway.responses.parse import own_names
from gateway.responses.service import Responses

RESPONSES = "/v1/responses"
RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
"""Paths of one endpoint: Jina's and the two that vLLM and Cohere's clients use besides."""
SCORE = ("/v1/score", "/score")

Call = ApiCall | MessageCall | ResponseCall | PooledCall
"""A parsed request: what is generated, and how the answer is rendered."""
Parser = Callable[[Gateway, Tenant, bytes, str, Ingress], Awaitable[Call]]
"""Function that parses the body of a tenant's request, given the request id and the ingress, too."""


class Protocol(Struct, frozen=True):
    """What the requests to one endpoint differ in from others. Their calls render the answers; the carrier chooses the
    shape of errors."""

    parse: Parser
    field_names: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns a context manager in which errors call fields by the protocol's names for them."""


class Begun(Struct, frozen=True):
    """A parsed request. If it is for a background response, that is running already."""

    call: Call
    wanted: GenerateRequest
    """The call's request, with the time limits of its carrier."""
    queued: tuple[Json, EventFeed] | None
    """The queued response and its events. None means that the request is still to be run."""


class Protocols:
    """The protocols of one gateway, by the path of their endpoint over HTTP."""

    def __init__(self, gateway: Gateway, responses: Responses) -> None:
        self._gateway = gateway
        self._responses = responses
        self.by_path: Mapping[str, Protocol] = {
            "/v1/chat/completions": Protocol(_off_the_loop(chat_call)),
            "/v1/completions": Protocol(_off_the_loop(completion_call)),
            RESPONSES: Protocol(responses.call, own_names),
            MESSAGES: Protocol(_off_the_loop(message_call)),
            "/v1/embeddings": Protocol(_off_the_loop(embeddings_call)),
            **dict.fromkeys(RERANK, Protocol(_off_the_loop(rerank_call))),
            **dict.fromkeys(SCORE, Protocol(_off_the_loop(score_call))),
            "/invocations": Protocol(_off_the_loop(invocation_call)),
        }

    async def begin(
        self,
        path: str,
        principal: Principal,
        body: bytes,
        named: tuple[str, Ingress],
        limited: Callable[[Call], GenerateRequest],
    ) -> Begun:
        """Parse the body of a tenant's request, of which nothing is kept from then on, and begin it if it runs in the
        background.

        Args:
            path: the endpoint's path over HTTP.
            named: the request's id and ingress.
            limited: called with the parsed request; returns what is to be run, with the carrier's time limits, or
                raises ApiError if the carrier cannot answer such a request.

        Raises:
            ApiError: those of the protocol's parser and of `Responses.begin`.
        """
        parsing = self.by_path[path].parse(self._gateway, principal.tenant, body, *named)
        del body  # the answer may take minutes
        call = await parsing
        wanted = limited(call)
        if not isinstance(call, ResponseCall) or not call.in_background:
            return Begun(call, wanted, None)
        return Begun(call, wanted, await self._responses.begin(self._gateway, principal, call, wanted))


def _off_the_loop(parse: Callable[[Gateway, Tenant, bytes, str, Ingress], Call]) -> Parser:
    """Return `parse` as an asynchronous parser, which parses a long body in a thread."""

    async def parsed(gateway: Gateway, tenant: Tenant, body: bytes, request_id: str, ingress: Ingress) -> Call:
        bound = partial(parse, gateway, tenant, body, request_id, ingress)
        return await gateway.parsing.run(tenant.name, len(body), bound)

    return parsed
