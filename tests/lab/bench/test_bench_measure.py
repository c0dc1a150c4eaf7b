"""Percentiles, goodput and what a run's JSON says, from made-up streams."""

import msgspec
import pytest

from lab.bench.document import Settings, document, read
from lab.bench.measure import busy_seconds, cost, meets_objective, percentiles, report
from lab.bench.plan import BenchRequest, Plan
from lab.bench.run import Outcome
from lab.bench.spec import LatencyObjective, parse_lane
from lab.bench.stream import PromptDetails, ReportedUsage, Stream
from lab.bench.tables import cost_line, remarks
from lab.bench.vllm_result import vllm_result


def stream(ttft=0.1, gaps=(0.01, 0.01), sent=0.0, lane="interactive", error=None, per_chunk=1, asked=None):
    times = [sent + ttft]
    for gap in gaps:
        times.append(times[-1] + gap)
    tokens = per_chunk * len(times)
    item = BenchRequest("m", (1, 2, 3, 4), asked or tokens, lane, sent)
    usage = ReportedUsage(4, tokens, PromptDetails(1))
    return Stream(item, sent, times[-1], times, [per_chunk] * len(times), usage, error)


def test_percentiles_interpolate():
    assert percentiles([]) is None
    found = percentiles([float(value) for value in range(1, 102)])
    assert (found.p50, found.p90, found.p95, found.p99, found.samples) == (51.0, 91.0, 96.0, 100.0, 101)
    assert (found.mean, found.std) == (51.0, pytest.approx(850**0.5))  # variance of 1..n: (n^2 - 1) / 12
    assert percentiles([1.0, 2.0]).p50 == 1.5


def test_one_stream():
    one = stream(ttft=0.2, gaps=(0.1, 0.3), sent=5.0)
    assert one.ttft == pytest.approx(0.2)
    assert one.gaps == pytest.approx([0.1, 0.3])
    assert one.tpot == pytest.approx(0.2)
    assert one.e2e == pytest.approx(0.6)
    assert stream(gaps=()).tpot is None


def test_tpot_is_per_token_where_chunks_hold_several():
    pair = stream(gaps=(0.1, 0.1), per_chunk=2)
    assert pair.gaps == pytest.approx([0.1, 0.1])
    assert pair.tpot == pytest.approx(0.2 / 5)
    assert report("interactive", [pair]).tokens_per_chunk == 2


def test_a_lane_is_reported_over_its_own_span():
    found = report("batch", [stream(sent=10.0, ttft=1.0, gaps=(1.0,)), stream(sent=11.0, ttft=1.0, gaps=(2.0,))])
    assert found.seconds == pytest.approx(4.0)
    assert found.output_tokens_per_second == pytest.approx(1.0)
    assert found.requests_per_second == pytest.approx(0.5)
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (8, 2, 4)
    assert found.itl.samples == 2
    assert found.prompt_tokens_per_second == pytest.approx(6 / 4)  # those of the prefix cache are not computed
    found = cost(found, 3.6)  # 0.001 a second
    assert found.per_million_output == pytest.approx(1e6 * 0.001 * 4 / 4)
    assert found.per_million == pytest.approx(1e6 * 0.001 * 4 / (4 + 8))
    assert cost_line(found) == "Cost at 3.6 an hour: 1e+03 a million output tokens, 333 a million of all"


def test_failures_count_as_such_and_as_nothing_else():
    bad = stream(error="http 503 lane_queue_full", ttft=9.0)
    found = report("interactive", [stream(), bad, stream(error="timeout")], LatencyObjective(ttft=1.0))
    assert found.errors == {"http 503 lane_queue_full": 1, "timeout": 1}
    assert (found.requests, found.succeeded) == (3, 1)
    assert found.ttft.p99 == pytest.approx(0.1)
    assert found.goodput.attainment == pytest.approx(1 / 3)


def test_an_answer_without_tokens_is_a_failure():
    empty = Stream(BenchRequest("m", (1,), 4), 0.0, 1.0)
    found = report("default", [empty])
    assert found.errors == {"no tokens": 1}
    assert found.ttft is None
    assert found.itl is None


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (LatencyObjective(ttft=0.11), True),
        (LatencyObjective(ttft=0.09), False),
        (LatencyObjective(itl=0.31), True),
        (LatencyObjective(itl=0.25), False),
        (LatencyObjective(tpot=0.16), True),
        (LatencyObjective(tpot=0.14), False),
        (LatencyObjective(ttft=0.11, itl=0.25), False),
    ],
)
def test_an_objective_holds_for_all_it_names(slo, met):
    assert meets_objective(stream(ttft=0.1, gaps=(0.0, 0.3)), slo) is met


def test_one_stall_in_two_hundred_gaps_is_forgiven():
    assert meets_objective(stream(gaps=(*[0.01] * 200, 1.0)), LatencyObjective(itl=0.1))
    assert not meets_objective(stream(gaps=(*[0.01] * 200, *[1.0] * 5)), LatencyObjective(itl=0.1))


def test_goodput_is_over_the_lane_s_span():
    streams = [stream(sent=0.0, ttft=0.5, gaps=(0.5,)), stream(sent=3.0, ttft=0.9, gaps=(0.1,))]
    found = report("interactive", streams, LatencyObjective(ttft=0.6)).goodput
    assert (found.met, found.attainment) == (1, 0.5)
    assert found.requests_per_second == pytest.approx(1 / 4)


def test_covered_time_counts_overlaps_once():
    assert busy_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == pytest.approx(4.0)


def test_a_document_survives_writing_and_reading():
    lanes = (parse_lane("interactive:rate=1,n=2,in=600~1.5,ttft=1s"), parse_lane("batch:n=1"))
    settings = Settings("http://x", Plan(("m",), lanes, zipf=1.0), concurrency=3)
    streams = [stream(), stream(error="timeout"), stream(lane="batch", gaps=())]
    written = document(settings, streams)
    assert read(written.write()) == written
    assert [lane.lane for lane in written.lanes] == ["interactive", "batch"]
    assert written.requests[0].ttft == pytest.approx(0.1)
    assert written.requests[1].ttft is None
    assert written.requests[1].error == "timeout"
    assert written.requests[2].itl_max is None
    assert {"python", "loralane"} <= set(written.versions)
    with pytest.raises(msgspec.DecodeError):
        read(b'{"format": "loralane-bench/1"}')


def test_what_spoils_a_comparison_is_remarked():
    found = report("interactive", [stream(per_chunk=2, asked=60), stream(error="timeout")])
    words = " ".join(remarks([found]))
    assert "1 failed: timeout" in words
    assert "6 tokens came of the 60 asked for" in words
    assert "2.0 tokens a chunk" in words
    assert remarks([report("batch", [stream()])]) == []


def test_a_run_is_written_as_vllm_writes_it():
    """Figures by hand: prompts of 4 tokens, answers of 3 at 0.5, 0.7, 1.1 s and of 2 at 2.2, 2.3 s; one failure."""
    lane = parse_lane("interactive:rate=2,n=3,cv=2,ttft=300ms")
    streams = [
        stream(ttft=0.5, gaps=(0.2, 0.4)),
        stream(sent=2.0, ttft=0.2, gaps=(0.1,)),
        stream(sent=2.5, error="timeout"),
    ]
    settings = Settings("http://x", Plan(("m",), (lane,)), concurrency=8)
    found = vllm_result(Outcome(document(settings, streams), streams))
    span = 2.5 + 0.12  # the failed request is the last to end
    expected = {
        "backend": "openai", "model_id": "m", "num_prompts": 3, "request_rate": 2.0, "burstiness": 0.25,
        "max_concurrency": 8, "duration": span, "completed": 2, "failed": 1, "total_input_tokens": 8,
        "total_output_tokens": 5, "request_throughput": 2 / span, "request_goodput": 1 / span,
        "output_throughput": 5 / span, "total_token_throughput": 13 / span,
        "mean_ttft_ms": 350, "median_ttft_ms": 350, "std_ttft_ms": 150, "p99_ttft_ms": 497,
        "mean_tpot_ms": 200, "p90_tpot_ms": 280, "p99_tpot_ms": 298,
        "mean_itl_ms": 700 / 3, "median_itl_ms": 200, "p95_itl_ms": 380,
        "mean_e2el_ms": 700, "median_e2el_ms": 700,
        "max_output_tokens_per_s": 2, "max_concurrent_requests": 1,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert (found["output_lens"], found["input_lens"]) == ([3, 2, 0], [4, 4, 4])
    assert found["ttfts"] == pytest.approx([0.5, 0.2, 0.1])
    assert found["itls"][0] == pytest.approx([0.2, 0.4])
    assert found["errors"] == ["", "", "timeout"]


def test_a_run_without_answers_is_written_too():
    failed = Stream(BenchRequest("m", (1,), 4), 0.0, 1.0, error="timeout")
    settings = Settings("http://x", Plan(("m",), (parse_lane("default:n=1"),)), price_per_hour=1.0)
    measured = document(settings, [failed])
    found = vllm_result(Outcome(measured, [failed]))
    assert (measured.cost, found["request_goodput"], found["request_rate"]) == (None, None, "inf")
    assert (found["completed"], found["mean_ttft_ms"], found["p99_itl_ms"]) == (0, 0.0, 0.0)
