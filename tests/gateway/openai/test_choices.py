"""Long texts where a field has a few words to choose from are refused before msgspec quotes them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from msgspec import Struct

from gateway.anthropic.schema import MessagesRequest
from gateway.api_schema.chats import ChatRequest
from gateway.api_schema.vectors import EmbeddingsRequest
from gateway.core.errors import ApiError
from gateway.openai import choices
from gateway.openai.choices import EACH, LONGEST, choice_paths, refuse_long_choices
from gateway.openai.parse import to_struct
from gateway.responses.schema import ResponsesRequest

LONG = "x" * (LONGEST + 1)


class Leaf(Struct, tag="leaf"):
    colour: Literal["red", "green"] = "red"
    branch: Tree | Leaf | None = None


class Tree(Struct, tag="tree"):
    branches: list[Leaf | Tree]
    names: dict[str, Literal["yes", "no"]] = {}


def test_the_paths_of_a_type_that_contains_itself_end():
    paths = choice_paths(Tree)
    assert {("type",), ("branches", EACH, "type"), ("branches", EACH, "colour"), ("names", EACH)} <= set(paths)
    assert max(map(len, paths)) < 8


@pytest.mark.parametrize("kind", [ChatRequest, EmbeddingsRequest, MessagesRequest, ResponsesRequest])
def test_every_choice_of_a_request_is_bounded(kind: type[Struct]):
    paths = choice_paths(kind)
    assert ("speculation",) in paths
    for path in paths:
        with pytest.raises(ApiError) as refused:
            to_struct(_body(path), kind)
        place = refused.value.param or ""
        assert place.startswith(path[0]) and place.endswith(path[-1] if path[-1] != EACH else "]")
        assert "more than 1,024 characters" in refused.value.message and LONG not in refused.value.message


def test_numbers_and_texts_beside_choices_are_not_walked(monkeypatch):
    """390,000 numbers took 0.2 s of the thread in which all tenants' bodies are parsed."""
    looked, look = [], choices._long_choice
    monkeypatch.setattr(choices, "_long_choice", lambda value, branch: looked.append(value) or look(value, branch))
    message = {"role": "user", "content": [{"type": "text"}, [1] * 1000, *[1] * 1000, *["x"] * 1000]}
    refuse_long_choices({"messages": [message], "logit_bias": [[1]] * 1000}, MessagesRequest)
    assert {"type": "text"} in looked and len(looked) < 10


def test_other_long_texts_pass():
    refuse_long_choices(
        {"messages": [{"role": "user", "content": LONG}], "model": LONG, "format": {"a": LONG}}, ChatRequest
    )


def _body(path: tuple[str, ...]) -> Any:
    if not path:
        return LONG
    return [_body(path[1:])] if path[0] == EACH else {path[0]: _body(path[1:])}
