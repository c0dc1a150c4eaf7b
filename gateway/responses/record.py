"""Stored responses: their ids, the items of their input, and what is written to Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from gateway.core.errors import response_not_found
from gateway.openai.render import encode_json
from gateway.responses.schema import InputItem, InputPart

Json = dict[str, Any]

State = Literal["queued", "in_progress", "ended", "failed", "cancelled"]
"""State of a stored response. `ended` means that it has an answer, complete or cut off by max_output_tokens."""
RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}")
ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


class ResponseEntry(Struct, frozen=True):
    """A response as it is written to Redis: JSON texts, and its place in a conversation."""

    id: str
    head: bytes
    """The response object as it was when it was first stored, without `output`, as JSON."""
    input: bytes
    """Items of the request's own input, as a JSON array."""
    output: bytes = b"[]"
    """Items of the answer, as a JSON array."""
    ending: bytes = b"{}"
    """Fields that replace those of `head` once a background response has ended, as a JSON object."""
    previous: str = ""
    """Id of the response that this one continues; empty means that it begins a conversation."""
    parts: int = 0
    """Number of all items of input and output, plus the number of the parts of their content."""

    def fields(self) -> list[str | bytes | int]:
        """Return the entry's fields as Redis wants them: names and values in turn, without the id."""
        names = (name for name in self.__struct_fields__ if name != "id")
        return [word for name in names for word in (name, getattr(self, name))]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + len(self.input) + len(self.output) + len(self.ending)


def checked_id(response_id: str) -> str:
    """Return `response_id` unchanged. Raises ApiError (RESPONSE_NOT_FOUND) if it is malformed, so that no response can
    have it."""
    if not RESPONSE_ID.fullmatch(response_id):
        raise response_not_found(response_id)
    return response_id


def new_entry(response: Mapping[str, Any], request_input: str | Sequence[InputItem], previous: str) -> ResponseEntry:
    """Return the entry of a response object, complete or queued. `request_input` is the input of its request."""
    head = {name: value for name, value in response.items() if name != "output"}
    items, output = input_items(response["id"], request_input), response["output"]
    parts = count_parts(items) + count_parts(output)
    return ResponseEntry(
        response["id"], encode_json(head), encode_json(items), encode_json(output), previous=previous, parts=parts
    )


def response_object(state: str, head: bytes, ending: bytes, output: bytes) -> Json:
    """Build the response object, for JSON, from the fields of a stored response. The object's status is `state`, unless
    that is `ended`."""
    response: Json = {**msgspec.json.decode(head), **msgspec.json.decode(ending), "output": Raw(output)}
    return response if state == "ended" else response | {"status": state}


def input_items(response_id: str, request_input: str | Sequence[InputItem]) -> list[Json]:
    """Return the input of a request as items that have ids. A message's content becomes a list of parts."""
    items = [InputItem(role="user", content=request_input)] if isinstance(request_input, str) else request_input
    return [_item(response_id, index, item) for index, item in enumerate(items)]


def item_number(response_id: str, item_id: str) -> int | None:
    """Return the number of an item of the input, from 0, by its id. None means that the response has no such item."""
    match = re.fullmatch(rf"[a-z]+_{response_id}_in([0-9]{{1,6}})", item_id)
    return int(match[1]) if match else None


def count_parts(items: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of items plus the number of the parts of their content."""
    contents = [item.get("content") for item in items]
    return len(items) + sum(len(content) for content in contents if isinstance(content, list))


def _item(response_id: str, index: int, item: InputItem) -> Json:
    kind = item.type or "message"
    given = {**dict(_given(item)), "type": kind, "status": "completed"}
    given.pop("id", None)  # the caller's: an id has one item only
    if kind == "message" and isinstance(item.content, str):
        text = "output_text" if item.role == "assistant" else "input_text"
        given["content"] = [{"type": text, "text": item.content}]
    return {"id": f"{ID_PREFIXES.get(kind, 'item')}_{response_id}_in{index}", **given}


def _given(item: InputItem | InputPart) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an item or a part that are not None, for JSON."""
    for name in item.__struct_fields__:
        value = getattr(item, name)
        if isinstance(value, list):
            value = [
                {key: text for key, text in msgspec.structs.asdict(part).items() if text is not None} for part in value
            ]
        if value is not None:
            yield name, value
