"""What the regimes of `make bench-baselines` submit, when, and what is counted."""

import math

import pytest

from benchmarks.baselines import BATCH, MAX_LEN, Job, Live, Padded, Progress, judge, make_jobs
from engine.core.messages.requests import Lane


def job(number, arrival=0.0, prompt=10, output=5, lane=Lane.BATCH):
    return Job(str(number), arrival, lane, tuple(range(1, prompt + 1)), output)


def test_jobs_arrive_as_fast_as_asked():
    jobs = make_jobs(5.0, 400, 1000, seed=2)
    assert jobs[-1].arrival == pytest.approx(80, rel=0.2)
    assert {one.arrival for one in make_jobs(math.inf, 9, 1000, seed=2)} == {0.0}
    assert sum(one.lane is Lane.INTERACTIVE for one in jobs) == pytest.approx(400 / 3, abs=1)
    assert max(one.output for one in jobs) <= 256 and max(len(one.prompt) for one in jobs) <= 160


def test_a_static_batch_waits_for_all_of_it_and_is_padded():
    feed = Padded([job(n, arrival=float(n), prompt=n + 1, output=n + 1) for n in range(BATCH + 2)], math.inf)
    assert feed.due(BATCH - 1.5) == []
    batch = feed.due(BATCH - 1.0)
    assert {len(request.prompt_ids) for request in batch} == {BATCH} == {request.params.max_tokens for request in batch}
    assert batch[0].prompt_ids[-1:] == (1,) and set(batch[0].prompt_ids[:-1]) == {0}
    assert feed.due(100.0) == [], "the next batch waits for this one to end"
    for number in range(BATCH):
        assert feed.progress["0"].tokens == 0
        feed.note(str(number), 1, True, 200.0 + number)
    assert feed.progress["0"] == Progress(200.0 + BATCH - 1, 200.0 + BATCH - 1, 1)
    assert len(feed.due(300.0)) == 2, "no more will arrive"
    assert not feed.is_done


def test_a_dynamic_batch_waits_no_longer_than_its_window():
    feed = Padded([job(0, 1.0), job(1, 1.2), job(2, 9.0)], 0.5)
    assert feed.due(1.4) == []
    assert [request.id for request in feed.due(1.5)] == ["0", "1"]


def test_continuous_batching_submits_at_arrival_and_counts_tokens():
    feed = Live([job(0, 1.0), job(1, 2.0)])
    assert [request.id for request in feed.due(1.5)] == ["0"]
    feed.note("0", 1, False, 1.6)
    feed.note("0", 2, True, 1.9)
    assert feed.progress["0"] == Progress(1.6, 1.9, 3)
    assert not feed.is_done


def test_padding_is_the_share_of_tokens_beyond_the_requests():
    jobs = [job(0, lane=Lane.INTERACTIVE), job(1, prompt=20, output=10)]
    progress = {"0": Progress(1.0, 2.0, 5), "1": Progress(1.0, 4.0, 10)}
    outcome = judge("static", 1.0, jobs, progress, computed=60)
    assert (outcome.tokens_s, outcome.ttft_p50, outcome.e2e_p50, outcome.padding) == (15 / 4.0, 1.0, 2.0, 0.25)


def test_where_lengths_must_be_predicted_answers_are_ended_when_they_are_long_enough():
    feed = Live([job(0)], never=(2, 3))
    (request,) = feed.due(0.0)
    assert request.params.max_tokens == MAX_LEN - 10 and not request.params.ignore_eos
    assert [feed.note("0", 2, False, 1.0), feed.note("0", 3, False, 2.0)] == [False, True]
    assert not feed.note("0", 0, True, 2.1)
    assert feed.is_done and feed.progress["0"] == Progress(1.0, 2.0, 5)
