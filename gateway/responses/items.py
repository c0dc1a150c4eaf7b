"""Builds the output items of a response from the parts of its answer, with the events that report them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from gateway.text.tools.calls import ToolCallPart

Json = dict[str, Any]

Event = tuple[str, Json]
"""Type of an event, such as `response.output_text.delta`, and its fields apart from type and sequence number."""


class OutputItems:
    """Output items of one response: messages and tool calls, in the order in which the model writes them. At most the
    last item is open, and it ends when another begins."""

    def __init__(self, response_id: str) -> None:
        """`response_id` is unique, and the ids of the items are made from it."""
        self.items: list[Json] = []
        """The items so far. That which is open lacks its text or arguments."""
        self._id = response_id
        self._open: str | None = None
        """Type of the open item. None means that no item is open."""
        self._call = -1
        """Number of the last tool call in the answer."""
        self._pieces: list[str] = []
        """Text or arguments of the open item."""
        self._logprobs: list[Json] = []
        """Log probabilities of the open message's tokens."""
        self._pending: list[Json] = []
        """Log probabilities of tokens whose text has not come; they belong to no item if a tool call begins."""

    def add_logprobs(self, entries: list[Json]) -> None:
        """Add log probabilities of tokens whose text comes next."""
        self._pending += entries

    def add_text(self, text: str) -> Iterator[Event]:
        if self._open != "message":
            yield from self.end()
            yield from self._begin_message()
        entries, self._pending = self._pending, []
        self._logprobs += entries
        self._pieces.append(text)
        yield "response.output_text.delta", {**self._place, "content_index": 0, "delta": text, "logprobs": entries}

    def add_call(self, part: ToolCallPart) -> Iterator[Event]:
        self._pending = []
        if part.index != self._call:
            yield from self.end()
            yield from self._begin_call(part)
        if part.arguments:
            self._pieces.append(part.arguments)
            yield "response.function_call_arguments.delta", {**self._place, "delta": part.arguments}

    def end(self, *, complete: bool = True) -> Iterator[Event]:
        """End the open item, if there is one. `complete` says whether the model wrote the whole item."""
        if self._open is not None:
            item, text = self.items[-1], "".join(self._pieces)
            item["status"] = "completed" if complete else "incomplete"
            yield from self._end_message(item, text) if self._open == "message" else self._end_call(item, text)
            yield "response.output_item.done", {"output_index": self._place["output_index"], "item": item}
        self._open, self._pieces, self._logprobs = None, [], []

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """End the last item at the end of the answer. An empty answer gets a message without text."""
        if not self.items:
            yield from self._begin_message()
        if self._open == "message":
            self._logprobs += self._pending
        yield from self.end(complete=complete)

    @property
    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: Json) -> Iterator[Event]:
        self._open = item["type"]
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _begin_message(self) -> Iterator[Event]:
        item_id = f"msg_{self._id}_{len(self.items)}"
        message = {"type": "message", "role": "assistant", "content": []}
        yield from self._begin({"id": item_id, "status": "in_progress", **message})
        yield "response.content_part.added", {**self._place, "content_index": 0, "part": _part("", [])}

    def _begin_call(self, part: ToolCallPart) -> Iterator[Event]:
        self._call = part.index
        item_id, call_id = f"fc_{self._id}_{len(self.items)}", f"call_{uuid.uuid4().hex[:24]}"
        call = {"type": "function_call", "call_id": call_id, "name": part.name, "arguments": ""}
        yield from self._begin({"id": item_id, "status": "in_progress", **call})

    def _end_message(self, item: Json, text: str) -> Iterator[Event]:
        place, part = {**self._place, "content_index": 0}, _part(text, self._logprobs)
        item["content"] = [part]
        yield "response.output_text.done", {**place, "text": text, "logprobs": self._logprobs}
        yield "response.content_part.done", {**place, "part": part}

    def _end_call(self, item: Json, arguments: str) -> Iterator[Event]:
        item["arguments"] = arguments
        done = {**self._place, "name": item["name"], "arguments": arguments}
        yield "response.function_call_arguments.done", done


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
