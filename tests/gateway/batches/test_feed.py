"""How many lines of batches enter the engine: the rule, and the gate that keeps it."""

import asyncio

import pytest
from batch_cluster import until
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from engine.core.messages.requests import LaneMode
from engine.pb import engine_pb2 as pb
from gateway.batches.gate import AdmissionQueue, Gate
from gateway.batches.pace import FIRST_WINDOW, LimitWindow
from gateway.core.feed import LEAST, MOST, Flow

COUNT = st.integers(0, 3000)
FLOW = st.builds(Flow, running=COUNT, others=COUNT, waiting=COUNT, begun=COUNT, rate=st.floats(0, 1e5))


@given(FLOW, st.integers(1, 5000))
def test_what_waits_is_bounded_and_so_is_what_is_on_its_way(flow, most):
    room = flow.room(most)
    assert room >= 0
    if room:
        assert flow.waiting + room <= MOST
        assert flow.waiting + flow.begun + room <= most
        assert flow.others + flow.waiting + room <= max(MOST, flow.others + LEAST)


@given(FLOW)
def test_no_gateway_starves_behind_another_gateways_backlog(flow):
    free = 10_000
    assert flow.waiting + flow.room(free) >= min(LEAST, free)


@given(FLOW, st.integers(1, 5000), st.integers(1, 100))
def test_more_of_others_never_makes_more_room(flow, most, more):
    crowded = Flow(flow.running, flow.others + more, flow.waiting, flow.begun, flow.rate)
    assert crowded.room(most) <= flow.room(most)


def test_an_idle_engine_gets_a_few_and_a_fast_one_many():
    assert Flow().room(1000) == LEAST
    assert Flow(rate=100.0).room(1000) == 100
    assert Flow(running=64).room(1000) == 64
    assert Flow(rate=1e9).room(10_000) == MOST


def test_a_look_tells_own_lines_from_others_and_follows_the_rate():
    flow = Flow(waiting=10)
    for _ in range(40):
        flow = flow.after_poll(running=7, waiting=25, ended=50, seconds=0.5)
    assert (flow.running, flow.others) == (7, 15)
    assert flow.rate == pytest.approx(100, rel=0.01)
    assert flow.after_poll(7, 3, 0, 0.5).others == 0


@given(st.lists(st.sampled_from(["enter", "grant", "leave", "cancel"]), max_size=60), st.data())
async def test_a_turnstile_lets_in_as_many_as_may_and_the_first_first(steps, data):
    limit = 0
    stile = AdmissionQueue(lambda: limit - stile.inside)
    waiting, inside, number = [], [], 0
    for step in steps:
        if step == "enter":
            number += 1
            order = (data.draw(st.integers(0, 5)), number)
            waiting.append((order, asyncio.create_task(stile.enter(order))))
        elif step == "grant":
            limit += 1
            stile.admit()
        elif step == "leave" and inside:
            inside.pop()
            stile.leave()
        elif step == "cancel" and waiting:
            _, task = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            task.cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        let_in = [(order, task) for order, task in waiting if task.done()]
        waiting = [(order, task) for order, task in waiting if not task.done()]
        inside += let_in
        assert stile.inside == len(inside)
        assert stile.queued == len(waiting)
        assert len(inside) == limit or not waiting
        if let_in and waiting and step != "enter":
            assert max(order for order, _ in let_in) < min(order for order, _ in waiting)
    for _, task in waiting:
        task.cancel()


async def test_who_is_let_in_and_cancelled_at_once_leaves_his_place_to_the_next():
    room = [0]
    stile = AdmissionQueue(lambda: room[0] - stile.inside)
    first, second = (asyncio.create_task(stile.enter((number,))) for number in (1, 2))
    await asyncio.sleep(0)
    room[0] = 1
    stile.admit()
    first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled() and not second.cancelled()
    assert (stile.inside, stile.queued) == (1, 0)


async def test_who_gives_up_is_forgotten_even_if_none_is_let_in():
    stile = AdmissionQueue(lambda: 0)
    patient = asyncio.create_task(stile.enter((0,)))
    for number in range(500):
        hasty = asyncio.create_task(stile.enter((number,)))
        await asyncio.sleep(0)
        hasty.cancel()
        await asyncio.wait([hasty])
    assert stile.queued == 1 and len(stile._waiting) < 100
    patient.cancel()


async def test_after_a_refusal_one_asks_at_a_time_then_more_with_each_that_gets_in():
    pace, asking, order = LimitWindow(), [], iter(range(1000))

    async def line(answer):
        async with pace.attempt("tiny", (next(order),)) as mine:
            asking.append(mine)
            await answer.wait()

    never = asyncio.Event()
    tasks = [asyncio.create_task(line(never)) for _ in range(40)]
    await until(lambda: len(asking) == FIRST_WINDOW)
    pace.refused(0.05)
    assert pace.is_limited
    for task in tasks[:FIRST_WINDOW]:
        task.cancel()
    await until(lambda: len(asking) == FIRST_WINDOW + 1)
    await asyncio.sleep(0.05)
    assert len(asking) == FIRST_WINDOW + 1
    asking[-1].admitted()
    await until(lambda: len(asking) == FIRST_WINDOW + 3)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.fixture
def engine():
    engine = FakeEngine()
    engine.picture = pb.EngineStats(lanes=[pb.LaneStats(lane=pb.LANE_BATCH)])
    return engine


def enter(gate, count, first=0):
    """Lines that want places, and never leave them."""
    inside = []

    async def line(number):
        async with gate.place((number,)) as place:
            inside.append((number, place))
            await asyncio.Event().wait()

    return inside, [asyncio.create_task(line(first + number)) for number in range(count)]


async def test_a_gate_opens_when_the_engine_is_there_and_gives_places_in_order(engine):
    gate = Gate(engine, lambda: 1000, asyncio.get_running_loop().time)
    engine.ready = False
    inside, tasks = enter(gate, 50)
    await gate.poll()
    assert not inside and not gate.wants_more(0)
    engine.ready = True
    await gate.poll()
    await asyncio.sleep(0)
    assert [number for number, _ in inside] == list(range(LEAST))
    for _, place in tuple(inside):
        place.begin()
    await asyncio.sleep(0)
    assert len(inside) == 2 * LEAST, "who has begun does not wait"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert gate.in_flight == 0


async def test_half_of_the_lane_is_left_to_others(engine):
    gate = Gate(engine, lambda: 20, asyncio.get_running_loop().time)
    await gate.poll()
    inside, tasks = enter(gate, 50)
    await asyncio.sleep(0)
    for _, place in tuple(inside):
        place.begin()
    await asyncio.sleep(0)
    assert len(inside) == 10
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("mode", [LaneMode.PAUSED, LaneMode.DRAINING])
async def test_a_lane_that_takes_nothing_gets_nothing(engine, mode):
    gate = Gate(engine, lambda: 1000, asyncio.get_running_loop().time)
    engine.picture = None
    engine.modes[next(lane for lane in engine.modes if lane.name == "BATCH")] = mode
    inside, tasks = enter(gate, 5)
    await gate.poll()
    await asyncio.sleep(0)
    assert (len(inside), gate.wants_more(0)) == (0, False)
    engine.modes = dict.fromkeys(engine.modes, LaneMode.OPEN)
    await gate.poll()
    await asyncio.sleep(0)
    assert len(inside) == 5
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_full_lane_holds_up_one_model_and_then_lets_as_many_ask_as_before():
    window, order, asking = LimitWindow(), iter(range(1000)), {"tiny": 0, "small": 0}

    async def line(model):
        async with window.attempt(model, (next(order),)):
            asking[model] += 1
            await asyncio.Event().wait()

    window.lane_was_full("tiny", 0.05)
    assert window.is_limited and window.seconds_to_next_of("tiny") > 0
    assert window.seconds_to_next_of("small") == 0
    tasks = [asyncio.create_task(line(model)) for model in asking for _ in range(FIRST_WINDOW)]
    await until(lambda: asking["small"] == FIRST_WINDOW)
    assert asking["tiny"] == 0 or window.seconds_to_next_of("tiny") == 0
    await until(lambda: asking["tiny"] == FIRST_WINDOW)
    assert not window.is_limited
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
