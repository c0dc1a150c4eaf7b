"""The search for the cheapest plan, among engines that split requests and others that do not."""

import pytest

from engine.core.config import LaneGoals
from gateway.routing.split import SplitMode
from lab.devices.links import LINKS
from lab.devices.shapes import find_shape
from lab.plans.planning import Wish, candidates, with_engines
from lab.plans.search import find_plan
from lab.plans.split import split_candidates
from lab.traffic.analysis import analyze
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import Sizes

SCENARIO = Scenario(rate=4.0, prompt=Sizes(100, 300), output=Sizes(10, 20), seconds=5.0)
NVLINK = LINKS["nvlink"]


def plan(engines, split):
    """Return the plan for so many engines that do not split requests, and two that do."""
    wish = Wish(find_shape("llama-3.1-8b"), analyze(SCENARIO.workload().trace), 4.0, LaneGoals(0.5, 0.1))
    [one] = candidates(wish, ["h100"], ["bf16"], {})[:1]
    found = [with_engines(one, wish, engines), *split_candidates([one], wish, NVLINK)]
    shown = []
    done = find_plan(found, wish, SCENARIO, split, NVLINK, lambda name: shown.append(name) or (lambda _: None))
    return done, shown


def test_the_next_candidates_are_compared_if_the_first_one_grows():
    """A slow device that arithmetic finds cheapest needs more engines than cost as much as a fast one."""
    goals, shown = LaneGoals(0.5, 0.3), []
    wish = Wish(find_shape("llama-3.1-8b"), analyze(SCENARIO.workload().trace), 80.0, goals)
    slow, fast, other = (
        with_engines(candidates(wish, [name], ["int4"], {name: price})[0], wish, 1)
        for name, price in (("l4", 1.0), ("h100", 1.5), ("a100", 9.0))
    )

    def best(*found):
        shown.clear()
        return find_plan(
            found, wish, SCENARIO, SplitMode.NEVER, NVLINK, lambda name: shown.append(name) or (lambda _: None)
        )

    alone = best(slow)
    assert alone.is_enough and alone.candidate.engines >= 2
    grown = [f"{count} engines" for count in range(1, alone.candidate.engines + 1)]
    assert shown == grown
    cheaper = best(slow, fast, other)
    assert cheaper.is_enough and (cheaper.candidate.accelerator, cheaper.candidate.engines) == ("h100", 1)
    assert shown == [*grown, "1 engines"], "the third is dearer than what was found"


@pytest.mark.parametrize(
    ("engines", "split", "prefill", "tried"),
    [
        (3, SplitMode.AUTO, 1, ["3 engines", "1 prefill + 1 decode"]),
        (2, SplitMode.AUTO, 0, ["2 engines"]),
        (1, SplitMode.ALWAYS, 1, ["1 prefill + 1 decode"]),
    ],
)
def test_requests_are_split_if_that_is_cheaper_or_asked_for(engines, split, prefill, tried):
    best, shown = plan(engines, split)
    assert best.is_enough and best.candidate.prefill == prefill
    assert shown == tried
