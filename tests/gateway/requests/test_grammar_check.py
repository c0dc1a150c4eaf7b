"""Grammars that would kill or stall the process that compiles them, sent to a gateway."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest
from fakes import BASE, build_gateway_app

from engine.core.messages.grammar import Grammar, GrammarKind
from engine.grammar_check.job import DEATH_SECONDS, Key, Reason, Verdict, Verdicts, WorkerLimits
from engine.grammar_check.pool import GrammarPool
from engine.grammar_check.turns import QueueFull, TenantTurns

pytestmark = pytest.mark.slow

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
HEAVY = {"allOf": [{"type": "string", "pattern": f"^.*a.*{i}$"} for i in range(200)]}
CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'
CRASHES = {
    "the smallest integer": {"guided_json": {"const": -9223372036854775808}},
    "its neighbour": {"guided_json": {"enum": [-9223372036854775807]}},
    "bounds beyond integers": {"guided_json": {"type": "integer", "minimum": -1e30, "maximum": -1e29}},
    "an integer beyond integers": {"guided_json": {"allOf": [{"type": "integer"}, {"enum": [-1e308]}]}},
    "a chain of rules": {"guided_grammar": CHAIN},
}
REFUSED = {
    "patterns that all hold": ({"guided_json": HEAVY}, "more than"),
    "deep nesting": ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "nested"),
    "nesting without an end": ({"guided_json": "[" * 60_000}, "guided_json has more than"),
    "too many digits": ({"guided_json": '{"const":' + "9" * 6000 + "}"}, "digits"),
    "brackets of a regex": ({"guided_regex": "(" * 20_000 + "a" + ")" * 20_000}, "regex"),
    "brackets of a grammar": ({"guided_grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "nested"),
    "brackets of GBNF": ({"guided_grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}, "recursion"),
}


@pytest.fixture
def pool():
    pool = GrammarPool()
    yield pool
    pool.close()


def regex(text):
    return Grammar(GrammarKind.REGEX, text)


def schema(document):
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(document))


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


async def test_hostile_grammars_are_refused_and_cost_their_neighbours_nothing(tmp_path, pool):
    gateway_app = await build_gateway_app(tmp_path, grammars=pool)
    gateway_app.engine.admit = asyncio.Event()
    cases = [(name, fields, "crash") for name, fields in CRASHES.items()]
    cases += [(name, fields, why) for name, (fields, why) in REFUSED.items()]
    async with gateway_app.client("sk-initech") as neighbour, gateway_app.client() as client:
        waiting = asyncio.create_task(neighbour.post("/v1/chat/completions", json=CHAT))
        for name, fields, why in cases:
            response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, next(iter(fields))), name
            assert why in error["message"] and len(error["message"]) < 1000, (name, error)
        gateway_app.engine.admit.set()
        assert (await waiting).status_code == 200
        good = await client.post("/v1/chat/completions", json={**CHAT, "guided_regex": "a+"})
    assert good.status_code == 200
    assert pool.counts.replaced >= len(CRASHES) + 1
    await gateway_app.assert_empty()


async def test_verdicts_are_remembered_and_shared(pool):
    """The same grammar, from two tenants at once and again later, costs one worker."""
    hostile = schema({"const": -9223372036854775808})
    together = [pool.submit(tenant, hostile) for tenant in ("acme", "globex")]
    verdicts = [await asyncio.wrap_future(future) for future in together]
    verdicts.append(await asyncio.wrap_future(pool.submit("acme", hostile)))
    assert [verdict.reason for verdict in verdicts] == [Reason.CRASHED] * 3
    await asyncio.wrap_future(pool.submit("acme", regex("a")))
    assert pool.counts.refused[Reason.CRASHED] == 3 and pool.counts.replaced <= 1


def test_a_worker_killed_from_outside_is_no_verdict(pool):
    """An idle worker is replaced; the grammar that found it dead is tried again, and is sound."""
    assert pool.submit("acme", regex("a")).result(60).reason is None
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert [pool.submit("acme", regex("b" * i)).result(60).reason for i in range(1, 4)] == [None] * 3
    assert pool.counts.replaced >= 1


def test_work_and_memory_of_a_grammar_are_bounded():
    """The same grammar meets whichever bound comes first, and leaves a worker that goes on."""
    for limits, reason in (
        (WorkerLimits(cpu_seconds=0.2, memory_bytes=8 << 30), Reason.CPU),
        (WorkerLimits(cpu_seconds=60.0, memory_bytes=8 << 20), Reason.MEMORY),
    ):
        pool = GrammarPool(limits, workers=1)
        assert pool.submit("acme", schema(HEAVY)).result(60).reason is reason
        assert pool.submit("acme", regex("a")).result(60).reason is None
        assert pool.counts.replaced == 1
        pool.close()


def test_one_tenants_expensive_grammars_leave_a_worker_for_the_others(pool):
    heavy = [pool.submit("acme", schema({**HEAVY, "title": str(i)})) for i in range(20)]
    sound = [pool.submit("globex", regex(f"a{{{i}}}")).result(60).reason for i in range(1, 6)]
    assert sound == [None] * 5
    assert not heavy[-1].done()
    assert all(future.cancel() for future in heavy[2:])
    assert heavy[0].result(60).reason in (Reason.MEMORY, Reason.CPU)
    assert pool.submit("acme", regex("z")).result(60).reason is None


def test_a_tenant_may_have_only_so_many_waiting():
    pool = GrammarPool(queued=2)
    heavy = [pool.submit("acme", schema({**HEAVY, "title": str(i)})) for i in range(8)]
    assert heavy[-1].result(0).reason is Reason.QUEUE
    assert pool.submit("globex", regex("a")).result(60).reason is None
    pool.close()
    assert {future.result(0).reason for future in heavy[:2]} <= {Reason.UNDECIDED, Reason.MEMORY, Reason.CPU}
    assert not pool.pids
    assert pool.submit("globex", regex("b")).result(0).reason is Reason.UNDECIDED


async def test_the_gateway_tells_a_full_queue_from_a_grammar_that_was_not_checked(tmp_path):
    pool = GrammarPool(queued=0)
    gateway_app = await build_gateway_app(tmp_path, grammars=pool)
    async with gateway_app.client() as client:
        full = await client.post("/v1/chat/completions", json={**CHAT, "guided_regex": "a"})
        pool.close()
        closed = await client.post("/v1/chat/completions", json={**CHAT, "guided_regex": "a"})
    assert (full.status_code, full.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (closed.status_code, closed.json()["error"]["code"]) == (503, "engine_unavailable")
    assert full.headers["retry-after"] == closed.headers["retry-after"] == "1"


async def test_a_request_that_is_cancelled_leaves_the_queue(pool):
    heavy = [pool.submit("acme", schema({**HEAVY, "title": str(i)})) for i in range(2)]
    waiting = asyncio.wrap_future(pool.submit("acme", regex("late")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    heavy[1].cancel()
    assert heavy[0].result(60).reason in (Reason.MEMORY, Reason.CPU)


@pytest.mark.parametrize("parameters", [{"const": -9223372036854775808}, HEAVY])
async def test_hostile_parameters_of_a_required_tool(tmp_path, pool, parameters):
    gateway_app = await build_gateway_app(tmp_path, grammars=pool, settings=None)
    body = {**CHAT, "tools": [tool({"type": "object", "properties": {"a": parameters}})], "tool_choice": "required"}
    async with gateway_app.client() as client:
        response = await client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[0].function.parameters"), error


def test_no_worker_outlives_its_parent(tmp_path):
    """A parent that is killed takes its workers with it, one that is busy with a grammar too."""
    heavy = json.dumps(json.dumps(HEAVY))
    code = (
        "import time; from engine.core.messages.grammar import Grammar, GrammarKind\n"
        "from engine.grammar_check.pool import GrammarPool\n"
        "pool = GrammarPool()\n"
        "pool.submit('a', Grammar(GrammarKind.REGEX, 'a')).result()\n"
        f"pool.submit('a', Grammar(GrammarKind.JSON_SCHEMA, {heavy}))\n"
        "print(*pool.pids, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pids) == 2 and not left


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_holds_none_of_its_parents_secrets(monkeypatch):
    monkeypatch.setenv("LORALANE_ADMIN_KEY", "sk-secret-value")
    pool = GrammarPool(workers=1)
    assert pool.submit("acme", regex("a")).result(60).reason is None
    with open(f"/proc/{pool.pids[0]}/environ", "rb") as file:
        assert b"sk-secret-value" not in file.read()
    with open(f"/proc/{pool.pids[0]}/maps") as file:
        libraries = file.read()
    assert "llguidance" in libraries and "torch" not in libraries
    pool.close()


def test_workers_that_may_wait_are_started_by_the_first_grammar():
    with closing(GrammarPool(workers=1, start_after=1000.0)) as pool:
        assert pool.pids == []
        assert pool.submit("acme", regex("a")).result(60).reason is None
    with closing(GrammarPool(workers=1, start_after=1000.0)) as unused:
        pass
    assert unused.submit("acme", regex("a")).result(60).reason is not None


def test_workers_are_started_after_a_while_without_a_grammar():
    with closing(GrammarPool(workers=1, start_after=0.01)) as pool:
        while not pool.pids:
            time.sleep(0.01)


def test_turns_go_round():
    turns = TenantTurns(at_once=1, most=3, costly_at_once=1)
    for item in range(3):
        turns.put("a", f"a{item}")
    with pytest.raises(QueueFull):
        turns.put("a", "a3")
    turns.put("b", "b0")
    assert [turns.take(), turns.take(), turns.take()] == [("a", "a0"), ("b", "b0"), None]
    turns.done("a")
    assert turns.remove("a", "a1") and not turns.remove("a", "a1")
    assert turns.take() == ("a", "a2")
    assert len(turns) == 0


def test_tenants_whose_grammars_are_costly_share_a_place():
    turns = TenantTurns(at_once=1, most=9, costly_at_once=1)
    for item in range(3):
        turns.put("a", f"a{item}")
        turns.put("b", f"b{item}")
    assert [turns.take(), turns.take()] == [("a", "a0"), ("b", "b0")]
    turns.done("a", was_costly=True)
    turns.done("b", was_costly=True)
    turns.put("c", "c0")
    assert [turns.take(), turns.take(), turns.take()] == [("a", "a1"), ("c", "c0"), None]
    turns.done("a", was_costly=False)  # a is like the others again
    assert [turns.take(), turns.take()] == [("b", "b1"), ("a", "a2")]
    turns.done("b", was_costly=True)
    turns.done("a")
    assert turns.take() == ("b", "b2")


def test_what_is_remembered_is_bounded_and_a_death_expires():
    now = [0.0]
    verdicts = Verdicts(lambda: now[0], kept=2)
    keys = [Key.of(regex(text)) for text in "abc"]
    verdicts.put(keys[0], Verdict(Reason.UNDECIDED, "killed"))
    assert verdicts.get(keys[0]) is None
    verdicts.put(keys[0], Verdict(Reason.CRASHED, "died"))
    verdicts.put(keys[1], Verdict(Reason.INVALID, "no regex"))
    now[0] = DEATH_SECONDS
    assert verdicts.get(keys[0]) is None and verdicts.get(keys[1]).reason is Reason.INVALID
    for key in (keys[2], keys[0]):
        verdicts.put(key, Verdict())
    assert verdicts.get(keys[1]) is None and len(verdicts) == 2
