"""Several engines behind one interface, over real sockets: adapters, routing, moves, news."""

import asyncio
from pathlib import Path

import pytest
from local_engines import Answer, ask, until
from structlog.testing import capture_logs

from engine.core.messages.requests import Lane, LaneMode, Pooling
from engine.rpc.api import AdapterRejected
from engine.rpc.service import EngineService
from engine.rpc.stream import EngineUnavailable
from engine.rpc.wire import LANES, PROTOCOL
from gateway.routing.decision import Reason
from gateway.routing.prefixes import PREFIX_TOKENS
from gateway.serve.backends import Backends, ModelPlace
from gateway.serve.models import wait_for_engines


async def test_every_engine_has_every_adapter_also_one_that_joins_later(engines):
    pool = await engines.pool("a", "b")
    hashes = [(await pool.load_adapter(f"adapters/{number}")).adapter for number in range(24)]
    await pool.pin_adapter(hashes[0], True)
    await pool.set_lane(Lane.BATCH, LaneMode.PAUSED)
    await pool.add("c", engines.start("c").target)
    await asyncio.wait_for(pool.wait_serving(3), 60)
    for engine in engines.running.values():
        assert set(engine.engine.state.adapters) == set(hashes)
        assert engine.engine.state.adapters[hashes[0]].pinned
        assert engine.engine.state.waiting.modes[Lane.BATCH] is LaneMode.PAUSED
    answers = [Answer(pool, ask(f"r{i}", hashes[i], length=10)) for i in range(24)]
    for answer in answers:
        await answer.whole()
    assert {place.engine for answer in answers for place in answer.places} == {"a", "b", "c"}
    await pool.unload_adapter(hashes[1], 0.0)
    for engine in engines.running.values():
        assert set(engine.engine.state.adapters) == set(hashes) - {hashes[1]}


async def test_answers_of_an_engine_that_ends_go_on_in_another(engines):
    pool = await engines.pool("a", "b")
    answers = [Answer(pool, ask(f"r{i}", length=200)) for i in range(12)]
    await until(lambda: all(len(answer.tokens) > 20 for answer in answers))
    assert {answer.engines[0] for answer in answers} == {"a", "b"}
    await engines.stop("a")
    for answer in answers:
        await answer.whole()
        assert answer.engines in (["a", "b"], ["b"])
    assert [state.state for state in pool.overviews()] == ["connecting", "serving"]
    # The process is lost and not known to be innocent, so that its requests are computed alone for some tokens.
    assert [answer.trial.is_suspect for answer in answers] == [answer.engines[0] == "a" for answer in answers]


async def test_an_engine_that_drains_gives_its_answers_away_and_serves_again_afterwards(engines):
    pool = await engines.pool("a", "b")
    answers = [Answer(pool, ask(f"r{i}", length=200)) for i in range(8)]
    await until(lambda: all(len(answer.tokens) > 20 for answer in answers))
    await pool.drain("a", True)
    for answer in answers:
        await answer.whole()
        assert answer.engines in (["a", "b"], ["b"])
        assert not answer.trial.is_suspect
        assert answer.trial.losses == 0
    assert {"a", "b"} == {answer.engines[0] for answer in answers}
    await until(lambda: not engines.running["a"].engine.state.sequences)
    later = [Answer(pool, ask(f"later{i}")) for i in range(4)]
    for answer in later:
        await answer.whole()
        assert answer.engines == ["b"]
    await pool.drain("a", False)
    await asyncio.wait_for(pool.wait_serving(2), 60)
    await until(lambda: not any(engine.running for engine in pool.overviews()))  # as far as news have told
    again: list[Answer] = []  # on a busy machine, one engine may be predicted to be faster until it has many
    async with asyncio.timeout(60):
        while not any(answer.engines == ["a"] for answer in again):
            again.append(Answer(pool, ask(f"again{len(again)}", length=200)))
            await asyncio.sleep(0.01)
    for answer in again:
        await answer.whole()


async def test_the_last_engine_keeps_its_answers_while_it_drains(engines):
    pool = await engines.pool("a")
    answer = Answer(pool, ask("r", length=300))
    await until(lambda: len(answer.tokens) > 10)
    await pool.drain("a", True)
    await until(lambda: not pool.ready)
    await answer.whole()
    assert not answer.moves


async def test_an_engine_stops_once_it_is_empty(engines):
    pool = await engines.pool("a", "b")
    answer = Answer(pool, ask("r", length=300), "a session")
    await until(lambda: len(answer.tokens) > 10)
    await pool.drain(answer.engines[0], True, restart=True, seconds=60.0)
    await answer.whole()
    await asyncio.to_thread(engines.running[answer.engines[0]].thread.join, 60)
    assert not engines.running[answer.engines[0]].thread.is_alive()


async def test_an_engine_of_another_model_gets_no_requests(engines):
    engines.start("other", model_hash="b", weights="int8")
    pool = await engines.pool("a")
    await pool.add("other", engines.running["other"].target)
    await until(lambda: pool.overviews()[1].problem)
    overview = pool.overviews()[1]
    assert overview.state == "mismatched"
    assert "model_hash (b, not a)" in overview.problem
    assert "weights (int8, not bf16)" in overview.problem
    assert overview.weights == "int8"
    for number in range(8):
        answer = Answer(pool, ask(f"r{number}"))
        await answer.whole()
        assert answer.engines in (["a"], [""])


async def test_an_engine_that_does_not_name_its_weights_is_no_other(engines):
    engines.start("older", weights="")
    pool = await engines.pool("a")
    await pool.add("older", engines.running["older"].target)
    await asyncio.wait_for(pool.wait_serving(2), 60)


async def test_an_engine_of_another_protocol_gets_no_requests_and_is_shown_and_logged_once(engines, monkeypatch):
    monkeypatch.setattr("engine.rpc.link.REFUSED_SECONDS", 0.01)
    asked, describe = [], EngineService.Describe
    monkeypatch.setattr(EngineService, "Describe", lambda *call: asked.append(0) or describe(*call))
    engines.start("old", protocol=PROTOCOL + 1)
    pool = await engines.pool("a")
    with capture_logs() as logs:
        await pool.add("old", engines.running["old"].target)
        await until(lambda: len(asked) > 4)
        answers = [Answer(pool, ask(f"r{number}")) for number in range(4)]
        for answer in answers:
            await answer.whole()
    assert [state.state for state in pool.overviews()] == ["serving", "mismatched"]
    assert f"version {PROTOCOL + 1} of the protocol" in pool.overviews()[1].problem
    assert [line["event"] for line in logs if line["log_level"] == "error"] == ["engine_refused"]
    await engines.stop("old")
    await until(lambda: pool.overviews()[1].state == "connecting")
    engines.start("old")
    await asyncio.wait_for(pool.wait_serving(2), 60)
    assert not pool.overviews()[1].problem


async def test_an_engine_without_the_adapter_gets_no_requests_with_it(engines):
    engines.start("a").executor.refused = ("adapters/x",)
    pool = await engines.pool("a", "b")
    adapter = (await pool.load_adapter("adapters/x")).adapter
    answers = [Answer(pool, ask(f"r{i}", adapter, length=5)) for i in range(10)]
    for answer in answers:
        await answer.whole()
        assert answer.engines == ["b"]
    await engines.stop("b")
    await until(lambda: pool.overviews()[1].state == "connecting")
    with pytest.raises(EngineUnavailable, match="has the adapter"):
        pool._dispatch.choose(pool._dispatch.ask_for(ask("r", adapter), "", share_prefixes=False))


async def test_an_adapter_that_no_engine_takes_is_refused(engines):
    for name in ("a", "b"):
        engines.start(name).executor.refused = ("adapters/x",)
    pool = await engines.pool("a", "b")
    with pytest.raises(AdapterRejected, match="disk of this machine"):
        await pool.load_adapter("adapters/x")


async def test_requests_of_a_session_stay_together(engines):
    pool = await engines.pool("a", "b", "c")
    sessions = {}
    for number in range(30):
        answer = Answer(pool, ask(f"r{number}", length=5), f"acme/{number % 3}")
        await answer.whole()
        sessions.setdefault(number % 3, set()).add(answer.engines[0])
    assert all(len(places) == 1 for places in sessions.values())


async def test_a_gateway_learns_of_the_prompts_that_another_has_sent(engines):
    one, other = await engines.pool("a", "b"), await engines.pool("a", "b")
    prompt = [number % 200 for number in range(3 * PREFIX_TOKENS)]
    first = Answer(one, ask("first", prompt=prompt, length=5))
    await first.whole()
    keys = other._dispatch.ask_for(ask("x", prompt=prompt), "", share_prefixes=False).prefix_keys
    await until(lambda: other._dispatch._router.prefixes.matches(keys))
    salted = ask("x", prompt=prompt)._replace(cache_salt="s")
    apart = other._dispatch.ask_for(salted, "", share_prefixes=False).prefix_keys
    assert not other._dispatch._router.prefixes.matches(apart)
    for shares, known in ((True, keys), (False, ())):
        vector = ask("x", prompt=prompt)._replace(pooling=Pooling(shares_pages=shares))
        assert other._dispatch.ask_for(vector, "", share_prefixes=False).prefix_keys == known
    second = Answer(other, ask("second", prompt=[*prompt, 9], length=5))
    await second.whole()
    assert second.engines == first.engines
    assert second.places[0].reason == Reason.PREFIX.value


async def test_the_engines_report_as_one(engines):
    pool = await engines.pool("a", "b")
    adapter = (await pool.load_adapter("adapters/x")).adapter
    answers = [Answer(pool, ask(f"r{i}", adapter, length=400)) for i in range(8)]
    await until(lambda: all(answer.tokens for answer in answers))
    stats, live = await pool.stats(check=True), await pool.live_requests(3)
    interactive = next(lane for lane in stats.lanes if lane.lane == LANES[Lane.INTERACTIVE])
    assert (interactive.running + interactive.waiting, live.total, len(live.requests)) == (8, 8, 3)
    assert stats.total_pages == 2 * 999
    assert [(one.adapter, one.running) for one in stats.adapters] == [(adapter, 8)]
    assert not stats.violations
    assert sum(stats.step_tokens.counts) > 0 and len(stats.step_tokens.counts) == len(stats.step_tokens.bounds) + 1
    assert (pool.info.max_seqs, pool.info.num_pages) == (32, 2000)
    assert await pool.cancel([answer.request.id for answer in answers]) == 8
    ends = await asyncio.gather(*(answer.task for answer in answers), return_exceptions=True)
    assert all("an administrator cancelled the request" in str(end) for end in ends)


async def test_nothing_is_left_of_requests_whose_readers_leave(engines):
    pool = await engines.pool("a", "b")
    answers = [Answer(pool, ask(f"r{i}", length=2000)) for i in range(10)]
    await until(lambda: all(answer.tokens for answer in answers))
    for answer in answers:
        answer.task.cancel()
    await asyncio.wait([answer.task for answer in answers])
    await until(lambda: not any(engine.engine.state.sequences for engine in engines.running.values()))
    assert [replica.unfinished[Lane.INTERACTIVE] for replica in pool._dispatch._router.replicas.values()] == [0, 0]
    await pool.remove("a")
    with pytest.raises(KeyError):
        await pool.remove("a")
    last = Answer(pool, ask("last"))
    await last.whole()


async def test_an_answer_that_moves_is_not_turned_away_by_its_next_engine(engines):
    pool = await engines.pool("a", "b")
    answer = Answer(pool, ask("r", length=300))
    await until(lambda: len(answer.tokens) > 10)
    (name,) = answer.engines
    (other,) = {"a", "b"} - {name}
    await pool._engines[other].client.set_lane(Lane.INTERACTIVE, LaneMode.DRAINING)
    await pool.drain(name, True)
    await answer.whole()
    assert answer.engines == [name, other]


async def test_an_engine_that_drains_keeps_answers_whose_adapter_no_other_engine_has(engines):
    engines.start("b").executor.refused = ("adapters/x",)
    pool = await engines.pool("a", "b")
    adapter = (await pool.load_adapter("adapters/x")).adapter
    answers = [Answer(pool, ask(f"r{i}", adapter, length=200)) for i in range(4)]
    await until(lambda: all(len(answer.tokens) > 10 for answer in answers))
    await pool.drain("a", True)
    for answer in answers:
        await answer.whole()
        assert set(answer.engines) == {"a"}


async def test_a_request_that_no_engine_takes_yet_waits_for_its_adapter(engines):
    pool = await engines.pool("a", "b")
    adapter = (await pool.load_adapter("adapters/x")).adapter
    for engine in pool._engines.values():
        engine.held.discard(adapter)
    answer = Answer(pool, ask("r", adapter))
    await asyncio.sleep(0.3)
    assert not answer.task.done()
    await pool.load_adapter("adapters/x")
    await answer.whole()
    assert (answer.moves, answer.trial.losses, answer.trial.is_suspect) == ([], 0, False)


async def test_an_engine_that_joins_during_a_load_gets_the_adapter_too(engines):
    engines.start("a").executor.blocked = ("adapters/x",)
    pool = await engines.pool("a", "b")
    loading = asyncio.create_task(pool.load_adapter("adapters/x"))
    await until(lambda: engines.running["b"].engine.state.adapters)
    await pool.add("c", engines.start("c").target)
    await asyncio.wait_for(pool.wait_serving(3), 60)
    engines.running["a"].executor.go_on.set()
    adapter = (await loading).adapter
    assert all(adapter in engine.held for engine in pool._engines.values())
    assert all(adapter in engine.engine.state.adapters for engine in engines.running.values())


async def test_an_engine_that_restarts_during_a_load_is_not_taken_to_have_the_adapter(engines):
    engines.start("b").executor.blocked = ("adapters/x",)
    pool = await engines.pool("a", "b")
    loading = asyncio.create_task(pool.load_adapter("adapters/x"))
    await until(lambda: engines.running["a"].engine.state.adapters)
    await engines.stop("a")
    await until(lambda: pool.overviews()[0].state == "connecting")
    engines.start("a", life="another")
    await asyncio.wait_for(pool.wait_serving(2), 60)
    engines.running["b"].executor.go_on.set()
    adapter = (await loading).adapter
    for engine in pool._engines.values():
        assert (adapter in engine.held) == (adapter in engines.running[engine.name].engine.state.adapters)
    answers = [Answer(pool, ask(f"r{i}", adapter, length=5)) for i in range(8)]
    for answer in answers:
        await answer.whole()


async def test_a_gateway_that_starts_later_needs_no_engine_that_drains(engines):
    pool = await engines.pool("a", "b")
    await pool.drain("b", True)
    places = {"m": ModelPlace({name: engine.target for name, engine in engines.running.items()}, Path())}
    await asyncio.wait_for(wait_for_engines({"m": pool}, Backends("", places), None), 20)
