"""Which events a session sends to the gateway at once, and which it holds until a consumer waits for them."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from structlog.testing import capture_logs

from engine.core.config import CoreConfig
from engine.core.messages.requests import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.executor.fake import FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from engine.rpc.service import EngineService
from engine.rpc.session import PIECE_BYTES, GatewaySession
from engine.rpc.wire import request_to_pb
from engine.serve.server import _listen


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


def test_one_that_leaves_too_much_unread_is_cut_off_and_nothing_is_kept(session, monkeypatch):
    monkeypatch.setattr("engine.rpc.session.MAX_UNREAD", 10)
    messages = session.messages()
    for token in range(20):  # one that reads may get any number
        assert session.put([TokenEvent("a", (token,))])
        next(messages)
    assert session.put([TokenEvent("a", (20,))] * 10)
    assert not session.put([TokenEvent("a", (21,))])
    assert session.overflowed
    assert list(messages) == []


def test_alternatives_count_as_unread_too(session, monkeypatch):
    monkeypatch.setattr("engine.rpc.session.MAX_UNREAD", 10)
    alternatives = TokenLogprobs(-1.0, ((1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)))
    assert session.put([TokenEvent("a", (1,), (alternatives,))] * 2)
    assert not session.put([TokenEvent("a", (1,), (alternatives,))])


@pytest.mark.parametrize("field", ["vector", "prompt_logprobs"])
def test_bytes_count_by_their_number(session, monkeypatch, field):
    monkeypatch.setattr("engine.rpc.session.MAX_UNREAD", 10)
    event = TokenEvent("a", finish_reason=FinishReason.POOLED, **{field: bytes(5 * PIECE_BYTES)})
    assert session.put([event])
    assert not session.put([event])


async def read_all(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_an_engine_ends_the_session_of_a_gateway_that_does_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.rpc.session.MAX_UNREAD", 1000)
    config = CoreConfig(num_pages=1000, block_size=16, max_seqs=4, max_model_len=4000)
    engine = Engine(EngineState.create(config), FakeExecutor())
    service = EngineService(engine, pb.EngineInfo(model="fake"))
    address = f"unix:{tmp_path / 'engine.sock'}"
    server = _listen(service, address)
    loop = threading.Thread(target=engine.run, args=(service.deliver,))
    loop.start()
    try:
        with capture_logs() as logs:
            async with grpc.aio.insecure_channel(address) as channel:
                call = pb_grpc.EngineStub(channel).Session()
                for number in range(4):  # with a name that soon fills what gRPC buffers
                    request = Request(
                        f"{number}" * 100_000, (1, 2, 3), SamplingParams(max_tokens=3900, ignore_eos=True)
                    )
                    await call.write(pb.Commands(commands=[pb.Command(submit=request_to_pb(request))]))
                async with asyncio.timeout(60):
                    while not logs or engine.state.has_work:
                        await asyncio.sleep(0.01)
                    with pytest.raises(grpc.aio.AioRpcError, match="events unread"):
                        await read_all(call)
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [line["event"] for line in logs] == ["gateway_cut_off"]
        assert engine.state.counters.generated_tokens < 4 * 3900
        assert service._owner == {}
        assert violations(engine.state) + leftovers(engine.state) == []
    finally:
        engine.stop()
        await asyncio.to_thread(loop.join)
        await asyncio.to_thread(server.stop(grace=0).wait)
