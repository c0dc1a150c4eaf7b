"""Bounds of JSON texts: what is counted, whatever the text looks like."""

import json
import random

import msgspec
import pytest

from gateway.core import json_bounds
from gateway.core.errors import ApiError
from gateway.core.json_bounds import (
    INTEGERS_PER_VALUE,
    MAX_DEPTH,
    MOST_DIGITS,
    MOST_VALUES,
    PIECE_BYTES,
    JsonCount,
    check_json,
    has_more_values,
)


def text_of(random_: random.Random) -> str:
    return "".join(random_.choice('a"\\[]{},é\n1') for _ in range(random_.randrange(8)))


def document(random_: random.Random, levels: int) -> object:
    kind = random_.random() if levels else 1.0
    if kind < 0.3:
        return [document(random_, levels - 1) for _ in range(random_.randrange(5))]
    if kind < 0.6:
        return {text_of(random_): document(random_, levels - 1) for _ in range(random_.randrange(5))}
    return random_.choice([None, True, 1.5, -3, 12, text_of(random_)])


def values(found: object) -> int:
    inner = list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else None
    return 0 if inner is None else 1 + max(0, len(inner) - 1) + sum(map(values, inner))


def test_brackets_and_commas_in_strings_do_not_count(monkeypatch):
    """Pieces of seven bytes end in strings, in escape sequences and in numbers."""
    monkeypatch.setattr(json_bounds, "PIECE_BYTES", 7)
    monkeypatch.setattr(json_bounds, "FEW_VALUES", -1)
    random_ = random.Random(5)
    for _ in range(500):
        made = document(random_, 5)
        count = JsonCount()
        count.add(json.dumps(made, ensure_ascii=random_.random() < 0.5, indent=random_.choice([None, 1])).encode())
        assert count._values + count._integers == values(made), made


def refusal(text: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        check_json(text, "tools")
    assert (caught.value.http_status, caught.value.param) == (400, "tools")
    return caught.value.message


@pytest.mark.parametrize("unit", [b"[]", b"{}", b'""', b"null", b"1.5", b'{"a":1,"b":2}'])
def test_values_are_bounded(unit):
    per_member = 1 + unit.count(b"{") + unit.count(b"[") + unit.count(b",")
    most = MOST_VALUES // per_member
    check_json(b"[%b]" % b",".join([unit] * (most - 1)))
    assert f"more than {MOST_VALUES} lists" in refusal(b'{"a": [%b]}' % b" ,\n".join([unit] * (most + 2)))


def test_integers_of_a_list_count_less():
    most = MOST_VALUES * INTEGERS_PER_VALUE
    check_json(b"[%b]" % b",".join([b"128000"] * (most - 2000)))
    refusal(b"[%b]" % b", ".join([b"-1"] * (most + 2000)))
    refusal(b"[%b]" % b",".join([b"9" * 21] * (most // 3 + 2000)))
    check_json(b"[%b]" % b",".join([b"[%b]" % b",".join([b"1"] * 2000)] * 128))


def test_levels_and_digits_are_bounded():
    pad = b'"' + b"[" * 2 * PIECE_BYTES + b'",'
    for before in (b"", pad):
        check_json(b"[" + before + b"[" * (MAX_DEPTH - 1) + b"]" * MAX_DEPTH)
        assert "100 levels" in refusal(b"[" + before + b"[" * MAX_DEPTH + b"]" * (MAX_DEPTH + 1))
    check_json(b"[" + pad + b"9" * MOST_DIGITS + b"]")
    assert "100 digits" in refusal(b"[" + pad + b"9" * (2 * MOST_DIGITS + 1) + b"]")


def test_texts_may_be_bounded_together():
    count = JsonCount()
    text = b"[%b]" % b",".join([b"[]"] * (MOST_VALUES // 4))
    count.add(text)
    with pytest.raises(ApiError):
        count.add(text + b'{"unbalanced": "')
    count = JsonCount()
    for _ in range(MOST_VALUES // 4):
        count.add(b'{"a":1}')  # few are counted without a closer look


def test_a_text_that_is_no_json_is_not_followed_further_than_a_parser_would():
    for text in (b'"' * 300_000, b"\\" * 300_000, b"]" * 300_000, b'"\\' * 150_000):
        check_json(text)
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(text)


def test_values_of_a_decoded_document():
    made = ({"a": [1, 2, {"b": ()}]}, [])
    assert has_more_values(made, 6) and not has_more_values(made, 7)
    assert has_more_values([[0] * 10**6] * 10**3, 2000)
    texts = [{"content": "a" * 5000}, {"content": "b" * 999}]
    assert has_more_values(texts, 8) and not has_more_values(texts, 9)
