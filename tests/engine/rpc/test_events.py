"""Events put together and taken apart tell every request the same, token for token."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from engine.core.messages.requests import ErrorCode, FinishReason, Refusal, TokenEvent, TokenLogprobs
from engine.rpc.coalesce import merge_events, merge_request_events, split_per_token

REFUSAL = Refusal(ErrorCode.ADAPTER_UNAVAILABLE, "too often")


def life(name: str, tokens: int, end: FinishReason, with_logprobs: bool, refused: bool) -> list[TokenEvent]:
    """All that an engine tells of one request."""
    events = [TokenEvent(name, num_cached=7, wait=0.5, adapter_wait=0.25)]
    events += [TokenEvent(name, num_cached=7, prompt_logprobs=bytes([number])) for number in range(with_logprobs * 3)]
    for number in range(1, tokens + 1):
        logprobs = (TokenLogprobs(-float(number), ()),) if with_logprobs else ()
        finish = end if number == tokens and not refused else None
        events.append(TokenEvent(name, (number,), logprobs, finish, 7, device_seconds=number / 8))
    if refused:
        events.append(TokenEvent(name, finish_reason=FinishReason.ERROR, refusal=REFUSAL))
    return events


@st.composite
def lives(draw: st.DrawFn) -> list[TokenEvent]:
    """Draw the events of up to three requests, interleaved as successive steps would produce them."""
    ends = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
    told = [
        life(name, draw(st.integers(1, 6)), draw(ends), draw(st.booleans()), draw(st.booleans()))
        for name in "abc"[: draw(st.integers(1, 3))]
    ]
    order = draw(st.permutations([number for number, events in enumerate(told) for _ in events]))
    left = [iter(events) for events in told]
    return [next(left[number]) for number in order]


def by_request(events):
    found = defaultdict(list)
    for event in events:
        found[event.request_id].append(event)
    return found


@given(lives(), st.lists(st.integers(1, 8), min_size=1))
def test_joined_and_taken_apart_they_are_what_they_were(events, sizes):
    sent, place = [], 0
    while place < len(events):
        size = sizes[len(sent) % len(sizes)]
        sent.append(merge_events(events[place : place + size]))
        place += size
    told = by_request(piece for message in sent for event in message for piece in split_per_token(event))
    for name, before in by_request(events).items():
        after = told[name]
        for field in ("tokens", "logprobs"):
            assert sum((getattr(event, field) for event in after), ()) == sum((getattr(e, field) for e in before), ())
        assert b"".join(event.prompt_logprobs for event in after) == b"".join(e.prompt_logprobs for e in before)
        assert [event.finish_reason for event in after if event.finish_reason] == [before[-1].finish_reason]
        assert (after[-1].finish_reason, after[-1].refusal) == (before[-1].finish_reason, before[-1].refusal)
        assert after[-1].tokens == before[-1].tokens, "an end without a token hides none"
        assert (after[0].wait, after[0].adapter_wait, min(e.num_cached for e in after)) == (
            0.5,
            0.25,
            min_cached(before),
        )
        assert max(event.device_seconds for event in after) == max(event.device_seconds for event in before)
        assert all(len(event.tokens) <= 1 for event in after)


def min_cached(events):
    return min(event.num_cached for event in events)


def test_one_event_is_itself():
    event = TokenEvent("a", (1,), (), FinishReason.STOP, 3)
    assert merge_request_events([event]) is event
    assert list(split_per_token(event)) == [event]
