"""Calls of the HTTP API as data, and methods that make and send them, defined once for both kinds of clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, overload

import msgspec
from msgspec import Struct

from gateway.api_schema.operation import Operation
from gateway.client.paths import filled

T = TypeVar("T")
P = ParamSpec("P")


class Call(Struct, Generic[T], frozen=True):
    """One call of the HTTP API, whose answer is a T."""

    method: str
    path: str
    kind: type[Any]
    """Struct of the response's body, as /openapi.json describes it."""
    query: Mapping[str, str | int | float | None] = {}
    """Query parameters. Those that are None or empty are left out."""
    body: Struct | None = None
    field: str = ""
    """Field of the response's body that is the answer; empty if the whole body is."""

    @classmethod
    def of(
        cls,
        operation: Operation[Any],
        *names: str,
        query: Mapping[str, str | int | float | None] | None = None,
        body: Struct | None = None,
        field: str = "",
    ) -> Self:
        """Return a call of an operation. `names` are those that the placeholders of its path stand for, in their
        order. Raises NameRefused if one of them cannot be part of a path."""
        return cls(operation.method, filled(operation.path, *names), operation.kind, query or {}, body, field)

    @property
    def parameters(self) -> dict[str, str]:
        """The query parameters to send."""
        return {name: str(value) for name, value in self.query.items() if value not in (None, "")}

    @property
    def content(self) -> bytes | None:
        """The JSON body to send. None means that there is none."""
        return None if self.body is None else msgspec.json.encode(self.body)

    def answer(self, content: bytes) -> T:
        """Return the answer in a response's body. Fields that a newer gateway added are ignored. Raises
        msgspec.MsgspecError if the body is not what the API promises."""
        answer: Any = msgspec.json.decode(content, type=self.kind)
        return getattr(answer, self.field) if self.field else answer


class Sync(Protocol):
    """A blocking client: its methods return answers."""

    def send(self, call: Call[T]) -> T: ...


class Async(Protocol):
    """An asyncio client: its methods return awaitables of answers."""

    async def asend(self, call: Call[T]) -> T: ...


class Endpoint(Generic[P, T]):
    """Descriptor for a method of both kinds of clients. The method builds a `Call` from its arguments with the function
    `make`, and sends it. On a `Sync` client it returns the answer, a T, and on an `Async` client an awaitable of
    one."""

    def __init__(self, make: Callable[P, Call[T]]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Endpoint[P, T]: ...

    @overload
    def __get__(self, client: Sync, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, client: Async, owner: type) -> Callable[P, Awaitable[T]]: ...

    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self
        send = client.asend if hasattr(client, "asend") else client.send

        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return send(self._make(*args, **kwargs))

        method.__doc__ = self.__doc__
        return method
