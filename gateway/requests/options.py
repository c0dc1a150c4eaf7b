"""What a caller may ask for beside the model, the prompts and the sampling, in groups that are read together."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

from engine.core.messages.requests import Lane


class OutputOptions(Struct, frozen=True):
    """How long each answer may be, where it ends, and in what pieces it comes."""

    max_tokens: int | None = None
    """Maximum output tokens of an answer, cut to the room left in the context. 0 generates nothing, so that the engine
    is asked only for log probabilities of the prompt or a vector. None means `default_max_tokens`."""
    default_max_tokens: int | None = None
    """Maximum output tokens if `max_tokens` is None. None means the rest of the context."""
    reserve_tokens: int = 0
    """Minimum output tokens to reserve for each answer, for callers that name a larger limit besides max_tokens."""
    thinking_budget: int | None = None
    """Maximum tokens of each answer's reasoning, at least 1. None means no such limit."""
    needs_thinking: bool = False
    """True means that a model whose reasoning the gateway cannot read must not answer."""
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    """True means that the answer's text includes the stop string or the stop token that ended the answer."""
    coalesce: bool = False
    """True means that the caller does not need single tokens: a chunk may hold all tokens that have come."""

    @property
    def asked_tokens(self) -> int | None:
        """Maximum output tokens of an answer, from the caller or the protocol. None means the rest of the context."""
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens

    @property
    def is_limited(self) -> bool:
        """True if the caller, and not just a default, limits the output tokens."""
        return self.max_tokens is not None or self.reserve_tokens > 0


class Urgency(Struct, frozen=True):
    """How soon the request is to be served, among those of its tenant and of others."""

    lane: Lane | None = None
    """Lane that the caller asks for. None means the tenant's default."""
    request_class: str = ""
    """Name of one of the tenant's classes. Empty means none."""
    priority: int | None = None
    """Priority within the lane; a lower value is served sooner. None means that of the request's class."""
    ttft: float | None = None
    """TTFT that the request asks for, in seconds. None means the goal of its class or, without one, the lane's."""
    itl: float | None = None
    """ITL that the request asks for, in seconds. None means the goal of its class or, without one, the lane's."""


ALL_THAT_FIT = -1


class Truncation(NamedTuple):
    """How many tokens of each prompt are kept, and on which side the others are cut off, as the field
    `truncate_prompt_tokens` of vLLM's API asks for."""

    most: int
    """ALL_THAT_FIT means as many as the context holds beside the answer."""
    side: Literal["left", "right"]

    def cut(self, ids: tuple[int, ...], room: int) -> tuple[int, ...]:
        """Return what is kept of a prompt's token ids. `room` is the number of tokens, 1 or more, that the context
        holds beside the answer; it counts for ALL_THAT_FIT alone."""
        most = room if self.most == ALL_THAT_FIT else self.most
        return ids[:most] if self.side == "right" else ids[-most:]


class EncodingOptions(Struct, frozen=True):
    """How prompts become token ids, and who shares what is cached of them."""

    add_special_tokens: bool | None = None
    """True means that prompts get the special tokens that the model expects, such as BOS. None means that texts do,
    and chats do not: their templates write them."""
    truncation: Truncation | None = None
    """How prompts are cut. None means that they stay whole."""
    cache_salt: str = ""
    """Only requests of the tenant with the same salt share cached prefixes. Empty means no salt."""


ORDINARY_ENCODING = EncodingOptions()
"""The options of a caller that asks for nothing special."""


class FieldNames(Struct, frozen=True):
    """Names of fields in the caller's request, for error messages."""

    prompts: tuple[str, ...] = ()
    """Fields that the prompts came from; empty means messages or prompt."""
    grammar: str = ""
    """Field that the grammar in the sampling parameters came from; empty if there is none."""
    local: str = ""
    """Field that only models of this installation can follow, such as one that asks for token ids. Empty means none."""
