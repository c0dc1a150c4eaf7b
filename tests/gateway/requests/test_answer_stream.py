"""What the reader of an answer gets when several engine processes compute parts of it, event by event."""

import pytest

from engine.core.messages.requests import (
    ErrorCode,
    FinishReason,
    KvSource,
    ProposalCount,
    Refusal,
    Request,
    SamplingParams,
    TokenEvent,
)
from engine.rpc.stream import EngineDrained, EngineUnavailable
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import Waits
from gateway.requests.submission import answer_stream

LENGTH = FinishReason.LENGTH


class Handover:
    request_id = "r/rest"
    source = KvSource("unix:/kv", 1.0)

    def __init__(self):
        self.is_dropped = False

    def drop(self):
        self.is_dropped = True


class Stream:
    """Yields a part's batches of events, then raises the loss, if there is one."""

    engine, reason = "", ""

    def __init__(self, number, batches, loss=None, handover=None):
        self.life, self.handover = f"life-{number}", handover
        self._batches, self._loss = iter(batches), loss
        self.is_closed = False

    async def __anext__(self):
        if (batch := next(self._batches, None)) is not None:
            return batch
        raise self._loss or StopAsyncIteration

    async def aclose(self):
        self.is_closed = True


class Engines:
    """An `EngineApi` whose parts of the answer are given: (events by id of the request, loss, handover), or an error
    with which a submission fails."""

    ready = True

    def __init__(self, *parts):
        self.parts, self.requests, self.handovers, self.streams = list(parts), [], [], []

    async def wait_ready(self):
        pass

    def fate(self, life):
        return None

    def generate(self, request, session="", handover=None):
        self.requests.append(request)
        self.handovers.append(handover)
        part = self.parts.pop(0)
        if isinstance(part, Exception):
            raise part
        events, loss, offered = part
        self.streams.append(Stream(len(self.streams), [batch(request.id) for batch in events], loss, offered))
        return self.streams[-1]


def admission(cached=0, wait=0.0):
    return lambda name: [TokenEvent(name, num_cached=cached, wait=wait)]


def token(number, device=0.0, end=None, proposals=()):
    return lambda name: [TokenEvent(name, (number,), device_seconds=device, finish_reason=end, proposals=proposals)]


def refusal(name):
    refused = Refusal(ErrorCode.MODEL_NOT_FOUND, "no such adapter")
    return [TokenEvent(name, finish_reason=FinishReason.ERROR, refusal=refused)]


class Reading:
    """Reads an answer of three tokens from engines."""

    def __init__(self, *parts):
        self.engines, self.moves, self.events = Engines(*parts), [], []
        self.trial = CrashTrial(self.engines, False)
        request = Request("r", (1, 2), SamplingParams(max_tokens=3, seed=1))
        waits = Waits(5.0, 5.0)
        self.stream = answer_stream(self.engines, request, self.trial, waits, self.moves.append, lambda placed: None)

    async def whole(self):
        while not self.events or self.events[-1].finish_reason is None:
            self.events += await anext(self.stream)
        with pytest.raises(StopAsyncIteration):
            await anext(self.stream)
        await self.stream.aclose()
        return self

    @property
    def tokens(self):
        return [token for event in self.events for token in event.tokens]


async def test_the_device_time_and_proposals_of_all_engine_processes_count():
    before, after = (ProposalCount("draft", 2, 1),), (ProposalCount("draft", 3, 3),)
    reading = await Reading(
        ([admission(cached=1, wait=0.5), token(7, 2.0, proposals=before)], EngineDrained("drained"), None),
        ([admission(cached=2, wait=9.0), token(8, 0.5), token(9, 1.0, LENGTH, after)], None, None),
    ).whole()
    assert reading.tokens == [7, 8, 9]
    assert [event.device_seconds for event in reading.events] == [0.0, 2.0, 2.5, 3.0]
    assert reading.events[-1].proposals == (ProposalCount("draft", 5, 4),)
    assert {(event.num_cached, event.wait) for event in reading.events[2:]} == {(1, 0.5)}
    assert (len(reading.moves), reading.trial.doubts) == (1, 0)


async def test_the_device_time_of_the_engine_that_computed_the_prompt_counts_after_a_handover():
    handover = Handover()
    reading = await Reading(
        ([admission(), token(7, 2.0, LENGTH)], None, handover),
        ([admission(), token(8, 0.5), token(9, 1.0, LENGTH)], None, None),
    ).whole()
    assert reading.tokens == [7, 8, 9]
    assert [event.device_seconds for event in reading.events] == [0.0, 2.0, 2.5, 3.0]
    assert [event.finish_reason for event in reading.events] == [None, None, None, LENGTH]
    first, rest = reading.engines.requests
    assert (rest.id, rest.kv_source, rest.produced) == ("r/rest", handover.source, (7,)) and first.id == "r"
    assert reading.moves == [] and reading.engines.handovers == [None, handover]


@pytest.mark.parametrize("rest", [([admission(), refusal], None, None), EngineUnavailable("gone")])
async def test_a_rest_that_the_second_engine_does_not_take_goes_elsewhere(rest):
    handover = Handover()
    parts = ([token(7, 2.0, LENGTH)], None, handover), rest, ([token(8), token(9, 1.0, LENGTH)], None, None)
    reading = await Reading(*parts).whole()
    assert reading.tokens == [7, 8, 9] and handover.is_dropped
    assert reading.events[-1].device_seconds == 3.0
    last = reading.engines.requests[-1]
    assert (last.produced, last.kv_source, reading.engines.handovers[-1]) == ((7,), None, None)
    assert last.id not in ("r", "r/rest") and all(stream.is_closed for stream in reading.engines.streams)
    assert (reading.moves, reading.trial.losses, reading.trial.is_suspect) == ([], 0, False)


async def test_an_answer_that_ends_before_the_handover_drops_it_at_once():
    handover = Handover()
    reading = Reading(([token(7, end=FinishReason.STOP)], None, handover))
    assert [event.finish_reason for event in await anext(reading.stream)] == [FinishReason.STOP]
    assert handover.is_dropped


async def test_a_reader_that_leaves_before_it_reads_leaves_neither_engine_anything():
    handover = Handover()
    reading = Reading(([token(7, end=LENGTH)], None, handover))
    await reading.stream.aclose()
    assert handover.is_dropped and reading.engines.streams[0].is_closed
