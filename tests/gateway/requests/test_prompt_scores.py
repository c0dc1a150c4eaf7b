"""Log probabilities of prompts between the engine's events and a response: read, split and joined without loss, and not
asked for again when a request goes on in another engine process."""

import pytest

from engine.core.messages.requests import FinishReason, Request, SamplingParams, TokenEvent
from engine.executor.fake import fake_row
from engine.rpc.stream import EngineUnavailable
from gateway.requests import prompt_scores
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import Waits
from gateway.requests.prompt_scores import PromptReader, PromptScores, join_scores
from gateway.requests.submission import answer_stream

PROMPT = tuple(range(5, 45))
"""40 tokens, so 39 rows."""


def rows(width, first=0, end=39):
    return [fake_row(None, list(PROMPT[: row + 2]), width) for row in range(first, end)]


@pytest.mark.parametrize("width", [0, 1, 20])
@pytest.mark.parametrize("sizes", [[39], [0, 1, 38], [10, 0, 29], [1] * 39])
def test_what_is_read_in_parts_and_split_is_the_whole(monkeypatch, width, sizes):
    monkeypatch.setattr(prompt_scores, "ENTRIES_AT_ONCE", 30)
    reader, parts, left = PromptReader(PROMPT, width), [], rows(width)
    for size in sizes:
        assert not reader.is_complete
        parts += reader.read(b"".join(left[:size])).split()
        left = left[size:]
    assert reader.is_complete
    assert all(part.num_entries <= max(30, 1 + width) for part in parts)
    assert parts[0].token_ids[0] == PROMPT[0]
    whole = PromptReader(PROMPT, width).read(b"".join(rows(width)))
    assert join_scores(parts) == whole
    assert [pair for part in parts for pair in part.pairs()] == list(whole.pairs())
    assert [scored is None for _, scored in whole.pairs()] == [True] + [False] * 39


def test_nothing_is_split_into_nothing():
    assert list(PromptScores().split()) == [PromptScores()]
    assert list(PromptScores().pairs()) == []
    assert join_scores([PromptScores(), PromptScores()]) == PromptScores()


class Stream:
    """Yields the events, then is lost."""

    def __init__(self, life, events):
        self.life, self.engine, self.reason, self.handover = life, "engine", "home", None
        self._events = iter(events)

    async def __anext__(self):
        try:
            return [next(self._events)]
        except StopIteration:
            raise EngineUnavailable("gone") from None

    async def aclose(self):
        pass


class Engine:
    """An engine that is lost after 7 of the prompt's rows, and then continues."""

    ready = True

    def __init__(self):
        self.requests = []

    async def wait_ready(self):
        pass

    def fate(self, life):
        return None

    def generate(self, request, session, handover=None):
        self.requests.append(request)
        admission = TokenEvent(request.id)
        if len(self.requests) == 1:
            return Stream("first", [admission, TokenEvent(request.id, prompt_logprobs=b"".join(rows(2, 0, 7)))])
        missing = b"".join(rows(2, request.num_scored))
        last = TokenEvent(request.id, finish_reason=FinishReason.LENGTH)
        return Stream("second", [admission, TokenEvent(request.id, prompt_logprobs=missing), last])


async def test_a_moved_request_gets_the_missing_rows_only():
    engine, told = Engine(), []
    asked = Request("r", PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=2))
    trial, waits = CrashTrial(engine, False), Waits(10.0, 10.0)
    stream = answer_stream(engine, asked, trial, waits, lambda seconds: None, lambda placed: None)
    while not told or told[-1].finish_reason is None:
        told += await anext(stream)
    assert [request.num_scored for request in engine.requests] == [0, 7]
    assert b"".join(event.prompt_logprobs for event in told) == b"".join(rows(2))
    assert len(told) == 4, "the admission is told once"
