"""Readers of recorded traffic, and traffic made up."""

import json
import statistics
from collections import Counter
from itertools import islice, pairwise

import pytest

from engine.core.messages.requests import Lane
from lab.traffic.synthetic import RANKS, Sizes, adapter_ranks, arrivals, with_adapters, with_batch_share, with_tenants
from lab.traffic.traces import BLOCK_TOKENS, Arrival, cut, read_trace, scale_rate
from lab.traffic.workload import Backlog, RequestMaker, Workload, backlog_arrivals

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:47.2500000,374,44
2023-11-16 18:15:46.0000000,396,109
2023-11-16 18:15:48.5000001,12,0
"""
ARENA = """req_time_s,client,prompt_len,output_len
1.5,13,13,199
2.0,2,0,137
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 2, 3]},
]


@pytest.fixture
def mooncake(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return path


def test_azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    assert read_trace(path) == [Arrival(0.0, 396, 109), Arrival(1.25, 374, 44), Arrival(2.5, 12, 1)]


def test_arena_clients_are_tenants(tmp_path):
    path = tmp_path / "arena.csv"
    path.write_text(ARENA)
    assert read_trace(path) == [Arrival(0.0, 13, 199, "client-13"), Arrival(0.5, 1, 137, "client-02")]


def test_mooncake_blocks_become_shared_tokens(mooncake):
    trace = read_trace(mooncake)
    assert [arrival.time for arrival in trace] == [0.0, 1.5]
    make = RequestMaker()
    first, second = (make(arrival).prompt_ids for arrival in trace)
    assert (len(first), len(second)) == (600, 1100)
    assert first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS]
    assert not set(first[BLOCK_TOKENS:]) & set(second)


def test_burst_gpt_without_its_failures(tmp_path):
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,Conversation log\n118,ChatGPT,9,0,9,API log\n"
    )
    assert read_trace(path) == [Arrival(0.0, 472, 18, "ChatGPT"), Arrival(40.0, 1087, 230, "GPT-4")]


def test_serve_gen(tmp_path):
    path = tmp_path / "workload.csv"
    path.write_text("request_id,timestamp,input_tokens,output_tokens\n0,0.25,1024,87.0\n1,1.5,12,1\n")
    assert read_trace(path) == [Arrival(0.0, 1024, 87), Arrival(1.25, 12, 1)]


def test_the_input_of_a_batch_job(tmp_path):
    path = tmp_path / "batch.jsonl"
    body = {"model": "pirate", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 16}
    bodies = [body, {"model": "base", "prompt": "", "seed": 1}, body | {"max_completion_tokens": 8}]
    path.write_text("".join(json.dumps({"custom_id": "1", "body": one}) + "\n" for one in bodies))
    first, second, third = read_trace(path)
    assert (first.time, first.lane, first.output_tokens, first.adapter) == (0.0, Lane.BATCH, 16, 0)
    assert 100 <= first.prompt_tokens <= 115
    assert (second.prompt_tokens, second.output_tokens, second.adapter) == (1, 256, 1)
    assert (third.output_tokens, third.adapter) == (8, 0)


def test_no_request_is_without_a_token_and_blocks_are_named_from_0(tmp_path):
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:47.2500000,0,-4\n")
    mooncake.write_text('{"timestamp": 0, "input_length": -3, "output_length": 0, "hash_ids": [99999999999, 7]}\n')
    assert read_trace(azure) == [Arrival(0.0, 1, 1)]
    assert read_trace(mooncake) == [Arrival(0.0, 1, 1, blocks=(0, 1))]


def test_prompts_without_blocks_share_nothing():
    make = RequestMaker()
    first, second = (set(make(Arrival(0.0, 100, 1)).prompt_ids) for _ in range(2))
    assert len(first) == len(second) == 100
    assert not first & second


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello\n", "is no trace"),
        ("", "is no trace"),
        ("req_time_s,client\n1,2\n", "prompt_len"),
        ("req_time_s,client,prompt_len,output_len\n", "no requests"),
        ('{"timestamp": 1}\n', "known formats are"),
        ('{"timestamp": 1, "input_length": 1}\n', "output_length"),
        ('{"timestamp": 1, "input_length": "10", "output_length": 1, "hash_ids": []}\n', "interpreted as an integer"),
        ("req_time_s,client,prompt_len,output_len\nnan,1,1,1\n", "not finite"),
        ("req_time_s,client,prompt_len,output_len\n-1e308,1,1,1\n1e308,1,1,1\n", "not finite"),
        ("req_time_s,client,prompt_len,output_len\n0,1,99999999999,1\n", "a length must be below"),
        ('{"custom_id": "1", "body": "hello"}\n', "a body is no object"),
        pytest.param('{"a":' * 100_000, "recursion", id="nested too deep"),
        ('{"event": "size"}\n', "no requests"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, text, words):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_the_log_of_a_gateway_begins_with_lines_of_other_events(tmp_path):
    path = tmp_path / "requests.log"
    line = {"event": "request", "timestamp": "2026-11-27T03:00:01Z", "duration_ms": 1000.0, "error": None}
    line |= {"prompt_tokens": 20, "completion_tokens": 5, "cached_tokens": 32, "tenant": "acme", "lane": "batch"}
    rows = [{"event": "size", "value": 32}, line | {"adapter": "pirate"}, line | {"adapter": None, "error": "aborted"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "Traceback\n")
    assert read_trace(path) == [Arrival(0.0, 20, 5, "acme", Lane.BATCH, 0, cached_tokens=20)]


def test_scaling_and_cutting():
    trace = [Arrival(float(time), 1, 1) for time in range(10)]
    assert [arrival.time for arrival in cut(scale_rate(trace, 2), 2)] == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv):
    trace = arrivals(50, 2000, Sizes(1, 9), Sizes(2, 2), cv)
    gaps = [b.time - a.time for a, b in pairwise(trace)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.1)
    assert {arrival.prompt_tokens for arrival in trace} == set(range(1, 10))
    assert {arrival.output_tokens for arrival in trace} == {2}


def test_adapters_follow_zipf():
    counts = Counter(arrival.adapter for arrival in with_adapters([Arrival(0.0, 1, 1)] * 40_000, 100, 1.0))
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.2)
    assert set(counts) <= set(range(100))
    assert set(adapter_ranks(200)) == set(RANKS)


def test_shares_and_tenants_are_seeded():
    trace = [Arrival(0.0, 1, 1)] * 1000
    batch = sum(arrival.lane is Lane.BATCH for arrival in with_batch_share(trace, 0.3))
    assert 250 < batch < 350
    assert with_batch_share(trace, 0.3, seed=1) != with_batch_share(trace, 0.3, seed=2)
    assert with_tenants(trace, 3) == with_tenants(trace, 3)
    assert len({arrival.tenant for arrival in with_tenants(trace, 3)}) == 3


def test_backlog_without_end():
    backlog = Backlog(2, Sizes(3, 5), Sizes(7, 7))
    made = list(islice(backlog_arrivals(Workload([], 1.0, backlog, adapters=4), backlog), 50))
    assert {arrival.lane for arrival in made} == {Lane.BATCH}
    assert {arrival.prompt_tokens for arrival in made} == {3, 4, 5}
    assert {arrival.adapter for arrival in made} == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["5-3", "0", "a", "0-4"])
def test_wrong_sizes(text):
    with pytest.raises(ValueError):
        Sizes.parse(text)
