"""`Client` and `AsyncClient`: typed methods for what OpenAI's client has none for."""

from __future__ import annotations

from typing import Any, Self, TypeVar

import httpx
import msgspec
from msgspec import Struct

from gateway.client import account_calls, adapter_calls, admin_calls, operation_calls, text_calls
from gateway.client.call import Call, Endpoint

TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""Timeouts of a call, in seconds. Loading or unloading an adapter may take minutes."""

T = TypeVar("T")


class ClientError(Exception):
    """The gateway refused a call. The message is the gateway's."""

    def __init__(self, message: str, *, status: int, code: str | None = None, param: str | None = None) -> None:
        """`status` is the HTTP status, `code` the error's code (docs/openai.md), and `param` the field that caused it;
        None means that there is none."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Methods:
    """Methods that both clients have. Each is documented by the function, in the `*_calls` modules, that builds its
    call."""

    adapters = Endpoint(adapter_calls.adapters)
    adapter = Endpoint(adapter_calls.adapter)
    load_adapter = Endpoint(adapter_calls.load_adapter)
    reload_adapter = Endpoint(adapter_calls.reload_adapter)
    unload_adapter = Endpoint(adapter_calls.unload_adapter)
    pin_adapter = Endpoint(adapter_calls.pin_adapter)
    unpin_adapter = Endpoint(adapter_calls.unpin_adapter)
    alias_adapter = Endpoint(adapter_calls.alias_adapter)
    allow_adapter = Endpoint(adapter_calls.allow_adapter)

    tokenize = Endpoint(text_calls.tokenize)
    detokenize = Endpoint(text_calls.detokenize)
    rerank = Endpoint(text_calls.rerank)
    score = Endpoint(text_calls.score)

    tenants = Endpoint(account_calls.tenants)
    tenant = Endpoint(account_calls.tenant)
    create_tenant = Endpoint(account_calls.create_tenant)
    change_tenant = Endpoint(account_calls.change_tenant)
    delete_tenant = Endpoint(account_calls.delete_tenant)
    disable_tenant = Endpoint(account_calls.disable_tenant)
    enable_tenant = Endpoint(account_calls.enable_tenant)
    keys = Endpoint(account_calls.keys)
    key = Endpoint(account_calls.key)
    create_key = Endpoint(account_calls.create_key)
    change_key = Endpoint(account_calls.change_key)
    rotate_key = Endpoint(account_calls.rotate_key)
    disable_key = Endpoint(account_calls.disable_key)
    enable_key = Endpoint(account_calls.enable_key)
    delete_key = Endpoint(account_calls.delete_key)
    limits = Endpoint(account_calls.limits)
    set_limits = Endpoint(account_calls.set_limits)
    reset_limits = Endpoint(account_calls.reset_limits)
    limits_used = Endpoint(account_calls.limits_used)
    usage = Endpoint(account_calls.usage)

    admins = Endpoint(admin_calls.admins)
    admin = Endpoint(admin_calls.admin)
    create_admin = Endpoint(admin_calls.create_admin)
    change_admin = Endpoint(admin_calls.change_admin)
    rotate_admin = Endpoint(admin_calls.rotate_admin)
    delete_admin = Endpoint(admin_calls.delete_admin)
    audit = Endpoint(admin_calls.audit)

    lanes = Endpoint(operation_calls.lanes)
    pause_lane = Endpoint(operation_calls.pause_lane)
    drain_lane = Endpoint(operation_calls.drain_lane)
    resume_lane = Endpoint(operation_calls.resume_lane)
    engines = Endpoint(operation_calls.engines)
    add_engine = Endpoint(operation_calls.add_engine)
    remove_engine = Endpoint(operation_calls.remove_engine)
    drain_engine = Endpoint(operation_calls.drain_engine)
    resume_engine = Endpoint(operation_calls.resume_engine)
    restart_engine = Endpoint(operation_calls.restart_engine)
    gateways = Endpoint(operation_calls.gateways)
    drain_gateway = Endpoint(operation_calls.drain_gateway)
    live_requests = Endpoint(operation_calls.live_requests)
    cancel_request = Endpoint(operation_calls.cancel_request)
    recent_requests = Endpoint(operation_calls.recent_requests)
    history = Endpoint(operation_calls.history)
    overview = Endpoint(operation_calls.overview)
    violations = Endpoint(operation_calls.violations)
    readiness = Endpoint(operation_calls.readiness)
    batch = Endpoint(operation_calls.batch)
    batches = Endpoint(operation_calls.batches)
    cancel_batch = Endpoint(operation_calls.cancel_batch)


class Client(Methods):
    """Calls a gateway, and waits for its answers. A context manager, which closes the connections at its end.

    Methods raise ClientError if the gateway refuses the call, and httpx.TransportError if it cannot be reached.
    """

    def __init__(self, url: str, key: str, *, http: httpx.Client | None = None) -> None:
        """Create a client of the gateway at `url`, such as http://127.0.0.1:8000; for administration, the address of
        `admin.port`, if that is set. `key` is an API key. `http` is the HTTP client to use, for example one with the
        caller's certificates, proxies or timeouts; it is closed with this client."""
        self._http = http or httpx.Client(timeout=TIMEOUT)
        self._url, self._headers = url.rstrip("/"), _headers(key)

    def send(self, call: Call[T]) -> T:
        """Send a call and return its answer."""
        response = self._http.request(call.method, self._url + call.path, **_arguments(call, self._headers))
        return _answer(call, response)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient(Methods):
    """Like `Client`, with methods that are awaited."""

    def __init__(self, url: str, key: str, *, http: httpx.AsyncClient | None = None) -> None:
        """Create a client, with arguments like those of `Client`."""
        self._http = http or httpx.AsyncClient(timeout=TIMEOUT)
        self._url, self._headers = url.rstrip("/"), _headers(key)

    async def asend(self, call: Call[T]) -> T:
        """Send a call and return its answer."""
        response = await self._http.request(call.method, self._url + call.path, **_arguments(call, self._headers))
        return _answer(call, response)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class _Detail(Struct):
    message: str
    code: str | None = None
    param: str | None = None


class _Refusal(Struct):
    error: _Detail


def _headers(key: str) -> dict[str, str]:
    """Return the headers of all calls. Raises ValueError, without the key, if no header can carry it."""
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the API key has characters that no API key has, such as the end of a line")
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


def _arguments(call: Call[Any], headers: dict[str, str]) -> dict[str, Any]:
    return {"params": call.parameters, "content": call.content, "headers": headers}


def _answer(call: Call[T], response: httpx.Response) -> T:
    """Return a call's answer. Raises ClientError if the response is an error, or no answer of this API."""
    try:
        if not response.is_error:
            return call.answer(response.content)
        detail = msgspec.json.decode(response.content, type=_Refusal).error
    except msgspec.MsgspecError as error:
        message = f"the server answered {response.status_code}, which is no answer of a gateway: {error}"
        raise ClientError(message, status=response.status_code) from error
    raise ClientError(detail.message, status=response.status_code, code=detail.code, param=detail.param)
