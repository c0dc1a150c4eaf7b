"""What operators see and change of the engines, lanes and live requests of all base models, for the admin APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from engine.pb import engine_pb2 as pb
from gateway.api_schema.engines import EngineOverview, EngineStatus
from gateway.api_schema.traffic import LaneStatus, LiveRequest, LiveRequests
from gateway.core.errors import ApiError, Fault, invalid_request, unavailable
from gateway.engines.directory import EngineDirectory
from gateway.engines.replica import EngineState
from gateway.observe.live import running_first
from gateway.observe.model_operations import ModelOperations
from gateway.observe.recent import RecentRequestStore

SHORTEST_ID = 6
"""Minimum number of characters of an id that are accepted as its unambiguous beginning in place of the id."""

T = TypeVar("T")


class Operations:
    """Offers the methods of `ModelOperations` over all base models of a gateway. A method that takes `model` acts on
    the base model of this name; if the name is empty, it reports on all base models, unless its docstring says
    otherwise.

    Results over all base models leave out those whose engine does not answer. Methods raise ApiError:
    ENGINE_UNAVAILABLE if no engine that they ask answers; INVALID_REQUEST if no base model has the given name.
    """

    def __init__(self, models: Iterable[ModelOperations], directory: EngineDirectory) -> None:
        """`models` has the operations of each base model, in the order of the configuration. `directory` stores the
        engines that operators add."""
        self._models = {model.model: model for model in models}
        self._directory = directory
        self.recent = RecentRequestStore()

    def __iter__(self) -> Iterator[ModelOperations]:
        return iter(self._models.values())

    def of(self, model: str = "") -> ModelOperations:
        """Return the operations on one base model: on the first if the name is empty."""
        if model and model not in self._models:
            message = f"there is no base model {model[:80]!r}; there are {', '.join(self._models)}"
            raise invalid_request(message, "model")
        return self._models[model or next(iter(self._models))]

    async def engine(self, model: str = "") -> EngineStatus:
        """Return the state of the engine of one base model: of the first whose engine answers if the name is empty."""
        return (await self._ask(model, lambda operations: operations.engine()))[0]

    def engines(self, model: str = "") -> list[EngineOverview]:
        """Return the engines, model by model, as this gateway sees them, also those that it cannot reach."""
        models = [self.of(model)] if model else self._models.values()
        return [overview for operations in models for overview in operations.engines()]

    async def change_engine(self, name: str, action: str, model: str = "", seconds: float = 0.0) -> EngineOverview:
        """Drain an engine, end its draining, or restart it, as `ModelOperations.change_engine` does. Raises ApiError
        (INVALID_REQUEST) if the model's name is empty and there are several models."""
        return await self._only(model).change_engine(name, action, seconds)

    async def add_engine(self, name: str, address: str, model: str = "", role: str = "") -> EngineOverview:
        """Add an engine for all gateways, and return its state. Raises ApiError as `EngineDirectory.add` does, and
        INVALID_REQUEST if the model's name is empty and there are several models."""
        operations = self._only(model)
        await self._directory.add(operations.model, name, address, role=role)
        self.forget()
        return operations.engine_named(name)

    async def remove_engine(self, name: str, model: str = "") -> None:
        """Remove an engine that was added. Raises ApiError as `EngineDirectory.remove` does, and INVALID_REQUEST if it
        is the only engine that serves, or the model's name is empty and there are several models."""
        operations = self._only(model)
        self._directory.member(operations.model, name)
        serving = [overview.name for overview in operations.engines() if overview.state == EngineState.SERVING.value]
        if serving == [name]:
            raise invalid_request(
                f"{name!r} is the only engine that serves {operations.model!r}; add another first", "engine"
            )
        await self._directory.remove(operations.model, name)
        self.forget()

    async def lanes(self, model: str = "") -> list[LaneStatus]:
        """Return the status of the lanes, model by model."""
        answers = await self._ask(model, lambda operations: operations.lanes())
        return [status for statuses in answers for status in statuses]

    async def set_mode(self, lane: str, action: str, model: str = "") -> LaneStatus:
        """Set the mode of a lane of one base model, as `ModelOperations.set_mode` does. Raises ApiError
        (INVALID_REQUEST) if the name is empty and there are several models."""
        return await self._only(model).set_mode(lane, action)

    async def requests(self, model: str = "") -> LiveRequests:
        """Return the running requests, then the waiting ones, and the number of all live answers, as
        `ModelOperations.requests` does for each model."""
        answers = await self._ask(model, lambda operations: operations.requests())
        requests = sorted((request for live in answers for request in live.requests), key=running_first)
        return LiveRequests(requests, sum(live.total for live in answers))

    async def cancel(self, request_id: str) -> LiveRequest:
        """Cancel a request of any gateway process and model, given `LiveRequest.id` or its first 6 or more characters;
        return its last state.

        The request's caller gets 503 `preempted`, marked as not retryable, and is charged for the generated tokens.

        Raises:
            ApiError: REQUEST_NOT_FOUND, no live request has this id; INVALID_REQUEST, several ids begin like this;
                ENGINE_UNAVAILABLE, the engine of a base model does not answer and no other has the request.
        """

        async def look(operations: ModelOperations) -> tuple[ModelOperations, Sequence[pb.LiveRequest]]:
            return operations, await operations.answers()

        models = await self._ask("", look)
        wanted = _meant(request_id, {answer.origin.id for _, answers in models for answer in answers})
        if not wanted and (away := self._models.keys() - {operations.model for operations, _ in models}):
            message = (
                f"no engine that answers has the request {request_id!r}; that of {', '.join(sorted(away))} is away"
            )
            raise unavailable(Fault.ENGINE_UNAVAILABLE, message)
        for operations, answers in models:
            of_request = [answer for answer in answers if answer.origin.id == wanted]
            if of_request and (ended := await operations.cancel(of_request)):
                return ended
        raise request_not_found(request_id)

    async def reserved(self) -> Mapping[str, int]:
        """Return, by tenant, the tokens that live requests have reserved of the tenant's limits and may still use."""
        totals: dict[str, int] = {}
        for reserved in await self._ask("", lambda operations: operations.reserved()):
            for tenant, tokens in reserved.items():
                totals[tenant] = totals.get(tenant, 0) + tokens
        return totals

    async def tenants(self) -> Mapping[str, tuple[int, int]]:
        """Return (running, waiting) by tenant: the numbers of live answers in the engines, over both lanes."""
        totals: dict[str, tuple[int, int]] = {}
        for tenants in await self._ask("", lambda operations: operations.tenants()):
            for tenant, (running, waiting) in tenants.items():
                before = totals.get(tenant, (0, 0))
                totals[tenant] = before[0] + running, before[1] + waiting
        return totals

    def forget(self) -> None:
        """Drop cached answers of the engines, so that the next query shows the current state."""
        for model in self._models.values():
            model.forget()

    def _only(self, model: str) -> ModelOperations:
        """Return the operations on the named base model, or on the only one if the name is empty. Raises ApiError
        (INVALID_REQUEST) if it is empty and there are several."""
        if not model and len(self._models) > 1:
            raise invalid_request(f"model must be one of {', '.join(self._models)}", "model")
        return self.of(model)

    async def _ask(self, model: str, question: Callable[[ModelOperations], Awaitable[T]]) -> list[T]:
        """Call `question` for the base model of this name or, if the name is empty, concurrently for all. Return the
        results, without those of base models whose engine does not answer. Raises ApiError (ENGINE_UNAVAILABLE) if no
        engine answers."""
        models = [self.of(model)] if model else list(self._models.values())
        answers = await asyncio.gather(*map(question, models), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            is_away = isinstance(error, ApiError) and error.fault is Fault.ENGINE_UNAVAILABLE
            if not is_away or len(errors) == len(models):
                raise error
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def request_not_found(request_id: str) -> ApiError:
    return ApiError(Fault.REQUEST_NOT_FOUND, f"no live request has the id {request_id[:80]!r}", "id")


def _meant(request_id: str, ids: set[str]) -> str:
    """Return the one of `ids` that equals `request_id` or, if `request_id` has at least SHORTEST_ID characters, begins
    with it; empty if there is none. Raises ApiError (INVALID_REQUEST) if there are several."""
    if request_id in ids:
        return request_id
    matches = [known for known in ids if known.startswith(request_id)] if len(request_id) >= SHORTEST_ID else []
    if len(matches) > 1:
        raise invalid_request(f"several live requests have ids that begin with {request_id!r}", "id")
    return matches[0] if matches else ""
