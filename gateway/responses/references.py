"""Items of stored responses to which an input refers by their ids alone, as the AI SDK does by default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from gateway.core.errors import ApiError, invalid_request
from gateway.responses.record import item_number
from gateway.responses.schema import InputItem
from gateway.responses.store import MOST_HISTORY_BYTES, MOST_HISTORY_PARTS, ItemList

OUTPUT_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})_([0-9]{1,6})")
INPUT_ID = re.compile(r"[a-z]{2,4}_(resp_[0-9a-f]{32})_in[0-9]{1,6}")


class Place(NamedTuple):
    """Where an item is stored."""

    list: ItemList
    number: int


def place_of(item_id: str) -> Place | None:
    """Return where the item with an id is stored. None means that no item can have the id."""
    if match := OUTPUT_ID.fullmatch(item_id):
        return Place(ItemList(f"resp_{match[1]}", "output"), int(match[2]))
    if match := INPUT_ID.fullmatch(item_id):
        return Place(ItemList(match[1], "input"), item_number(match[1], item_id) or 0)
    return None


def references(request_input: str | Sequence[InputItem]) -> dict[int, Place]:
    """Return where the items are stored to which an input refers, by the index of the reference. Raises ApiError:
    INVALID_REQUEST, no item can have the id of a reference."""
    items = () if isinstance(request_input, str) else request_input
    return {index: _place(item, index) for index, item in enumerate(items) if item.is_reference}


def resolved(
    request_input: Sequence[InputItem], places: Mapping[int, Place], lists: Mapping[ItemList, Sequence[Raw]]
) -> tuple[list[InputItem], int]:
    """Return the input with each reference replaced by its item from `lists`, and the bytes of these items as they are
    stored. Raises ApiError: INVALID_REQUEST, an item is not there, or they are longer together than a conversation may
    be."""
    items, num_parts, num_bytes = list(request_input), 0, 0
    for index, place in places.items():
        text = _stored(request_input[index], index, place, lists)
        items[index] = item = msgspec.json.decode(text, type=InputItem)
        num_parts += 1 + (len(item.content) if isinstance(item.content, list) else 0)
        num_bytes += len(bytes(text))
        if num_parts > MOST_HISTORY_PARTS or num_bytes > MOST_HISTORY_BYTES:
            most = f"{MOST_HISTORY_PARTS} items and parts and {MOST_HISTORY_BYTES} bytes"
            raise invalid_request(f"the items that input refers to exceed {most}; refer to fewer", "input")
    return items, num_bytes


def _place(item: InputItem, index: int) -> Place:
    place = place_of(item.id or "")
    if place is None:
        raise _absent(item, index)
    return place


def _stored(item: InputItem, index: int, place: Place, lists: Mapping[ItemList, Sequence[Raw]]) -> Raw:
    items = lists.get(place.list, ())
    if place.number >= len(items):
        raise _absent(item, index)
    return items[place.number]


def _absent(item: InputItem, index: int) -> ApiError:
    message = (
        f"there is no stored item {(item.id or '')[:80]!r}: its response was created without store: true, was deleted, "
        "or has expired; send the item itself"
    )
    return invalid_request(message, f"input[{index}].id")
