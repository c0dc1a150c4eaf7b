"""The routing benchmark: its tasks, and the arithmetic of policies."""

import numpy as np
import pytest

from benchmarks.routing import ANY_LOGPROB, RATIO, Recorded, _cascade, _outcome, _with_vector, recovered
from benchmarks.routing_decision import random_router
from benchmarks.routing_task import EASY, tasks
from gateway.virtual_models.router import decode_router


def test_tasks_are_different_seeded_and_have_right_answers():
    made = tasks(60, 1, 0.5)
    assert made == tasks(60, 1, 0.5) != tasks(60, 2, 0.5) and len({task.prompt for task in made}) == 60
    for task in made:
        assert task.is_right(f" {task.answer} ") and not task.is_right("nonsense")
    assert {task.kind for task in tasks(60, 1, 0.0)} <= {"pick", "json", "sum"} and len(EASY) == 3


def recorded(confidence):
    right = {"small": np.array([1.0, 1.0, 0.0, 0.0]), "large": np.ones(4)}
    costs = {"small": np.full(4, 20.0), "large": np.full(4, 20.0 * RATIO)}
    return Recorded(tasks(4, 1, 0.5), right, costs, np.full(4, 10.0), np.array(confidence), np.zeros((4, 1)))


def test_a_threshold_comes_from_the_training_prompts_and_figures_from_the_others():
    known, unseen = recorded([-0.1, -0.2, -0.8, -0.9]), recorded([-0.1, -0.6, -0.3, -0.9])
    outcome = _outcome(known, unseen, known.confidence, unseen.confidence, _cascade, ANY_LOGPROB)
    assert known.unit == 200 and outcome.points[0].cost == pytest.approx(0.1)
    assert outcome.chosen.threshold <= -0.2, "at 0.47, the known prompts allow one escalation"
    assert outcome.chosen.cost == pytest.approx(0.1 + (1 - outcome.chosen.small_share))
    assert recovered(outcome, 0.5, 1.0) == pytest.approx(2 * outcome.chosen.quality - 1)
    small, large = _with_vector(known)
    assert small.costs.tolist() == [30.0] * 4 and large.costs.tolist() == [210.0] * 4


def test_the_router_of_the_decisions_is_one():
    assert decode_router(random_router(8)).file.dimensions == 8
