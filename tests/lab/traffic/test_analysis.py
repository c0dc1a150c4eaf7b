"""Figures of recorded traffic, against counting by hand, a cache that is really run, and the simulator."""

import math
import random
from collections import Counter, OrderedDict

import pytest

from engine.core.config import CoreConfig
from engine.core.messages.requests import Lane
from lab.devices.capacity import Demand, mixed_step_s, most_seqs, prefill_s, rate_within, serve
from lab.devices.device import find_device
from lab.plans.advice import advise, round_up
from lab.plot import draw_traffic, tokens_label
from lab.sim.run import Setup, simulate
from lab.traffic.analysis import Spread, analyze, fit_zipf
from lab.traffic.reuse import measure_reuse
from lab.traffic.synthetic import Sizes, arrivals, with_adapters
from lab.traffic.traces import BLOCK_TOKENS, Arrival
from lab.traffic.workload import Workload


def test_lengths():
    spread = Spread.of([1, 2, 3, 4, 5, 100])
    assert (spread.p50, spread.p90, spread.most) == (3, 100, 100)
    assert spread.bins == {1: 1, 2: 1, 4: 2, 8: 1, 128: 1}
    assert spread.mean == pytest.approx(115 / 6)


def test_arrivals():
    regular = analyze([Arrival(float(second), 10, 5) for second in range(121)])
    assert (regular.rate, regular.cv) == (1.0, 0.0)
    assert regular.busiest == 1.0
    crowd = [Arrival(100 + number / 10, 1, 1) for number in range(100)]
    busy = analyze([Arrival(0.0, 1, 1), *crowd, Arrival(300.0, 1, 1)])
    assert busy.busiest == pytest.approx(100 / 60)
    bursty = analyze(arrivals(20, 500, Sizes(1, 9), Sizes(2, 2), cv=3.0))
    assert bursty.cv == pytest.approx(3.0, rel=0.15)


def test_arrivals_all_at_once_have_no_rate():
    found = analyze([Arrival(0.0, 10, 5, lane=Lane.BATCH)] * 3)
    assert (found.rate, found.busiest, found.cv, found.lanes) == (None, None, None, {"batch": 3})
    assert analyze([Arrival(0.0, 1, 1), Arrival(1e-320, 1, 1)]).busiest is None, "it would be infinite"
    device = find_device("h100-8b")
    advice = advise(found, device, CoreConfig(**device.engine))
    assert advice.steady is None
    assert [setting.name for setting in advice.settings] == ["engine.max_model_len"]


def test_lanes_and_tenants_by_their_requests():
    trace = [Arrival(0.0, 1, 1, "a"), Arrival(1.0, 1, 1, "b", Lane.BATCH), Arrival(2.0, 1, 1, "b")]
    found = analyze(trace)
    assert (list(found.tenants), found.lanes) == (["b", "a"], {"interactive": 2, "batch": 1})


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.2, 2.0])
def test_the_exponent_of_a_zipf_law_is_found_again(exponent):
    counts = [round(1e6 * rank**-exponent) for rank in range(1, 201)]
    assert fit_zipf(counts) == pytest.approx(exponent, abs=0.01)


def test_adapters():
    drawn = analyze(with_adapters([Arrival(n / 10, 1, 1) for n in range(20_000)], 50, 1.0))
    assert drawn.popularity.adapters == 50
    assert drawn.popularity.zipf == pytest.approx(1.0, abs=0.03)
    one, few = Arrival(0.0, 1, 1, adapter=3), [Arrival(1000.0 + n, 1, 1, adapter=n % 2) for n in range(8)]
    found = analyze([one, *few, Arrival(1010.0, 1, 1)]).popularity
    assert found.working == {60.0: 2, 600.0: 2}
    assert (found.adapters, found.share, found.first, found.zipf > 0) == (3, 0.9, 4 / 9, True)
    assert analyze([one]).popularity.zipf == 0.0


def cached_share(trace, blocks):
    """Run a cache of so many blocks that forgets the least recently used one; return the share of tokens found."""
    cache, found = OrderedDict(), 0
    for arrival in trace:
        is_prefix = True
        for index, block in enumerate(arrival.blocks):
            is_prefix = is_prefix and block in cache
            if is_prefix:
                found += max(0, min(BLOCK_TOKENS, arrival.prompt_tokens - index * BLOCK_TOKENS))
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > blocks:
                cache.popitem(last=False)
    return found / sum(arrival.prompt_tokens for arrival in trace)


def test_what_a_prefix_cache_of_any_size_finds():
    """Conversations that grow turn by turn, in turns that mix."""
    rng, trace, turns = random.Random(3), [], Counter()
    for time in range(400):
        chat = rng.randrange(30)
        turns[chat] += 1
        blocks = tuple(chat * 1000 + index for index in range(turns[chat]))
        trace.append(Arrival(float(time), len(blocks) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS), 1, blocks=blocks))
    reuse = measure_reuse(trace)
    assert reuse.share == cached_share(trace, math.inf) > 0.5
    for size, share in reuse.curve.items():
        assert share == pytest.approx(cached_share(trace, size // BLOCK_TOKENS))
    assert reuse.share_with(1) == 0.0
    assert reuse.share_with(10**9) == pytest.approx(reuse.share)
    assert reuse.curve[reuse.tokens_for(0.9)] >= 0.9 * reuse.share


def test_what_a_server_found_in_its_cache_is_believed():
    reuse = measure_reuse([Arrival(0.0, 80, 1, cached_tokens=0), Arrival(1.0, 20, 1, cached_tokens=16)])
    assert (reuse.share, reuse.share_with(10)) == (0.16, 0.16)


@pytest.mark.parametrize(("name", "rate", "prompt", "output"), [("h100-8b", 10, 800, 100), ("cpu-smollm2", 1, 100, 40)])
def test_the_arithmetic_agrees_with_the_simulator(name, rate, prompt, output):
    device = find_device(name)
    core = CoreConfig(**device.engine)
    steady = serve(device, core, Demand(prompt, output, prompt + output / 2), rate)
    assert steady.is_enough
    trace = arrivals(rate, 60, Sizes(prompt, prompt), Sizes(output, output))
    report = simulate(Setup(device, core), Workload(trace, trace[-1].time))
    itl = report.lanes["interactive"].tpot.p50
    assert itl == pytest.approx(steady.step_s, rel=0.25)


def test_more_than_a_device_serves():
    device = find_device("h100-8b")
    core = CoreConfig(**device.engine)
    demand = Demand(2000, 100, 2050)
    most = serve(device, core, demand, 1e6)
    assert not most.is_enough and most.seqs == most_seqs(core, demand)
    assert 20 < core.token_budget - 21 * most.seqs + 21 <= 41, "a step computes no more tokens than the budget"
    assert most_seqs(core, Demand(500, 1000, 1000)) == core.max_seqs
    assert most_seqs(core, Demand(5000, 5000, 7500)) == core.num_pages // 469
    assert serve(device, core, demand, 0.9 * most.rate).is_enough
    found = analyze(arrivals(2 * most.rate, 100, Sizes(2000, 2000), Sizes(100, 100)))
    assert any("engines are needed" in note for note in advise(found, device, core).notes)


def test_computed_prompts_attend_to_what_the_prefix_cache_holds():
    device = find_device("h100-8b")
    core = CoreConfig(**device.engine)

    def chunk_s(cached):
        demand = Demand(1000, 100, cached + 1050)
        return mixed_step_s(device, core, demand, 1, 1000) - mixed_step_s(device, core, demand, 1, 0)

    cost = device.cost
    pairs = 1000 * 20_000 * cost.flop_per_attention_pair / (cost.flop_per_s * cost.flop_reached)
    assert chunk_s(20_000) - chunk_s(0) == pytest.approx(pairs)


def test_the_rate_within_a_goal_is_the_highest():
    device = find_device("h100-8b")
    core = CoreConfig(**device.engine)
    demand = Demand(500, 200, 600)
    rate = rate_within(device, core, demand, 0.02)
    assert serve(device, core, demand, 0.999 * rate).step_s <= 0.02 < serve(device, core, demand, 1.01 * rate).step_s
    alone = rate_within(device, core, demand, 1e-9)
    assert serve(device, core, demand, alone).seqs == 1


def test_no_recorded_request_is_longer_than_the_advice():
    device = find_device("h100-8b")
    trace = [Arrival(float(second), 5000 if second == 7 else 100, 20) for second in range(1000)]
    [length] = advise(analyze(trace), device, CoreConfig(**device.engine)).settings
    assert (length.value, length.reason) == (5056, "the longest prompt and answer together, 5,020 tokens")


def test_goals_are_advised_where_those_at_hand_cannot_be_met():
    device = find_device("h100-8b")
    core = CoreConfig(**device.engine)

    def names(prompt):
        found = analyze(arrivals(0.2, 600, Sizes(prompt, prompt), Sizes(100, 100)))
        return [setting.name for setting in advise(found, device, core).settings]

    assert names(1000) == ["engine.max_model_len"]
    assert names(60_000) == ["engine.max_model_len", "lanes.interactive.ttft_s"]
    slow = find_device("cpu-smollm2")
    busy = analyze(arrivals(4, 600, Sizes(1000, 1000), Sizes(100, 100)))
    assert "lanes.interactive.itl_s" in [s.name for s in advise(busy, slow, CoreConfig(**slow.engine)).settings]


def test_a_prompt_in_chunks_takes_longer_than_in_one_piece():
    device = find_device("h100-8b")
    core = CoreConfig(**device.engine)
    assert prefill_s(device, core, 2 * core.token_budget) > 2 * prefill_s(device, core, core.token_budget)
    assert prefill_s(device, core, 100, rank=64) > prefill_s(device, core, 100)


@pytest.mark.parametrize(("value", "rounded"), [(0.1, 0.1), (0.101, 0.11), (0.0612, 0.062), (8.1, 8.1), (123.4, 130.0)])
def test_goals_are_rounded_up(value, rounded):
    assert round_up(value) == rounded


def test_traffic_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    blocks = analyze([Arrival(0.0, 600, 5, blocks=(0, 1)), Arrival(1.0, 600, 5, blocks=(0, 1))])
    draw_traffic({"a": blocks, "b": analyze([Arrival(0.0, 9, 9)])}, tmp_path / "traffic.svg")
    assert "prefix cache" in (tmp_path / "traffic.svg").read_text()
    assert [tokens_label(size) for size in (64, 4096, 1 << 21)] == ["64", "4k", "2M"]
