"""The comparison of the two load generators, and that they agree where vLLM is at hand."""

import importlib.util
import os
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.clients import LABELS, Job, compared, from_events, ours, vllm, write_chats
from tests.lab.bench_server import fake_server

VLLM_PYTHON = os.environ.get("LORALANE_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
ONLY_VLLM = {"generated_texts", "rtfx"}
"""Fields that loralane's result lacks: texts, and a figure of speech recognition."""


def result(**values: float) -> dict:
    return {**dict.fromkeys(LABELS, 1.0), "itls": [[0.001]], **values}


def test_latencies_from_events():
    """By hand: vLLM's client sees the role after 100 ms, and tokens after 150, 150 (together), 190 and 250 ms."""
    found = {"ttfts": [0.1], "itls": [[0.05, 0.00001, 0.04, 0.06]], "latencies": [0.25], "output_lens": [4]}
    events = from_events(found, has_role=True)
    assert (events["mean_first_ms"], events["mean_gap_ms"]) == pytest.approx((150, 50))
    assert (events["mean_each_ms"], events["p99_last_ms"]) == pytest.approx((100 / 3, 250))
    ours = from_events({**found, "ttfts": [0.15], "itls": [[0.04, 0.06]]}, has_role=False)
    names = ("mean_first_ms", "mean_gap_ms", "mean_each_ms", "p99_last_ms")
    assert [ours[name] for name in names] == pytest.approx([events[name] for name in names])


def test_ratios_are_those_of_pairs():
    pairs = [(result(mean_ttft_ms=mine), result(mean_ttft_ms=theirs)) for mine, theirs in ((2, 2), (3, 2), (4, 5))]
    console = Console(file=StringIO(), width=200)
    console.print(compared(pairs))
    [line] = [line for line in console.file.getvalue().splitlines() if "TTFT mean" in line]
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["TTFT mean, ms", "3.00", "2.000", "2.00", "2.500", "1.000", "0.800 to 1.500"]


@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON is None, reason="vLLM is not installed; LORALANE_VLLM_PYTHON may name a Python with it")
def test_both_clients_report_the_same_of_one_server(smollm2, tmp_path):
    assert VLLM_PYTHON is not None
    write_chats(tmp_path / "chats.jsonl", 8, "default:in=8,out=20")
    with fake_server() as fake:
        fake.chat_gap_s = 0.02
        job = Job(fake.url, tmp_path / "chats.jsonl", 8, 20.0, tmp_path / "ours.json")
        mine = ours(job)
        theirs = vllm(Path(VLLM_PYTHON), smollm2, Job(fake.url, job.chats, 8, 20.0, tmp_path / "theirs.json"))
    assert set(theirs) - set(mine) == ONLY_VLLM
    same = ("completed", "failed", "total_input_tokens", "total_output_tokens", "num_prompts", "output_lens", "backend")
    assert {name: mine[name] for name in same} == {name: theirs[name] for name in same}
    for name in ("p50_each_ms", "mean_gap_ms"):
        assert mine[name] == pytest.approx(theirs[name], rel=0.3)
