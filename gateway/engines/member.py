"""Registry records of engines that join while gateways run. Every gateway that shares the Redis connects to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import msgspec
from redis.asyncio import Redis

from engine.rpc.target import UNIX, check_address
from gateway.core.errors import ApiError, Fault, invalid_request
from gateway.core.names import ENGINE_NAME
from gateway.registry.record import RecordKind
from gateway.registry.store import RedisRecordStore

AddedBy = Literal["operator", "ray"]
EngineRole = Literal["prefill", "decode", "both"]
ROLES: tuple[EngineRole, ...] = get_args(EngineRole)


@dataclass(frozen=True, slots=True)
class EngineMember:
    """Registry record of one engine. `generation` is the number of the registry's change that wrote it."""

    model: str
    """Name of the base model that the engine serves."""
    engine: str
    """Name of the engine, which no other engine of the model has."""
    address: str
    """`host:port` where the engine listens, the same for all gateways."""
    added_by: AddedBy
    created: float
    """Time of creation in Unix seconds."""
    generation: int = 0
    role: EngineRole = "both"
    """The part of split requests that the engine computes (see `gateway.routing.news.Role`)."""

    @property
    def name(self) -> str:
        return member_name(self.model, self.engine)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Return the address, so that the registry refuses a second engine there."""
        return (self.address,)

    @property
    def source(self) -> str:
        """Always empty: these records never come from the configuration, whose engines need no record."""
        return ""


def member_name(model: str, engine: str) -> str:
    """Return the name of an engine's record. It is unambiguous, because an engine's name has no slash."""
    return f"{model}/{engine}"


def check_role(role: str) -> EngineRole:
    """Return a role; empty means `both`. Raises ApiError (INVALID_REQUEST) if there is no such role."""
    for known in ROLES:
        if known == (role or "both"):
            return known
    raise invalid_request(f"role must be prefill, decode or both, not {role!r}", "role")


def check_member(engine: str, address: str) -> None:
    """Raise ApiError (INVALID_REQUEST) if the name or the address of an engine is malformed, or is a Unix socket, which
    the gateways of other machines cannot reach."""
    if not ENGINE_NAME.fits(engine):
        raise invalid_request(f"name must be {ENGINE_NAME.words}", "name")
    try:
        check_address(address)
    except ValueError as error:
        raise invalid_request(str(error), "address") from error
    if address.startswith(UNIX):
        raise invalid_request(f"address must be like host:7001, not {address!r}", "address")


def decode_member(text: bytes, generation: int) -> EngineMember:
    """Decode a record from JSON and set its generation. Fields that a newer gateway added are ignored."""
    return replace(msgspec.json.decode(text, type=EngineMember), generation=generation)


def engine_conflict(message: str) -> ApiError:
    return ApiError(Fault.ENGINE_CONFLICT, message, "name")


MEMBERS = RecordKind("engine", msgspec.json.encode, decode_member, engine_conflict)


def member_store(client: Redis, prefix: str = "loralane:") -> RedisRecordStore[EngineMember]:
    """Return the Redis store of the engines of all base models, under keys that begin with `prefix` and
    `engines:{all}:` (with braces)."""
    return RedisRecordStore(client, f"{prefix}engines:{{all}}:", MEMBERS)
