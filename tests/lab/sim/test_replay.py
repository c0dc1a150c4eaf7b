"""Workloads in real time on an engine without a model, and devices that are described by what was measured."""

import json
from random import Random

import pytest

from engine.core.config import CoreConfig
from engine.executor.fake import FakeExecutor
from lab.devices.cost import LinearCost, StepWork
from lab.devices.device import FOLDER, find_device
from lab.plans.measure import DECODED, Lesson, cost_of, lessons, loops
from lab.sim.replay import RealEngine, replay
from lab.traffic.synthetic import Sizes
from lab.traffic.traces import Arrival
from lab.traffic.workload import Backlog, Workload

CORE = CoreConfig(num_pages=200, host_pages=50, max_seqs=4, token_budget=64, max_model_len=512)


@pytest.fixture
def real():
    executor = FakeExecutor()
    return RealEngine(CORE, executor, executor.vocab_size)


def test_every_request_of_a_trace_ends_and_every_step_is_seen(real):
    trace = [Arrival(0.01 * number, 20 + number, 5) for number in range(6)]
    steps = []
    report = replay(real, Workload(trace, trace[-1].time), seen=lambda work, seconds: steps.append((work, seconds)))
    lane = report.lanes["interactive"]
    assert (lane.finished, lane.generated_tokens) == (6, 30)
    assert report.seconds >= trace[-1].time
    assert sum(work.prefill_tokens for work, _ in steps) == lane.prompt_tokens == sum(20 + n for n in range(6))
    assert all(seconds > 0 for _, seconds in steps) and len(steps) == report.steps


def test_a_backlog_is_aborted_at_its_end_and_leaves_the_executor_empty(real):
    workload = Workload([], 0.1, Backlog(3, Sizes(8, 40), Sizes(4, 400)))
    first, second = (replay(real, workload) for _ in range(2))
    assert first.lanes["batch"].requests >= 3 and second.lanes["batch"].generated_tokens
    assert not real.executor.sequences


@pytest.mark.parametrize("chosen", [1.0, 0.1])
def test_what_a_device_costs_is_learned_from_its_steps(chosen, tmp_path):
    """The last step of all is an outlier, from which little is learned."""
    prices = 0.01, 4e-4, 3e-4, 3e-6, 1e-6, 1e-3, 6e-6, 1e-4, 8e-3
    true = LinearCost(prices, ((32, 5e-4),), chosen, 0.02 if chosen < 1 else 0.0)
    rng, lesson = Random(1), Lesson(chosen)
    works = []
    for _ in range(600):
        prefill, decodes = rng.choice((0, 0, rng.randint(2, 250))), rng.randint(1, 32)
        ranks, adapters = rng.choice((0, 8, 32)), rng.randint(1, 8)
        works.append(
            StepWork(
                prefill,
                decodes,
                decodes * rng.randint(20, 900),
                prefill * rng.randint(1, 500),
                decodes,
                adapters if ranks else 0,
                ranks * adapters,
                ranks * (prefill + decodes),
                rng.choice((0, 0, 16)),
            )
        )
    for work in works:
        lesson.see(work, true.seconds(work) * rng.lognormvariate(0, 0.02))
    lesson.see(works[-1], 40 * true.seconds(works[-1]))
    document = json.loads((FOLDER / "cpu-smollm2.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps(document | {"cost": cost_of(lesson.learned().prices, chosen)}))
    again = find_device(str(tmp_path / "mine.json")).cost
    assert isinstance(again, LinearCost) and again.chosen == chosen
    errors = sorted(abs(again.seconds(work) / true.seconds(work) - 1) for work in works)
    assert errors[len(errors) // 2] < 0.01 and errors[-10] < 0.05


def test_closed_loops_reach_the_maximum_of_sequences_and_fit_into_the_pages():
    sizes = {loop.backlog.size for loop in loops(CORE, 1.0)}
    assert sizes == {1, 2, 4}
    tight = CoreConfig(num_pages=80, host_pages=0, max_seqs=32, token_budget=64, max_model_len=512)
    assert max(loop.backlog.size for loop in loops(tight, 1.0)) == 2
    assert all(loop.backlog.prompt.high + loop.backlog.output.high < 512 for loop in loops(tight, 1.0))


def test_a_third_of_the_loops_mostly_decode_all_sequences_at_the_same_time(real):
    pairs = lessons(real, 0.1)
    assert sum(one.mode.policy == "fcfs" for one, _ in pairs) == len(pairs) // 3
    [attended] = [loop for _, loop in pairs if loop.horizon > 0.2]
    assert (attended.backlog.size, attended.backlog.prompt) == (1, Sizes(447, 447)), "as long as the context allows"
    decoding = [loop for _, loop in pairs if (loop.backlog.prompt, loop.backlog.output) == DECODED]
    assert [(loop.backlog.size, loop.adapters) for loop in decoding] == [(n, a) for n in (1, 2, 4) for a in (0, 8)]
    steps = []
    replay(real, decoding[-2], seen=lambda work, _: steps.append(work))
    assert sum(work.decode_tokens == 4 and not work.prefill_tokens for work in steps) > len(steps) / 2


def test_steps_with_prompts_and_many_tokens_cost_more():
    cost = LinearCost((1.0, 0.1, 0.2, 0, 0, 0, 0, 0.5, 3.0), ((4, 10.0),))
    assert cost.seconds(StepWork(decode_tokens=2)) == pytest.approx(1.4)
    assert cost.seconds(StepWork(prefill_tokens=3, decode_tokens=1)) == pytest.approx(1 + 0.3 + 0.2 + 3)
    assert cost.seconds(StepWork(decode_tokens=6)) == pytest.approx(1 + 1.2 + 20)
    assert cost.seconds(StepWork(pages_copied=4)) == 2.0
