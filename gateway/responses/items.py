"""Builds the output items of a response from the parts of its answer, with the events that report them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from msgspec import Raw

from gateway.text.tools.calls import ToolCallPart

Json = dict[str, Any]

MESSAGE: Json = {"type": "message", "role": "assistant"}

Event = tuple[str, Json]
"""Type of an event, such as `response.output_text.delta`, and its fields apart from type and sequence number."""


class OutputItems:
    """Output items of one response: reasoning, messages and tool calls, in the order in which the model writes them. At
    most the last item is open, and it ends when another begins."""

    def __init__(self, response_id: str) -> None:
        """`response_id` is unique, and the ids of the items are made from it."""
        self.items: list[Json] = []
        """The items so far. The open item lacks its text or arguments."""
        self._id = response_id
        self._open: str | None = None
        """Type of the open item. None means that no item is open."""
        self._call = -1
        """Number of the tool call in the answer that was begun last; -1 means that none was."""
        self._pieces: list[str] = []
        """Text or arguments of the open item."""
        self._logprobs: list[Raw] = []
        """Log probabilities of the open message's tokens."""
        self._pending: list[Raw] = []
        """Log probabilities of tokens whose text has not come; they belong to no item if a tool call or reasoning
        begins."""

    @property
    def is_reasoning(self) -> bool:
        """Return whether the open item is reasoning, whose tokens have no log probabilities."""
        return self._open == "reasoning"

    def add_logprobs(self, entries: list[Raw]) -> None:
        """Add log probabilities of tokens whose text comes next."""
        self._pending += entries

    def add_reasoning(self, text: str) -> Iterator[Event]:
        self._pending = []
        if self._open != "reasoning":
            yield from self.end()
            yield from self._begin_parts("rs", {"type": "reasoning", "summary": []}, _reasoning_part(""))
        self._pieces.append(text)
        yield "response.reasoning_text.delta", {**self._place, "content_index": 0, "delta": text}

    def add_text(self, text: str) -> Iterator[Event]:
        if self._open != "message":
            yield from self.end()
            yield from self._begin_parts("msg", MESSAGE, _text_part("", []))
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
            yield from self._ended(item, text)
            yield "response.output_item.done", {"output_index": self._place["output_index"], "item": item}
        self._open, self._pieces, self._logprobs = None, [], []

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """End the last item at the end of the answer. An empty answer gets a message without text."""
        if not self.items:
            yield from self._begin_parts("msg", MESSAGE, _text_part("", []))
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

    def _begin_parts(self, prefix: str, item: Json, part: Json) -> Iterator[Event]:
        """Begin an item with one empty content part, and yield the events that report both. `prefix` begins the item's
        id."""
        item_id = f"{prefix}_{self._id}_{len(self.items)}"
        yield from self._begin({"id": item_id, "status": "in_progress", **item, "content": []})
        yield "response.content_part.added", {**self._place, "content_index": 0, "part": part}

    def _begin_call(self, part: ToolCallPart) -> Iterator[Event]:
        self._call = part.index
        item_id, call_id = f"fc_{self._id}_{len(self.items)}", f"call_{uuid.uuid4().hex[:24]}"
        call = {"type": "function_call", "call_id": call_id, "name": part.name, "arguments": ""}
        yield from self._begin({"id": item_id, "status": "in_progress", **call})

    def _ended(self, item: Json, text: str) -> Iterator[Event]:
        """Complete the open item with its text, and yield the events that report it."""
        if self._open == "function_call":
            item["arguments"] = text
            yield "response.function_call_arguments.done", {**self._place, "name": item["name"], "arguments": text}
            return
        place = {**self._place, "content_index": 0}
        if self._open == "reasoning":
            part = _reasoning_part(text)
            yield "response.reasoning_text.done", {**place, "text": text}
        else:
            part = _text_part(text, self._logprobs)
            yield "response.output_text.done", {**place, "text": text, "logprobs": self._logprobs}
        item["content"] = [part]
        yield "response.content_part.done", {**place, "part": part}


def _reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str, logprobs: list[Raw]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
