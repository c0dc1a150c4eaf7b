"""What the bench client sends: lanes as they are written, arrivals, lengths, models, traces."""

import math
import random
import statistics
from collections import Counter
from itertools import islice

import pytest

from lab.bench.document import Settings
from lab.bench.plan import Plan, arrivals
from lab.bench.spec import LaneSpec, LatencyObjective, Lengths, SpecError, parse_lane, parse_lengths, parse_range
from lab.traffic.traces import Arrival


def test_a_lane_is_read():
    spec = parse_lane("interactive:rate=0.7,n=60,in=24-96,out=16,start=3s,ttft=0.5,itl=100ms")
    assert spec == LaneSpec(
        "interactive",
        60,
        0.7,
        start=3.0,
        inputs=Lengths(24, 96),
        outputs=Lengths(16, 16),
        slo=LatencyObjective(0.5, 0.1),
    )
    assert parse_lane("batch:n=4, cv=2") == LaneSpec("batch", 4, cv=2.0)
    assert not parse_lane("default").slo


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("interactiv:n=1", "known are interactive, batch, default"),
        ("batch:rat=1", "did you mean rate"),
        ("batch:n", "n wants a value|'n' wants a value"),
        ("batch:n=many", "batch: n: cannot read 'many'"),
        ("batch:n=0", "n must be positive"),
        ("batch:n=1,rate=-1", "rate must be positive"),
        ("batch:n=1,in=9-3", "in order"),
        ("batch:n=1,ttft=-1s", "must not be negative"),
        ("batch:n=2,start=inf", "start: a time must be finite"),
        ("batch:n=2,n=3", "given twice"),
        ("batch:n=2,rate=nan", "rate must be positive"),
        ("batch:n=2,cv=inf", "cv must be positive"),
        ("batch:n=2,cv=1e-200", "cv must be positive"),
        ("batch:n=2,in=5~1e200", "in: the CV of lengths"),
    ],
)
def test_a_wrong_lane_is_told(text, words):
    with pytest.raises(SpecError, match=words):
        parse_lane(text)


@pytest.mark.parametrize(
    ("lanes", "words"),
    [
        (["batch"], "give n=..., rate=... or --trace"),
        (["interactive:rate=1"], "would never end"),
        (["batch:n=1", "batch:n=2"], "given twice"),
    ],
)
def test_a_plan_without_end_or_beginning_is_refused(lanes, words):
    with pytest.raises(SpecError, match=words):
        Plan(("m",), tuple(map(parse_lane, lanes)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"models": ("a", "", "b")}, "models"),
        ({"models": ()}, "models"),
        ({"zipf": math.nan}, "zipf"),
        ({"rate_scale": math.nan}, "rate_scale"),
        ({"duration": math.inf}, "duration"),
        ({"duration": 1e12}, "more than"),
    ],
)
def test_a_plan_out_of_range_is_refused(change, words):
    with pytest.raises(SpecError, match=words):
        Plan(**{"models": ("m",), "lanes": (LaneSpec("batch", rate=1.0),), "duration": 9.0} | change)


def test_a_timeout_ends():
    with pytest.raises(SpecError, match="timeout"):
        Settings("http://x", Plan(("m",), (LaneSpec("batch", 1),)), timeout_s=math.nan)


def test_ranges():
    assert parse_range("10-20") == (10, 20)
    for text in ("10", "20-10", "a-b", "5-5000000000"):
        with pytest.raises(SpecError):
            parse_range(text)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_arrivals_have_their_rate_and_variation(cv):
    times = list(islice(arrivals(LaneSpec("batch", rate=5.0, cv=cv), random.Random(1)), 40_000))
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.06)


def test_without_a_rate_all_arrive_at_once():
    assert list(arrivals(LaneSpec("batch", 3, start=2.0), random.Random(0))) == [2.0, 2.0, 2.0]


def test_lengths_have_their_distribution():
    rng = random.Random(0)
    uniform = [parse_lengths("24-26").draw(rng) for _ in range(1000)]
    assert set(uniform) == {24, 25, 26}
    drawn = [parse_lengths("600~1.5").draw(rng) for _ in range(100_000)]
    assert statistics.mean(drawn) == pytest.approx(600, rel=0.05)
    assert statistics.stdev(drawn) / statistics.mean(drawn) == pytest.approx(1.5, rel=0.1)
    assert parse_lengths("16").draw(rng) == 16


def test_the_same_seed_is_the_same_work_and_lanes_do_not_disturb_each_other():
    interactive, batch = parse_lane("interactive:rate=1,n=20"), parse_lane("batch:n=5")
    both = Plan(("a", "b"), (interactive, batch), seed=7).items()
    alone = Plan(("a", "b"), (interactive,), seed=7).items()
    assert [item for item in both if item.lane == "interactive"] == alone
    assert [item.at for item in both] == sorted(item.at for item in both)
    assert Plan(("a", "b"), (interactive,), seed=8).items() != alone


def test_prompts_can_change_alone():
    lane = parse_lane("interactive:rate=1,n=20,in=10-99,out=1-9")
    first, second = (Plan(("a",), (lane,), prompts=prompts).items() for prompts in (0, 1))
    shape = [(item.at, len(item.prompt), item.max_tokens) for item in first]
    assert shape == [(item.at, len(item.prompt), item.max_tokens) for item in second]
    assert [item.prompt for item in first] != [item.prompt for item in second]
    assert all(1000 <= token < 30_000 for item in first for token in item.prompt)


def test_models_take_turns_or_follow_zipf():
    models = ("a", "b", "c")
    lane = parse_lane("batch:n=3000,in=1")
    turns = Counter(item.model for item in Plan(models, (lane,)).items())
    assert turns == {"a": 1000, "b": 1000, "c": 1000}
    drawn = Counter(item.model for item in Plan(models, (lane,), zipf=1.0).items())
    for rank, model in enumerate(models, 1):
        assert drawn[model] / 3000 == pytest.approx((1 / rank) / (1 + 1 / 2 + 1 / 3), abs=0.03)


def test_a_trace_is_replayed_faster_bounded_and_cut():
    trace = [Arrival(float(second), 100 * second + 1, 10) for second in range(10)]
    plan = Plan(
        ("a",), (parse_lane("interactive:in=50-500,out=1-4,start=1s"),), trace="f", rate_scale=2.0, duration=4.0
    )
    items = plan.items(trace)
    assert [item.at for item in items] == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert [len(item.prompt) for item in items] == [50, 101, 201, 301, 401, 500, 500]
    assert {item.max_tokens for item in items} == {4}


def test_a_trace_may_drive_one_lane_beside_another():
    plan = Plan(("a",), (parse_lane("interactive"), parse_lane("batch:n=2")), trace="f")
    assert Counter(item.lane for item in plan.items([Arrival(1.0, 5, 5)])) == {"interactive": 1, "batch": 2}


def test_equal_blocks_are_equal_prefixes():
    trace = [Arrival(0.0, 1100, 1, blocks=(1, 2, 3)), Arrival(0.0, 600, 1, blocks=(1, 9)), Arrival(0.0, 600, 1)]
    first, second, third = (item.prompt for item in Plan(("a",), (parse_lane("default"),), trace="f").items(trace))
    assert len(first) == 1100
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:600]
    assert third[:512] != first[:512]


def test_warm_up_is_of_the_same_shapes_and_shares_no_prompt():
    plan = Plan(("a", "b"), (parse_lane("interactive:rate=1,n=9,in=8"), parse_lane("batch:n=9,in=20")))
    warm = plan.warmup(6)
    assert len(warm) == 6
    assert all(item.at == 0 for item in warm)
    assert Counter(item.lane for item in warm) == {"interactive": 3, "batch": 3}
    assert {len(item.prompt) for item in warm} == {8, 20}
    assert not {tuple(item.prompt) for item in warm} & {tuple(item.prompt) for item in plan.items()}
