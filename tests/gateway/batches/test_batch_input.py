"""Complaints about a batch's input: line by line, with the numbers an editor shows."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

import pytest

from gateway.batches.input import (
    MAX_ERRORS,
    MAX_MESSAGE,
    PIECE_BYTES,
    CheckParameters,
    CheckResult,
    InputCheck,
    split_lines,
)
from gateway.batches.line_reader import RECORD
from gateway.core.errors import ApiError
from gateway.core.json_bounds import MAX_DEPTH
from gateway.core.routing import Catalog, ModelQuery, resolve
from gateway.core.tenants import Tenant

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MAX_LINE = 10_000


def asked(endpoint: str = CHAT, **more: Any) -> CheckParameters:
    known: dict[str, Any] = {
        "url": "",
        "endpoint": endpoint,
        "catalogs": (Catalog(("base",), {"pirate", "poet"}, {"captain": "pirate"}),),
        "tenant": Tenant("acme"),
        "max_lines": 50_000,
        "max_line_bytes": MAX_LINE,
    }
    return CheckParameters(**{**known, **more})


def line(custom_id: str, content: str = "hi", model: str = "base", **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **more}


def text_of(lines: Iterable[dict[str, Any] | bytes]) -> bytes:
    return b"\n".join(one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)


def check(text: bytes, **more: Any) -> tuple[CheckResult, bytes]:
    return InputCheck(asked(**more)).run(io.BytesIO(text))


def in_order(text: bytes, index: bytes) -> list[tuple[int, str]]:
    """Numbers and custom ids of the lines that the index leads to."""
    entries = RECORD.iter_unpack(index)
    return [(number, json.loads(text[start : start + length])["custom_id"]) for number, start, length in entries]


def only_error(text: bytes, **more: Any) -> tuple[str, str | None, int | None]:
    found, index = check(text, **more)
    assert (len(found.errors), index, found.total) == (1, b"", 0), found
    [error] = found.errors
    assert error.message
    return error.code, error.param, error.line


def test_lines_of_one_adapter_come_together_and_those_that_begin_alike():
    lines = [
        line("1", "Once upon a time there was", "poet"),
        line("2", "What is the sea?"),
        line("3", "Ahoy", "captain"),
        line("4", "Once upon a time there were", "pirate"),
        line("5", "Ahoy", "pirate"),
        line("6", "Once upon a time there was", "base:poet"),
    ]
    text = text_of(lines)
    found, index = check(text)
    assert (found.total, found.model, found.errors) == (6, None, [])
    assert [custom_id for _, custom_id in in_order(text, index)] == ["2", "3", "5", "4", "1", "6"]


def test_the_one_model_that_all_lines_name():
    assert check(text_of(line(str(number), model="captain") for number in range(3)))[0].model == "captain"


TAKEN = Catalog(("base",), {"tone", "pirate"}, {"captain": "pirate"}, {"tone": ["globex"], "pirate": ["globex"]})
"""Names of the first base model, which only another tenant may use."""


@pytest.mark.parametrize("name", ["tone", "captain", "small:tone"])
def test_the_adapter_of_a_later_model_is_out_of_reach_where_an_earlier_one_has_the_name(name):
    catalogs = (TAKEN, Catalog(("small",), {"tone", "captain"}))
    with pytest.raises(ApiError) as refusal:
        resolve(ModelQuery(name), catalogs, Tenant("acme"))
    [complaint] = check(text_of([line("1", model=name)]), catalogs=catalogs)[0].errors
    assert (complaint.code, complaint.message) == (refusal.value.code, refusal.value.message)


def test_adapters_that_the_tenants_settings_leave_out_are_refused():
    tenant = Tenant("acme", adapters=("po*",))
    assert only_error(text_of([line("1", model="pirate")]), tenant=tenant) == ("model_not_found", "body.model", 1)
    assert not check(text_of([line("1", model="poet")]), tenant=tenant)[0].errors


def test_a_bom_blank_lines_and_line_ends_of_others_do_no_harm():
    text = b"\xef\xbb\xbf" + text_of([line("a"), b"", line("b"), b"  \t"]).replace(b"\n", b"\r\n") + b"\r\n\r\n"
    found, index = check(text)
    assert found.total == 2
    assert sorted(in_order(text, index)) == [(1, "a"), (3, "b")]


@pytest.mark.parametrize("text", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"])
def test_an_empty_file(text):
    assert only_error(text) == ("empty_file", None, None)


@pytest.mark.slow
def test_a_bad_line_far_down_is_named_by_its_number():
    """In the second piece that is read of the file."""
    good = [line(str(number)) for number in range(1, 12_001)]
    good[11_998] = line("11999", url=COMPLETION)
    text = text_of(good)
    assert len(text) > 1.1 * PIECE_BYTES
    assert only_error(text) == ("invalid_url", "url", 11_999)


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b'{"custom_id": "2",', "invalid_json_line", None),
        (b'{"custom_id": "\xff\xfe", "method": "POST"}', "invalid_json_line", None),
        (text_of([line("2")]).replace(b'"hi"', b'"\xff"'), "invalid_json", "body"),
        (b"[]", "invalid_request", None),
        (line("1"), "duplicate_custom_id", "custom_id"),
        (line(""), "invalid_request", "custom_id"),
        (line("x" * 513), "invalid_request", "custom_id"),
        ({**line("2"), "custom_id": 2}, "invalid_request", "custom_id"),
        (
            {key: value for key, value in line("2").items() if key != "custom_id"},
            "missing_required_parameter",
            "custom_id",
        ),
        (line("2", method="GET"), "invalid_method", "method"),
        (line("2", url="/v1/embeddings"), "invalid_url", "url"),
        (line("2", body=None), "invalid_request", "body"),
        (line("2", body={"model": "base"}), "invalid_request", "body.messages"),
        (line("2", body={**line("2")["body"], "temperature": "warm"}), "invalid_request", "body.temperature"),
        (line("2", body={**line("2")["body"], "stream": True}), "unsupported_parameter", "body.stream"),
        (line("2", body={**line("2")["body"], "modalities": ["audio"]}), "unsupported_parameter", "body.modalities"),
        (line("2", model="unknown"), "model_not_found", "body.model"),
        (line("2", "x" * MAX_LINE), "line_too_long", None),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_with_a_line(bad, code, param):
    assert only_error(text_of([line("1"), b"", bad, line("3")])) == (code, param, 3)


def test_a_strict_tenants_line_with_an_unknown_field():
    text = text_of([line("1", body={**line("1")["body"], "chat_id": 1})])
    assert check(text)[0].total == 1
    assert only_error(text, tenant=Tenant("acme", unknown_fields="refuse")) == ("invalid_request", "body.chat_id", 1)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_a_line_that_is_nested_too_deep():
    for levels in (MAX_DEPTH, 50_000):
        bad = text_of([line("2")]).replace(b'"hi"', nested(levels))
        assert only_error(text_of([line("1"), bad]), max_line_bytes=200_000) == ("invalid_request", None, 2)


def test_completions_are_held_against_their_own_schema():
    def completion(custom_id: str, prompt: Any) -> dict[str, Any]:
        return {**line(custom_id), "url": COMPLETION, "body": {"model": "base", "prompt": prompt}}

    prompts = ["Once", [7, 8], [9, 10**30], [[1], [2]], ["a", "b"]]
    found, _ = check(text_of(completion(str(n), prompt) for n, prompt in enumerate(prompts)), endpoint=COMPLETION)
    assert (found.total, found.errors) == (5, [])
    bad = {**line("2"), "url": COMPLETION}
    assert only_error(text_of([bad]), endpoint=COMPLETION) == ("invalid_request", "body.prompt", 1)


def test_responses_are_held_against_their_own_schema():
    def response(custom_id: str, **body: Any) -> dict[str, Any]:
        return {**line(custom_id), "url": RESPONSES, "body": {"model": "base", **body}}

    items = [{"role": "user", "content": "hi"}]
    found, _ = check(text_of([response("1", input="hi"), response("2", input=items, store=True)]), endpoint=RESPONSES)
    assert (found.total, found.errors) == (2, [])
    for body, error in (
        ({}, ("invalid_request", "body.input", 1)),
        ({"input": "hi", "stream": True}, ("unsupported_parameter", "body.stream", 1)),
        ({"input": "hi", "background": True}, ("unsupported_parameter", "body.background", 1)),
        ({"input": "hi", "tools": [{"type": "function", "name": "a b"}]}, ("invalid_request", "body.tools[0].name", 1)),
    ):
        assert only_error(text_of([response("1", **body)]), endpoint=RESPONSES) == error


def test_embeddings_are_held_against_their_own_schema():
    def embeddings(custom_id: str, **body: Any) -> dict[str, Any]:
        return {**line(custom_id), "url": EMBEDDINGS, "body": {"model": "base", **body}}

    inputs = ["Once", ["a", "b"], [7, 8], [[1], [2]]]
    found, _ = check(text_of(embeddings(str(n), input=text) for n, text in enumerate(inputs)), endpoint=EMBEDDINGS)
    assert (found.total, found.errors) == (4, [])
    for body, error in (
        ({}, ("invalid_request", "body.input", 1)),
        ({"input": []}, ("invalid_request", "body.input", 1)),
        ({"input": "hi", "stream": True}, ("unsupported_parameter", "body.stream", 1)),
        ({"input": "hi", "dimensions": 0}, ("invalid_request", "body.dimensions", 1)),
    ):
        assert only_error(text_of([embeddings("1", **body)]), endpoint=EMBEDDINGS) == error


def test_one_line_too_many():
    text = text_of(line(str(number)) for number in range(12))
    assert only_error(text, max_lines=10) == ("too_many_lines", None, 11)
    assert check(text, max_lines=12)[0].total == 12


def test_only_so_many_errors_are_told():
    found, _ = check(text_of([b"?"] * 1000))
    assert [error.line for error in found.errors] == list(range(1, MAX_ERRORS + 1))


def test_errors_stay_short_however_much_of_a_line_they_quote():
    role = {"role": "x" * (MAX_LINE - 1000), "content": "hi"}
    tool = {"type": "y" * (MAX_LINE - 1000)}
    bodies = {"model": "base", "messages": [role]}, {**line("2")["body"], "tools": [tool]}
    found, _ = check(text_of(line(str(number), body=body) for number, body in enumerate(bodies)))
    assert [error.param for error in found.errors] == ["body.messages[0].role", "body.tools[0].type"]
    assert all(len(error.message) <= MAX_MESSAGE for error in found.errors)


class Trickle(io.BytesIO):
    """A file that gives few bytes at a time."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(3)


@pytest.mark.parametrize(
    "text", [b"one\n\nthree is long\nfour", b"a\nb\n", b"much too long a line\n", b"\xef\xbb\xbfx\ny"]
)
def test_where_pieces_end_makes_no_difference(text):
    expected, offset = [], 3 if text.startswith(b"\xef") else 0
    for part in text[offset:].split(b"\n"):
        expected.append((offset, len(part), part if len(part) <= 13 else None))
        offset += len(part) + 1
    expected = expected if expected[-1][1] else expected[:-1]
    assert list(split_lines(Trickle(text), 13)) == list(split_lines(io.BytesIO(text), 13)) == expected


def test_brackets_that_are_many_but_not_deep_are_no_matter():
    found, _ = check(text_of([line("1", "[{" * 2000)]))
    assert (found.total, found.errors) == (1, [])
