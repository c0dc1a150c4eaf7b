"""Requests whose prompt one engine computes and whose answer another one continues: every token comes once, whatever
happens to either engine, and nothing is left on the other."""

import asyncio
import time
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from local_engines import Answer, ask, expected, until
from records import make_record

from engine.core.messages.commands import DropAdapter
from engine.core.messages.requests import Lane
from engine.core.watch.check import violations
from gateway.requests.settings import ServiceSettings
from gateway.requests.submission import Submission
from gateway.routing.news import Role
from gateway.routing.split import SplitMode

PROMPT = tuple(range(1, 101))
"""Six full pages of 16 tokens, and four tokens more."""
PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


def request(name="r", length=40, **more):
    return ask(name, length=length, prompt=PROMPT, **more)


@pytest.fixture
async def split(engines):
    """Return a function that opens a pool over engines with these roles, named a, b and so on, which exchange KV."""

    async def open_pool(*roles, mode=SplitMode.ALWAYS):
        names = "abc"[: len(roles)]
        for name in names:
            engines.start(name, kv_listen="auto")
        return await engines.pool(*names, roles=roles, split=mode)

    return open_pool


def state(engines, name):
    return engines.running[name].engine.state


async def settled(pool, engines):
    """Wait until no engine has anything of a request or a transfer, and the router counts nothing."""
    for one in engines.running.values():
        await until(lambda one=one: not (one.engine.state.moves.imports or one.engine.state.moves.exports))
        await until(lambda one=one: not one.engine.state.sequences)
        assert one.engine.look(violations) == []
    assert all(not any(one.replica.unfinished.values()) for one in pool._engines.values() if one.replica)


async def test_the_answer_goes_on_in_the_other_engine_with_the_prompts_pages(split, engines):
    pool = await split(PREFILL, DECODE)
    answers = [Answer(pool, request(f"r{number}")) for number in range(4)]
    for answer in answers:
        await answer.whole()
        assert answer.engines == ["a", "b"] and not answer.moves
    await settled(pool, engines)
    assert state(engines, "b").counters.kv.pages_in == 6, "the prompts are equal"
    assert state(engines, "b").counters.generated_tokens == 4 * 39
    assert [one.role for one in pool.overviews()] == ["prefill", "decode"]


async def test_a_split_request_counts_as_one_decision(split):
    pool = await split(PREFILL, DECODE)
    record = make_record()
    job = SimpleNamespace(num_answers=1, budget=None, engine_request=lambda *_: request())
    async with aclosing(Submission(pool, job, record, time.monotonic, ServiceSettings())) as submission:
        [stream] = submission.begin()
        async for _ in stream:
            pass
    assert (record.engines.last, record.engines.routes) == ("b", ["split"])


async def test_roles_are_followed_and_an_engine_that_gives_no_kv_computes_no_prompts_for_others(split, engines):
    pool = await split(DECODE, PREFILL, DECODE)
    answer = Answer(pool, request())
    await answer.whole()
    assert answer.engines[0] == "b" and answer.engines[1] in "ac"
    engines.start("silent")
    other = await engines.pool("silent", "a", roles=(PREFILL, DECODE), split=SplitMode.ALWAYS)
    answer = Answer(other, request("s"))
    await answer.whole()
    assert len(answer.engines) == 1


@pytest.mark.parametrize(
    "kind", [{"length": 1}, {"lane": Lane.BATCH}, {"mode": SplitMode.NEVER}], ids=["one-token", "batch", "never"]
)
async def test_what_is_not_split(split, kind):
    kind = dict(kind)
    pool = await split(BOTH, BOTH, mode=kind.pop("mode", SplitMode.ALWAYS))
    answer = Answer(pool, request(**kind))
    await answer.whole()
    assert len(answer.engines) == 1


async def test_an_answer_that_ends_with_its_first_token_is_awaited_by_no_engine(split, engines):
    pool = await split(PREFILL, DECODE)
    asked = request()
    [first] = expected(request(length=1))
    asked = asked._replace(params=asked.params._replace(stop_token_ids=(first,)))
    answer = Answer(pool, asked)
    await asyncio.wait_for(answer.task, 60)
    assert answer.engines == ["a"]
    await settled(pool, engines)


async def test_a_client_that_goes_leaves_nothing_in_either_engine(split, engines):
    pool = await split(PREFILL, DECODE)
    engines.running["a"].executor.is_stuck = True
    answer = Answer(pool, request())
    await until(lambda: state(engines, "b").moves.imports)
    answer.task.cancel()
    engines.running["a"].executor.is_stuck = False
    engines.running["a"].executor.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await answer.task
    await settled(pool, engines)


async def test_the_prompts_engine_ends_before_the_first_token(split, engines):
    pool = await split(PREFILL, DECODE)
    engines.running["a"].executor.is_stuck = True
    answer = Answer(pool, request())
    await until(lambda: state(engines, "b").moves.imports)
    await pool.remove("a")
    engines.running["a"].executor.is_stuck = False
    engines.running["a"].executor.go_on.set()
    await answer.whole()
    assert answer.engines == ["a", ""], "the only engine left needs no name"
    await settled(pool, engines)


async def test_the_prompts_engine_hangs_or_ends_after_the_first_token(split, engines, monkeypatch):
    monkeypatch.setattr("gateway.engines.dispatch.REST_SECONDS", 0.2)
    pool = await split(PREFILL, DECODE)
    answer = Answer(pool, request(length=200))
    await until(lambda: len(answer.engines) == 2)
    await pool.remove("a")
    await engines.stop("a")
    await answer.whole()
    assert answer.engines == ["a", "b"]
    await settled(pool, engines)


@pytest.mark.parametrize("tokens", [0, 10])
async def test_the_answers_engine_ends_before_or_while_it_answers(split, engines, tokens):
    pool = await split(PREFILL, DECODE)
    engines.running["a"].executor.is_stuck = not tokens
    answer = Answer(pool, request(length=200))
    if tokens:
        await until(lambda: len(answer.tokens) >= tokens)
    else:
        await until(lambda: state(engines, "b").moves.imports)
    await pool.remove("b")
    engines.running["a"].executor.is_stuck = False
    engines.running["a"].executor.go_on.set()
    await answer.whole()
    assert answer.engines == ["a", ""] if not tokens else ["a", "b", ""]
    await settled(pool, engines)


async def test_an_engine_that_refuses_the_rest_is_left_for_another(split, engines):
    pool = await split(PREFILL, DECODE)
    info = await pool.load_adapter("/adapters/one")
    engines.running["a"].executor.is_stuck = True
    answer = Answer(pool, request(adapter=info.adapter))
    await until(lambda: state(engines, "b").moves.imports)
    engines.running["b"].engine.inbox.put(DropAdapter(info.adapter))
    await until(lambda: info.adapter not in state(engines, "b").adapters)
    pool._engines["b"].held.discard(info.adapter)
    engines.running["a"].executor.is_stuck = False
    engines.running["a"].executor.go_on.set()
    await answer.whole()
    assert answer.engines == ["a", "b", "a"]
    await settled(pool, engines)


async def test_a_request_that_the_other_engine_cannot_continue_is_not_split(split):
    pool = await split(PREFILL, DECODE)
    info = await pool.load_adapter("/adapters/one")
    pool._engines["b"].held.discard(info.adapter)
    answer = Answer(pool, request(adapter=info.adapter))
    await answer.whole()
    assert [(place.engine, place.reason) for place in answer.places] == [("a", "home")]


async def test_a_request_goes_on_in_one_engine_while_the_other_drains(split):
    pool = await split(PREFILL, DECODE)
    await pool.drain("b", True)
    answer = Answer(pool, request())
    await answer.whole()
    assert answer.engines == ["a"]
