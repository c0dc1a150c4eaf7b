"""What becomes of engines that hang, die while they join or never come back, and of the requests that they had."""

import asyncio
from contextlib import suppress

import pytest
from local_engines import Answer, ask, until

from engine.core.config import LaneGoals
from engine.core.messages.requests import Lane, LaneMode
from engine.pb import engine_pb2 as pb
from engine.rpc.stream import EngineLost, EngineUnavailable, GivenUp
from gateway.engines.pool import EnginePool
from gateway.requests.answer.crash_trial import CrashTrial
from gateway.requests.answer.resumption import Waits
from gateway.requests.submission import answer_stream
from gateway.routing.prefixes import PREFIX_TOKENS

GOALS = LaneGoals(ttft_s=0.25, itl_s=0.05)


def state(pool, name):
    return next(overview.state for overview in pool.overviews() if overview.name == name)


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr("gateway.engines.pool.LOOK_SECONDS", 0.3)
    monkeypatch.setattr("gateway.core.hanging.MAX_STILL_LOOKS", 4)


async def hanging(engines, pool, name):
    """Let an engine hang in a step; returns answers that it had and that have moved."""
    engines.running[name].executor.is_stuck = True
    answers = [Answer(pool, ask(f"r{i}", length=50)) for i in range(8)]
    await until(lambda: state(pool, name) == "hanging")
    return answers


async def test_an_engine_that_hangs_gets_no_requests_until_it_moves(engines, quick_looks):
    pool = await engines.pool("a", "b")
    answers = await hanging(engines, pool, "a")
    later = [Answer(pool, ask(f"later{i}", length=10)) for i in range(6)]
    for answer in (*answers, *later):
        await answer.whole()
    assert {"a", "b"} == {answer.engines[0] for answer in answers}
    assert all(answer.engines == ["b"] for answer in later)
    assert pool.fate("life-a") is None, "it has not ended, and it may hang because of a request"
    assert state(pool, "a") == "hanging"
    engines.running["a"].executor.is_stuck = False
    engines.running["a"].executor.go_on.set()
    await asyncio.wait_for(pool.wait_serving(2), 60)
    assert pool.fate("life-a") == pb.PreviousLife(life="life-a")


async def test_the_successor_of_an_engine_that_hangs_joins_at_once(engines, quick_looks):
    pool = await engines.pool("a", "b")
    answers = await hanging(engines, pool, "a")
    hung = engines.running.pop("a")
    await asyncio.to_thread(hung.server.stop(grace=0).wait)
    engines.start("a", life="another")
    await asyncio.wait_for(pool.wait_serving(2), 60)
    for answer in answers:
        await answer.whole()
    hung.executor.go_on.set()
    await hung.stop()


async def test_an_engine_that_dies_while_it_is_the_first_leaves_the_next_one_its_place(engines):
    pool, places = EnginePool(), []
    engines.pools.append(pool)

    async def load_all():
        """The first time, die before anything is loaded, while the other engine waits for its turn."""
        places.append(next(engine.name for engine in pool._engines.values() if engine.is_reachable))
        if len(places) == 1:
            (other,) = {"a", "b"} - {places[0]}
            await until(lambda: pool._engines[other].life)
            await engines.stop(places[0])
        with suppress(EngineUnavailable):
            await pool.load_adapter("adapters/x")

    pool.on_first = load_all
    for name in ("a", "b"):
        await pool.add(name, engines.start(name).target)
    await asyncio.wait_for(pool.wait_serving(1), 60)
    assert sorted(places) == ["a", "b"]
    assert engines.running[places[1]].engine.state.adapters


async def test_an_engine_that_dies_at_the_end_of_its_filling_does_not_join(engines, monkeypatch):
    pool = await engines.pool("a")
    joined = []
    monkeypatch.setattr(pool._dispatch, "join", lambda engine: joined.append(engine.name))
    fill = pool._adapters.fill

    async def fill_and_die(engine):
        await fill(engine)
        await engines.stop("b")
        joined.append("filled")

    monkeypatch.setattr(pool._adapters, "fill", fill_and_die)
    await pool.add("b", engines.start("b").target)
    await until(lambda: joined and not pool._engines["b"].is_reachable)
    assert joined == ["filled"]


@pytest.mark.parametrize("turns", range(8))
async def test_a_pool_closes_also_as_the_first_news_of_an_engine_arrive(engines, monkeypatch, turns):
    told, waiting = asyncio.Event(), asyncio.Event()

    async def wait():
        waiting.set()
        return await told.wait()

    pool = await engines.pool("a")
    monkeypatch.setattr(pool, "_heard", lambda engine, message: None)
    await pool.add("b", engines.start("b").target)
    monkeypatch.setattr(pool._engines["b"].told, "wait", wait)
    await asyncio.wait_for(waiting.wait(), 60)
    closing = asyncio.create_task(pool.close())
    for _ in range(turns):
        await asyncio.sleep(0)
    told.set()
    await asyncio.wait_for(closing, 20)


async def test_a_successor_that_knows_no_predecessor_ends_the_wait_for_its_report(engines):
    pool = await engines.pool("a", "b")
    await engines.stop("a")
    await until(lambda: state(pool, "a") == "connecting")
    learning = asyncio.create_task(pool.learn_fate("life-a"))
    engines.start("a", life="another")
    assert await asyncio.wait_for(learning, 60) == pb.PreviousLife(life="life-a")


async def test_a_successor_that_tells_of_its_predecessor_is_believed(engines):
    pool = await engines.pool("a", "b")
    await engines.stop("a")
    await until(lambda: state(pool, "a") == "connecting")
    told = pb.PreviousLife(life="life-a", crashed=True, request_ids=["r"])
    engines.start("a", life="another", previous=told)
    assert await asyncio.wait_for(pool.learn_fate("life-a"), 60) == told


async def test_no_request_waits_for_the_report_of_an_engine_that_was_removed(engines):
    pool = await engines.pool("a", "b")
    await engines.stop("a")
    await until(lambda: state(pool, "a") == "connecting")
    learning = asyncio.create_task(pool.learn_fate("life-a"))
    await pool.remove("a")
    assert not (await asyncio.wait_for(learning, 60)).crashed


class LostEngines:
    """An `EngineApi` whose engines are lost with every request, and none of which tells how it ended."""

    ready = True

    def generate(self, request, session="", handover=None):
        return LostStream()

    async def wait_ready(self):
        pass

    def fate(self, life):
        return None

    async def learn_fate(self, life):
        await asyncio.Event().wait()


class LostStream:
    life, engine, reason, handover = "a", "", "", None

    async def __anext__(self):
        raise EngineLost("gone")

    async def aclose(self):
        pass


async def test_a_request_on_trial_is_given_up_if_no_report_comes():
    engines = LostEngines()
    trial, waits = CrashTrial(engines, False), Waits(0.05, 0.05)
    stream = answer_stream(engines, ask("r"), trial, waits, lambda seconds: None, lambda stream: None)
    with pytest.raises(GivenUp, match=r"told how the one that had the request alone ended within 0\.05 s"):
        await anext(stream)


async def test_an_engine_that_is_removed_is_unknown_to_the_router_before_its_requests_move(engines, monkeypatch):
    pool = await engines.pool("a", "b")
    known = []
    replicas = pool._dispatch._router.replicas
    monkeypatch.setattr(pool._engines["a"].client, "hand_over", lambda loss: known.extend(replicas.values()))
    await pool.remove("a")
    assert [replica.name for replica in known] == ["b"]


async def test_a_request_that_cannot_be_submitted_is_not_counted(engines):
    pool = await engines.pool("a", "b")
    for engine in pool._engines.values():
        engine.client._ready.clear()
    with pytest.raises(EngineUnavailable):
        pool.generate(ask("r"))
    assert [sum(replica.unfinished.values()) for replica in pool._dispatch._router.replicas.values()] == [0, 0]
    assert not any(pool.decisions.values())


async def test_sessions_and_prefixes_are_remembered_where_the_only_holder_of_an_adapter_is(engines):
    engines.start("a").executor.refused = ("adapters/x",)
    pool = await engines.pool("a", "b")
    adapter = (await pool.load_adapter("adapters/x")).adapter
    prompt = [number % 200 for number in range(2 * PREFIX_TOKENS)]
    for number in range(8):
        reasons = []
        for turn in range(2):
            answer = Answer(
                pool, ask(f"{number}-{turn}", adapter, length=3, prompt=[number, *prompt]), f"chat-{number}"
            )
            await answer.whole()
            reasons.append(answer.places[0].reason)
        assert reasons[1] == "session"
    router = pool._dispatch._router
    (a,) = [replica for replica in router.replicas.values() if replica.name == "a"]
    assert not router.prefixes._turns[a.index]


async def test_an_engine_that_joins_gets_modes_and_goals_while_no_other_can_tell_them(engines, monkeypatch):
    pool = await engines.pool("a")
    await pool.set_lane(Lane.BATCH, LaneMode.PAUSED)
    await pool.set_goals(Lane.INTERACTIVE, GOALS)

    async def away(*, check=False):
        raise EngineUnavailable("away")

    monkeypatch.setattr(pool._engines["a"].client, "stats", away)
    await pool.add("b", engines.start("b").target)
    await asyncio.wait_for(pool.wait_serving(2), 60)
    joined = engines.running["b"].engine.state
    assert (joined.waiting.modes[Lane.BATCH], joined.waiting.modes[Lane.INTERACTIVE]) == (
        LaneMode.PAUSED,
        LaneMode.OPEN,
    )
    assert joined.config.interactive == GOALS


async def test_the_next_process_of_the_only_engine_has_the_modes_that_another_gateway_set(engines):
    one, other = await engines.pool("a"), await engines.pool("a")
    await other.set_lane(Lane.BATCH, LaneMode.PAUSED)
    await one.stats()  # as the heartbeat does every other second
    await other.close()
    engines.pools.remove(other)
    await engines.stop("a")
    await until(lambda: state(one, "a") == "connecting")
    engines.start("a", life="another")
    await asyncio.wait_for(one.wait_serving(1), 60)
    assert engines.running["a"].engine.state.waiting.modes[Lane.BATCH] is LaneMode.PAUSED


async def test_a_gateway_that_reconnects_leaves_the_modes_as_another_has_set_them(engines):
    one, other = await engines.pool("a"), await engines.pool("a")
    await one.set_lane(Lane.BATCH, LaneMode.PAUSED)
    await other.set_lane(Lane.BATCH, LaneMode.OPEN)
    one._engines["a"].client.disconnect()
    await until(lambda: not one.ready)
    await asyncio.wait_for(one.wait_serving(1), 60)
    assert engines.running["a"].engine.state.waiting.modes[Lane.BATCH] is LaneMode.OPEN


async def test_a_mode_that_no_engine_took_is_not_remembered(engines):
    pool = await engines.pool("a")
    await engines.stop("a")
    await until(lambda: state(pool, "a") == "connecting")
    with pytest.raises(EngineUnavailable):
        await pool.set_lane(Lane.BATCH, LaneMode.PAUSED)
    engines.start("a", life="another")
    await asyncio.wait_for(pool.wait_serving(1), 60)
    assert engines.running["a"].engine.state.waiting.modes[Lane.BATCH] is LaneMode.OPEN


async def test_one_process_at_two_addresses_is_one_engine(engines):
    engines.start("a", life="same")
    engines.start("b", life="same")
    pool = EnginePool()
    engines.pools.append(pool)
    await pool.add("a", engines.running["a"].target)
    await asyncio.wait_for(pool.wait_serving(1), 60)
    await pool.add("b", engines.running["b"].target)
    await until(lambda: state(pool, "b") == "mismatched")
    assert pool.overviews()[1].problem.endswith("it is the same process as a")
