"""The side-by-side benchmark of lanes: how servers are set up, and what its table is made of."""

from dataclasses import replace

import pytest

from benchmarks.lanes import BATCH, INTERACTIVE, Outcome, Work, rows
from benchmarks.peers import PeerError, loralane, vllm
from benchmarks.server import Command, running
from gateway.config.whole import load_config
from lab.bench.measure import report
from lab.bench.plan import BenchRequest
from lab.bench.stream import Stream

CORES = frozenset({0, 1})


def lane(name, ttft, gap, requests=2):
    streams = []
    for index in range(requests):
        times = [10.0 * index + ttft, 10.0 * index + ttft + gap]
        streams.append(Stream(BenchRequest("base", (1,), 2, name), 10.0 * index, times[-1], times, [1, 1]))
    return report(name, streams)


def outcome():
    interactive = lane(INTERACTIVE, 1.0, 0.5), lane(INTERACTIVE, 2.0, 0.6)
    batch = lane(BATCH, 1.0, 1.0), lane(BATCH, 1.0, 3.0)
    return Outcome("ours", "1", interactive[0], batch[0], interactive[1], batch[1])


def test_the_table_compares_beside_with_alone():
    found = {label: cells for label, *cells in rows(outcome())}
    assert found["TTFT p99"] == ["1000", "2000", "2.00x"]
    assert found["ITL p50"] == ["500", "600", "1.20x"]
    assert found["interactive requests"] == ["2", "2", ""]
    assert float(found["batch tokens/s"][2]) == pytest.approx(12 / 14, abs=0.01)


def test_the_batch_is_held_to_what_interactive_work_leaves_it():
    measured = outcome()
    share = measured.interactive_alone.busy
    assert share == pytest.approx(3.0 / 11.5)
    assert measured.normalised == pytest.approx(measured.batch_ratio / (1 - share))
    nothing_left = replace(measured, interactive_alone=replace(measured.interactive_alone, busy=1.0))
    assert nothing_left.normalised is None
    assert ["batch ratio / (1 - share)", "", "", "-"] in [list(row) for row in rows(nothing_left)]


def test_every_phase_has_the_same_work_and_prompts_of_its_own():
    work = Work(interactive=5, rate=1.0, batch=3, warmup=0, seed=1)
    alone = work.plan(1, work.interactive_lane(5)).items()
    both = work.plan(2, work.interactive_lane(9, 3.0), work.batch_lane()).items()
    beside = [item for item in both if item.lane == INTERACTIVE][:5]
    assert [item.at + 3.0 for item in alone] == pytest.approx([item.at for item in beside])
    assert [len(item.prompt) for item in alone] == [len(item.prompt) for item in beside]
    assert [item.prompt for item in alone] != [item.prompt for item in beside]


def test_loralane_is_configured_and_may_be_overridden(tmp_path):
    peer = loralane(tmp_path, tmp_path, CORES, {"engine": {"prefix_caching": True}, "lanes": {}})
    config = load_config(tmp_path / "loralane.yaml", {})
    assert (config.engine.threads, config.engine.max_seqs, config.engine.prefix_caching) == (2, 32, True)
    assert peer.command.url == f"http://127.0.0.1:{config.http.port}"


def test_vllm_is_not_run_at_half_its_speed(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "python"
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(PeerError, match="libtcmalloc-minimal4"):
        vllm(python, tmp_path, CORES)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libtcmalloc_minimal.so.4")
    with pytest.raises(PeerError, match="libiomp5"):
        vllm(python, tmp_path, CORES)
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir()
    library.touch()
    command = vllm(python, tmp_path, CORES).command
    assert command.env["LD_PRELOAD"] == f"libtcmalloc_minimal.so.4:{library}"
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert "priority" in command.words


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path):
    command = Command(["sh", "-c", "echo no such model; exit 3"], "http://127.0.0.1:9", "/ready")
    with pytest.raises(RuntimeError, match="no such model"), running(command, tmp_path / "log"):
        pass
