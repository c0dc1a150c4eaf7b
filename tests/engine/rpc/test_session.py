"""Which events a session sends to the gateway at once, and which it holds until a consumer waits for them."""

from __future__ import annotations

import pytest

from engine.core.types import FinishReason, TokenEvent
from engine.pb import engine_pb2 as pb
from engine.rpc.session import GatewaySession


@pytest.fixture
def session() -> GatewaySession:
    return GatewaySession()


def told(message):
    return [(event.request_id, list(event.token_ids)) for event in message.events]


def test_one_that_is_behind_gets_one_event_for_each_request(session):
    for token in range(5):
        session.put([TokenEvent("a", (token,)), TokenEvent("b", (token + 10,))])
    session.end()
    [message] = session.messages()
    assert told(message) == [("a", [0, 1, 2, 3, 4]), ("b", [10, 11, 12, 13, 14])]


def test_one_that_keeps_up_gets_every_step(session):
    messages = session.messages()
    for token in range(3):
        session.put([TokenEvent("a", (token,))])
        assert told(next(messages)) == [("a", [token])]
    session.end()
    assert list(messages) == []


def test_of_an_answer_that_is_wanted_whole_only_first_and_last_are_told_at_once(session):
    session.expect("whole", whole=True)
    messages = session.messages()
    for event in (TokenEvent("whole", wait=0.5), TokenEvent("whole", (1,))):
        session.put([event])
        assert told(next(messages)) == [("whole", list(event.tokens))]
    for token in (2, 3):
        session.put([TokenEvent("whole", (token,))])
    session.put([TokenEvent("whole", (4,), (), FinishReason.LENGTH)])
    [event] = next(messages).events
    assert (list(event.token_ids), event.finish_reason) == ([2, 3, 4], pb.FINISH_REASON_LENGTH)
    session.put([TokenEvent("whole", (9,))])
    assert told(next(messages)) == [("whole", [9])], "the same name again is another request"


def test_tokens_no_caller_waits_for_go_along_with_those_one_waits_for(session):
    session.expect("whole", whole=True)
    session.expect("stream", whole=False)
    messages = session.messages()
    session.put([TokenEvent("whole", (1,))])
    next(messages)
    session.put([TokenEvent("whole", (2,))])
    session.put([TokenEvent("stream", (7,))])
    assert told(next(messages)) == [("whole", [2]), ("stream", [7])]


def test_it_waits_for_a_while_only(session):
    session.expect("whole", whole=True)
    messages = session.messages()
    for token in range(3):
        session.put([TokenEvent("whole", (token,))])
        assert told(next(messages)) == [("whole", [token])]


def test_an_end_brings_what_was_kept_back(session):
    session.expect("whole", whole=True)
    messages = session.messages()
    session.put([TokenEvent("whole", (1,))])
    next(messages)
    session.put([TokenEvent("whole", (2,))])
    session.end()
    assert [told(message) for message in messages] == [[("whole", [2])]]
