"""The engine's loop and its gRPC service, threads and all, in one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.core.config import CoreConfig
from engine.core.state import EngineState
from engine.core.types import FinishReason, Request, SamplingParams, Submit
from engine.engine import Engine, EngineStopped
from engine.executor.fake import FakeExecutor
from engine.pb import engine_pb2 as pb
from engine.service import EngineService, GatewaySession


class HostExecutor(FakeExecutor):
    """Has a host memory. Steps and loads can be held up."""

    def __init__(self):
        super().__init__()
        self.host = set()
        self.in_load, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.fail = False
        self.step, self.held = threading.Event(), threading.Event()
        self.step.set()

    def execute(self, plan):
        if not self.step.is_set():
            self.held.set()
            self.step.wait(10)
        if self.fail:
            raise ValueError("a bug")
        assert {load.adapter for load in plan.loads} <= self.host, "an adapter is planned that host memory has not"
        return super().execute(plan)

    def load_host(self, path):
        host = super().load_host(path)
        self.host.add(host.id)
        self.in_load.set()
        self.go_on.wait(10)
        return host

    def drop_host(self, adapter):
        self.host.discard(adapter)


class Running:
    """An engine whose loop runs in a thread of its own."""

    def __init__(self):
        self.executor = HostExecutor()
        config = CoreConfig(num_pages=1000, block_size=4, max_model_len=2000)
        self.engine = Engine(EngineState.create(config), self.executor)
        self.events = []
        self.pool = ThreadPoolExecutor(4)
        self.loop = self.pool.submit(self.engine.run, self.events.extend)

    def submit(self, name, adapter, max_tokens=1900):
        params = SamplingParams(max_tokens, ignore_eos=True)
        self.engine.inbox.put(Submit(Request(name, (1, 2, 3), params, adapter)))

    def ends(self):
        return {event.request_id: event.finish_reason for event in self.events if event.finish_reason}

    def hold_step(self):
        self.executor.step.clear()
        self.engine.inbox.wake()
        assert self.executor.held.wait(10)


@pytest.fixture
def running():
    running = Running()
    yield running
    for event in (running.executor.step, running.executor.go_on):
        event.set()
    running.engine.stop()
    running.pool.shutdown()


def test_an_adapter_loaded_while_it_is_unloaded_stays_whole(running):
    engine, executor = running.engine, running.executor
    adapter = engine.load_adapter("a").id
    executor.go_on.clear()
    executor.in_load.clear()
    load = running.pool.submit(engine.load_adapter, "a")
    assert executor.in_load.wait(10)
    unload = running.pool.submit(engine.unload_adapter, adapter, 0.0)
    with pytest.raises(TimeoutError):
        unload.result(0.3)
    executor.go_on.set()
    assert load.result(10).id == adapter
    assert unload.result(10) == 0
    running.submit("r", adapter, 1)
    assert engine.inspect(lambda state: adapter in state.adapters) and adapter in executor.host


def test_loading_an_adapter_again_ends_its_unloading(running):
    engine = running.engine
    adapter = engine.load_adapter("a").id
    running.submit("old", adapter)
    running.hold_step()
    unload = running.pool.submit(engine.unload_adapter, adapter, 0.0)
    while not engine.inbox._questions:
        pass
    engine.load_adapter("a")
    running.executor.step.set()
    assert unload.result(10) == 0
    assert running.ends().get("old") is not FinishReason.ABORT
    assert engine.inspect(lambda state: not state.adapters[adapter].closing)


def test_an_unload_sees_requests_submitted_just_before_it(running):
    engine = running.engine
    adapter = engine.load_adapter("a").id
    running.hold_step()
    running.submit("just before", adapter)
    unload = running.pool.submit(engine.unload_adapter, adapter, 0.0)
    while not engine.inbox._questions:
        pass
    running.executor.step.set()
    assert unload.result(10) == 1
    assert running.ends() == {"just before": FinishReason.ABORT}


def test_a_loop_that_fails_leaves_nobody_waiting(running):
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
