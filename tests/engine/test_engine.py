"""The engine's loop and its gRPC service, threads and all, in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.core.config import CoreConfig
from engine.core.messages.commands import Submit
from engine.core.messages.moves import CancelFetch, FetchPages
from engine.core.messages.requests import FinishReason, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.executor.fake import FakeExecutor
from engine.inbox import EngineStopped
from engine.pb import engine_pb2 as pb
from engine.rpc.service import EngineService, GatewaySession


class Mover:
    """Keeps its orders, and carries out none."""

    def __init__(self):
        self.orders = []

    def take(self, order):
        self.orders.append(order)


class HostExecutor(FakeExecutor):
    """Has a host memory. Steps and loads can be held up."""

    def __init__(self, overlaps=False):
        super().__init__(overlaps=overlaps)
        self.host = set()
        self.loading = []
        self.in_load, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.fail = False
        self.step, self.held = threading.Event(), threading.Event()
        self.step.set()

    def submit(self, plan):
        assert {load.adapter_hash for load in plan.adapters.loads} <= self.host, (
            "an adapter is planned that host memory has not"
        )
        return super().submit(plan)

    def compute(self, plan):
        if not self.step.is_set():
            self.held.set()
            self.step.wait(10)
        if self.fail:
            raise ValueError("a bug")
        return super().compute(plan)

    def fetch(self, plan):
        self.host.difference_update(plan.adapters.dropped)
        self.host.update(fetch.adapter_hash for fetch in plan.adapters.fetches)
        super().fetch(plan)

    def load_host(self, path, claim):
        def slow_claim(host):
            self.loading.append(path)
            self.in_load.set()
            self.go_on.wait(10)
            if granted := claim(host):
                self.host.add(host.adapter_hash)
            return granted

        return super().load_host(path, slow_claim)


class Running:
    """An engine whose loop runs in a thread of its own."""

    def __init__(self, overlaps):
        self.executor = HostExecutor(overlaps)
        config = CoreConfig(num_pages=1000, block_size=4, max_model_len=2000)
        self.engine = Engine(EngineState.create(config), self.executor)
        self.events = []
        self.pool = ThreadPoolExecutor(4)
        self.loop = self.pool.submit(self.engine.run, self.events.extend)

    def submit(self, name, adapter_hash, max_tokens=1900):
        params = SamplingParams(max_tokens, ignore_eos=True)
        self.engine.inbox.put(Submit(Request(name, (1, 2, 3), params, adapter_hash)))

    def ends(self):
        return {event.request_id: event.finish_reason for event in self.events if event.finish_reason}

    def hold_step(self):
        self.executor.step.clear()
        self.engine.inbox.wake()
        assert self.executor.held.wait(10)


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def running(request):
    running = Running(request.param)
    yield running
    for event in (running.executor.step, running.executor.go_on):
        event.set()
    running.engine.stop()
    running.pool.shutdown()


def test_an_adapter_loaded_while_it_is_unloaded_stays_whole(running):
    engine, executor = running.engine, running.executor
    adapter_hash = engine.load_adapter("a").adapter_hash
    executor.go_on.clear()
    executor.in_load.clear()
    load = running.pool.submit(engine.load_adapter, "a")
    assert executor.in_load.wait(10)
    assert engine.unload_adapter(adapter_hash, 0.0) == 0
    assert engine.inspect(lambda state: dict(state.adapters)) == {} and executor.host == set()
    executor.go_on.set()
    assert load.result(10).adapter_hash == adapter_hash
    running.submit("r", adapter_hash, 1)
    while "r" not in running.ends():
        engine.inspect(lambda state: None)
    assert running.ends()["r"] is FinishReason.LENGTH and executor.host == {adapter_hash}


def test_a_question_no_caller_waits_for_any_more_is_not_asked(running):
    running.submit("r", None)
    running.hold_step()
    with pytest.raises(TimeoutError):
        running.engine.inspect(lambda state: running.executor.host.add("late"), timeout=0.05)
    running.executor.step.set()
    running.engine.inspect(lambda state: None)
    assert running.executor.host == set()


def test_operators_see_the_state_while_a_step_is_computed(running):
    service = EngineService(running.engine, pb.EngineInfo())
    adapter_hash = running.engine.load_adapter("a").adapter_hash
    running.submit("r", adapter_hash)
    running.hold_step()
    told = service.Stats(pb.StatsRequest(), None)
    assert [(item.adapter, item.running) for item in told.adapters] == [(adapter_hash, 1)]
    assert running.engine.look(lambda state: not state.steps.in_flight.is_empty), "it is being computed still"


def test_loading_an_adapter_again_ends_its_unloading(running):
    engine = running.engine
    adapter_hash = engine.load_adapter("a").adapter_hash
    running.submit("old", adapter_hash)
    running.hold_step()
    unload = running.pool.submit(engine.unload_adapter, adapter_hash, 0.0)
    while not engine.inbox._questions:
        pass
    load = running.pool.submit(engine.load_adapter, "a")
    while len(engine.inbox._questions) < 2:
        pass
    running.executor.step.set()
    assert load.result(10).adapter_hash == adapter_hash
    assert unload.result(10) == 0
    assert running.ends().get("old") is not FinishReason.ABORT
    assert engine.inspect(lambda state: not state.adapters[adapter_hash].closing)


def test_one_folder_is_read_once_at_a_time_and_different_ones_side_by_side(running):
    engine, executor = running.engine, running.executor
    executor.go_on.clear()
    loads = [running.pool.submit(engine.load_adapter, path) for path in ("a", "a", "b")]
    while len(executor.loading) < 2:
        pass
    assert sorted(executor.loading) == ["a", "b"]
    executor.go_on.set()
    assert len({load.result(10).adapter_hash for load in loads}) == 2
    assert sorted(executor.loading) == ["a", "a", "b"]
    assert engine._folders._turns == {}


def test_an_adapter_too_large_for_host_memory_is_refused_with_what_to_do(running):
    running.executor.adapter_bytes = 3 << 30
    with pytest.raises(ValueError, match=r"3072.0 MiB of host memory.*raise engine\.host_adapter_gb"):
        running.engine.load_adapter("large")
    assert running.engine.inspect(lambda state: dict(state.adapters)) == {}


def test_pins_are_refused_with_the_reason(running):
    engine = running.engine
    adapter_hash = engine.load_adapter("a").adapter_hash
    engine.pin_adapter(adapter_hash, True)
    engine.pin_adapter(adapter_hash, True)
    assert engine.inspect(lambda state: state.adapters.held.pinned_pages) == 2
    with pytest.raises(ValueError, match="unknown is not loaded"):
        engine.pin_adapter("unknown", True)
    engine.pin_adapter(adapter_hash, False)
    assert engine.inspect(lambda state: state.adapters.held.pinned_pages) == 0


def test_questions_are_answered_though_no_thread_runs_the_loop():
    engine = Engine(EngineState.create(CoreConfig(num_pages=10)), FakeExecutor())
    adapter_hash = engine.load_adapter("a").adapter_hash
    assert engine.inspect(lambda state: list(state.adapters)) == [adapter_hash]


def test_an_unload_sees_requests_submitted_just_before_it(running):
    engine = running.engine
    adapter_hash = engine.load_adapter("a").adapter_hash
    running.hold_step()
    running.submit("just before", adapter_hash)
    unload = running.pool.submit(engine.unload_adapter, adapter_hash, 0.0)
    while not engine.inbox._questions:
        pass
    running.executor.step.set()
    assert unload.result(10) == 1
    assert running.ends() == {"just before": FinishReason.ABORT}


def test_a_loop_that_fails_leaves_no_caller_waiting(running):
    running.hold_step()
    asked = running.pool.submit(running.engine.inspect, lambda state: "answered")
    while not running.engine.inbox._questions:
        pass
    running.executor.fail = True
    running.executor.step.set()
    with pytest.raises(ValueError, match="a bug"):
        running.loop.result(10)
    assert asked.result(10) == "answered"
    with pytest.raises(EngineStopped):
        running.engine.inspect(lambda state: None)


def test_a_command_that_outlives_its_session_is_dropped():
    engine = Engine(EngineState.create(CoreConfig(num_pages=10)), FakeExecutor())
    service, session = EngineService(engine, pb.EngineInfo()), GatewaySession()
    service._abandon(session)
    service._take(session, pb.Command(submit=pb.Submit(request_id="late", prompt=[1])))
    assert engine.step() == []
    assert engine.state.sequences == {}


def test_a_session_that_ends_ends_the_fetches_that_it_began():
    engine = Engine(EngineState.create(CoreConfig(num_pages=99, block_size=4, host_pages=99)), FakeExecutor())
    service, session = EngineService(engine, pb.EngineInfo()), GatewaySession()
    mover = Mover()
    engine.connect(mover)

    def take(**command):
        service._take(session, pb.Command(**command))
        engine.step()

    def submit(name, number):
        source = pb.KvSource(address="unix:/other", seconds=60.0, computes=True)
        return pb.Submit(request_id=name, prompt=[number] * 9, params={"max_tokens": 4}, kv_source=source)

    for number, name in enumerate(("dropped", "begun", "awaited")):
        take(fetch_kv=submit(name, number))
    take(abort=pb.Abort(request_id="dropped"))
    take(submit=submit("begun", 1))
    service._abandon(session)
    take(fetch_kv=submit("late", 3))
    engine.step()
    assert [type(order) for order in mover.orders] == [FetchPages] * 3 + [CancelFetch] * 3
    assert [order.id for order in mover.orders] == [1, 2, 3, 1, 2, 3] and not engine.state.sequences


def test_a_session_that_ends_late_leaves_what_the_gateway_submitted_in_its_next_one():
    engine = Engine(EngineState.create(CoreConfig(num_pages=99, block_size=4, host_pages=99)), FakeExecutor())
    service, broken, present = EngineService(engine, pb.EngineInfo()), GatewaySession(), GatewaySession()
    engine.connect(Mover())
    rest = pb.Submit(request_id="rest", prompt=[1] * 9, params={"max_tokens": 4})
    rest.kv_source.MergeFrom(pb.KvSource(address="unix:/other", seconds=60.0, computes=True))
    service._take(broken, pb.Command(fetch_kv=rest))
    service._take(present, pb.Command(submit=rest))
    service._abandon(broken)
    engine.step()
    assert list(engine.state.sequences) == ["rest"]


def test_a_caller_that_looks_sees_a_whole_state(running):
    """While steps are planned, computed and taken up, and adapters come and go beside them."""
    engine, adapters = running.engine, [running.engine.load_adapter(path).adapter_hash for path in "ab"]
    seen = running.pool.submit(lambda: [engine.look(violations) for _ in range(200)])
    for number in range(40):
        running.submit(f"r{number}", (None, *adapters)[number % 3], 5 + number)
        if number % 10 == 9:
            running.pool.submit(engine.unload_adapter, adapters[number % 2], 0.0).result(10)
            running.pool.submit(engine.load_adapter, "ab"[number % 2]).result(10)
    while len(running.ends()) < 40:
        assert engine.look(violations) == []
    assert seen.result(10) == [[]] * 200
    assert engine.inspect(leftovers) == []


def test_a_step_that_fails_beside_another_ends_the_loop_and_breaks_nothing(running):
    running.submit("a", None)
    running.hold_step()
    running.executor.fail = True
    running.executor.step.set()
    with pytest.raises(ValueError, match="a bug"):
        running.loop.result(10)
    assert running.engine.look(violations) == []
    assert running.engine.look(lambda state: list(state.sequences)) == ["a"], "the caller was not told that it ended"
    assert running.ends() == {}


def test_what_is_under_way_when_the_loop_stops_is_not_lost(running):
    """The next step completes it, so that every request ends exactly once with all its tokens."""
    running.executor.step.clear()
    running.submit("a", None, 30)
    running.hold_step()
    for name in "bc":
        running.submit(name, None, 30)
    running.engine.stop()
    running.executor.step.set()
    running.loop.result(10)
    assert running.engine.look(violations) == [] and running.ends() == {}
    assert len(running.engine.state.steps.under_way) == running.executor.overlaps
    while running.engine.state.has_work or running.engine.inbox._commands:
        running.events.extend(running.engine.step())
    for name in "abc":
        mine = [event for event in running.events if event.request_id == name]
        assert [event.finish_reason for event in mine if event.finish_reason] == [FinishReason.LENGTH]
        assert sum(len(event.tokens) for event in mine) == 30
    assert leftovers(running.engine.state) == []
