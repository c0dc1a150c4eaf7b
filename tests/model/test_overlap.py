"""The model's runner with a step behind another: the same tokens, computed from ids that the host does not know yet."""

import pytest
from tiny_adapters import save_adapter

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.requests import FinishReason, Request, SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk, StepPlan
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.submitted import HostClock

BLOCK = 4
CORE = CoreConfig(num_pages=100, block_size=BLOCK, max_seqs=3, max_model_len=64, token_budget=16, eos_token_ids=(2, 3))
PARAMS = {
    "greedy": SamplingParams(20, temperature=0.0, ignore_eos=True, logprobs=2),
    "stopped": SamplingParams(20, temperature=0.0, stop_token_ids=tuple(range(0, 97, 4))),
    "penalised": SamplingParams(20, temperature=0.0, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=0.7),
    "drawn": SamplingParams(20, temperature=1.2, seed=5, top_k=20, ignore_eos=True),
    "patient": SamplingParams(20, temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(0, 97, 3))),
    "aborted": SamplingParams(30, temperature=0.0, ignore_eos=True),
    "adapted": SamplingParams(12, temperature=0.0, ignore_eos=True),
    "last": SamplingParams(1, temperature=0.0, ignore_eos=True),
}


def make_runner(model, overlaps):
    sizes = {"block_size": BLOCK, "num_pages": CORE.num_pages, "max_seqs": CORE.max_seqs, "threads": 1}
    runner = ModelRunner(load(EngineConfig(str(model), dtype="float32", device="cpu", **sizes)))
    assert not runner.overlaps, "a CPU has nothing else to compute with"
    runner.overlaps = overlaps
    runner.loaded.arena.pages[1:] = 1e4
    return runner


def serve(model, adapter, overlaps):
    """({request: its tokens}, {request: how it ended}, steps of every kind)."""
    runner, ticks = make_runner(model, overlaps), iter(range(10**9))
    engine = Engine(EngineState.create(CORE), runner, clock=lambda: next(ticks) / 1000)
    version = engine.load_adapter(str(adapter)).adapter_hash
    for number, (name, params) in enumerate(PARAMS.items()):
        prompt = tuple(range(5 + number, 12 + 3 * number))
        engine.inbox.put(Submit(Request(name, prompt, params, version if name == "adapted" else None)))
    tokens, ends = {name: [] for name in PARAMS}, {}
    while engine.state.has_work or engine.inbox._commands:
        for event in engine.step():
            assert event.request_id not in ends
            tokens[event.request_id] += zip(event.tokens, event.logprobs or (None,) * len(event.tokens), strict=True)
            if event.finish_reason is not None:
                ends[event.request_id] = event.finish_reason
        assert violations(engine.state) == []
        if len(tokens["aborted"]) == 7 and "aborted" not in ends:
            engine.inbox.put(Abort("aborted"))
    assert leftovers(engine.state) == []
    assert len(runner._requests.batch) == 0 and engine.state.counters.steps > 20
    return tokens, ends


def test_a_step_behind_another_chooses_the_tokens_it_would_choose_after_it(tiny_llama, tmp_path):
    save_adapter(tmp_path / "x", 3, seed=3)
    (plain, plain_ends), (ahead, ahead_ends) = (serve(tiny_llama, tmp_path / "x", o) for o in (False, True))
    assert ahead_ends == plain_ends
    assert plain_ends["stopped"] is FinishReason.STOP and plain_ends["aborted"] is FinishReason.ABORT
    for name in PARAMS:
        assert [token for token, _ in ahead[name]] == [token for token, _ in plain[name]], name
    for (_, one), (_, other) in zip(ahead["greedy"], plain["greedy"], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def admission(name, prompt):
    return Admission(name, tuple(prompt), len(prompt), 0, (), None, SamplingParams(9, temperature=0.0))


def chunk(name, start, count, pages=()):
    return ScheduledChunk(name, start, count, pages, samples=True)


def test_what_a_request_leaves_behind_is_not_given_to_another_of_its_name(tiny_llama):
    runner, alone = (make_runner(tiny_llama, overlaps=True) for _ in range(2))
    alone.submit(StepPlan(admitted=(admission("r", [9, 8]),), chunks=(chunk("r", 0, 2, (3,)),)))
    alone.submit(StepPlan(chunks=(chunk("r", 2, 1),)))
    expected = [alone.collect().sampled[0].token for _ in range(2)]
    runner.submit(StepPlan(admitted=(admission("r", [5, 6, 7]),), chunks=(chunk("r", 0, 3, (1,)),)))
    again = StepPlan(released=("r",), admitted=(admission("r", [9, 8]),), chunks=(chunk("r", 0, 2, (3,)),))
    runner.submit(again)
    other = runner.collect().sampled[0].token
    runner.submit(StepPlan(chunks=(chunk("r", 2, 1),)))
    found = [runner.collect().sampled[0].token for _ in range(2)]
    assert other != expected[0]
    assert found == expected
    known = runner._requests.batch.gather([chunk("r", 2, 2)])
    assert known.token_ids.tolist() == expected


def test_steps_are_timed_where_the_host_goes_on(tiny_llama):
    plain, ahead = (make_runner(tiny_llama, overlaps) for overlaps in (False, True))
    for runner in (plain, ahead):
        runner.submit(StepPlan())
    assert plain.collect().seconds is None
    assert ahead.collect().seconds >= 0


def test_a_plan_is_late_if_the_one_before_it_has_been_carried_out(tiny_llama):
    class SlowClock(HostClock):
        passed = False

        def has_passed(self, mark):
            return self.passed

    runner = make_runner(tiny_llama, overlaps=True)
    runner._clock = clock = SlowClock()
    clock.passed = True
    assert not runner.submit(StepPlan(admitted=(admission("r", [9, 8]),), chunks=(chunk("r", 0, 2, (3,)),))).late
    assert runner.submit(StepPlan(chunks=(chunk("r", 2, 1),))).late
    runner.collect()
    clock.passed = False
    assert not runner.submit(StepPlan(chunks=(chunk("r", 3, 1),))).late
    clock.passed = True
    assert runner.submit(StepPlan()).late, "without anything to compute, too"
    for _ in range(3):
        runner.collect()
    assert not runner.submit(StepPlan(released=("r",))).late, "no step was under way before it"


@pytest.mark.parametrize("replayed", [True, False])
def test_a_step_is_late_by_when_its_first_work_reached_the_device(tiny_llama, replayed):
    """A replayed step is launched at once, so that the device must not have finished before the launch returned. Of
    another step, the device computes the first kernels while the host launches the others."""

    class Ends(HostClock):
        """A device that finishes the step under way while the next one is being launched."""

        passed = False

        def has_passed(self, mark):
            return self.passed

    class Launching:
        def find(self, batch):
            return "a rung" if replayed else None

        def compute(self, batch, rung):
            runner._clock.passed = True
            return compute(batch, None)

    runner = make_runner(tiny_llama, overlaps=True)
    compute, runner._clock = runner._steps.compute, Ends()
    runner.submit(StepPlan(admitted=(admission("r", [9, 8]),), chunks=(chunk("r", 0, 2, (3,)),)))
    runner._steps = Launching()
    found = runner.submit(StepPlan(chunks=(chunk("r", 2, 1),)))
    assert found.late is replayed
    assert 0 < found.reached_s < 60
    runner.collect()
    assert runner.collect().launched is not replayed
