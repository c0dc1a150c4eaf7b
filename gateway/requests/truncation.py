"""Cuts prompts to a number of tokens, as the field `truncate_prompt_tokens` of vLLM's API asks for."""

from __future__ import annotations

from typing import NamedTuple

from gateway.api_schema.chats import Side

ALL_THAT_FIT = -1


class Truncation(NamedTuple):
    """How many tokens of each prompt are kept, and on which side the others are cut off."""

    most: int
    """ALL_THAT_FIT means as many as the context holds beside the answer."""
    side: Side

    def cut(self, ids: tuple[int, ...], room: int) -> tuple[int, ...]:
        """Return what is kept of a prompt's token ids. `room` is the number of tokens, 1 or more, that the context
        holds beside the answer; it counts for ALL_THAT_FIT alone."""
        most = room if self.most == ALL_THAT_FIT else self.most
        return ids[:most] if self.side == "right" else ids[-most:]


def truncation(most: int | None, side: Side | None, default: Side) -> Truncation | None:
    """Return what `truncate_prompt_tokens` (`most`) and `truncation_side` ask for; None if prompts stay whole."""
    return None if most is None else Truncation(most, side or default)
