"""A hundred mixed requests, some of them hostile, leave a gateway as it was; tens of thousands are run by hand."""

import pytest

from tests.fuzz import mixed
from tests.fuzz.answers import Tokens, counted, http_body


@pytest.mark.nightly
async def test_mixed_requests_leave_nothing_and_are_charged_as_answered():
    seen = await mixed.run(seed=1, requests=60, rounds=2, hostile=0.2)
    assert seen.failures == []
    assert sum(seen.endings.values()) == 120
    assert all(used.prompt and used.completion for used in seen.used.values())


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ('{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}', Tokens(3, 4)),
        ('data: {"usage": null}\n\ndata: {"usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n', Tokens(3, 4)),
        (
            'data: {"message": {"usage": {"input_tokens": 3}}}\n\ndata: {"usage": {"output_tokens": 5}}\n\n',
            Tokens(3, 5),
        ),
        ('data: {"response": {"usage": {"input_tokens": 3, "output_tokens": 1}}}\n\n', Tokens(3, 1)),
        ('{"error": {}}', Tokens()),
    ],
)
def test_usage_is_read_from_answers_of_all_protocols(said, tokens):
    assert counted(said.encode()) == tokens


def test_the_body_of_a_chunked_answer_is_put_together():
    assert http_body(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n") == b"abc"
