"""`loralane simulate`, in process."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from lab.commands.simulate import make_setup, simulate
from lab.devices.device import FOLDER
from lab.sim.run import Stalled

app = typer.Typer()
app.command()(simulate)

ARENA = "req_time_s,client,prompt_len,output_len\n" + "".join(f"{i / 4},{i % 3},{20 + i},{5}\n" for i in range(24))


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "arena.csv"
    path.write_text(ARENA)
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--jobs", "1"], env={"COLUMNS": "200"})


def test_a_trace_becomes_tables_and_json(trace, tmp_path):
    out = tmp_path / "report.json"
    done = invoke("--trace", trace, "--device", "cpu-smollm2", "--json", out)
    assert done.exit_code == 0, done.output
    for words in ("Throughput", "Latency, interactive", "Tenants, lanes", "client-02"):
        assert words in done.output
    report = json.loads(out.read_text())["runs"]["lanes"]
    assert report["lanes"]["interactive"]["finished"] == 24


def test_policies_side_by_side_with_goals(tmp_path):
    out = tmp_path / "report.json"
    done = invoke(
        "--rate", 2, "--duration", 10, "--prompt", "16-32", "--output", 8, "--batch-backlog", 8, "--device",
        "cpu-smollm2", "--policy", "lanes", "--policy", "priority", "--goals", "--json", out,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert list(document["runs"])[:3] == ["lanes", "priority", "fcfs"]
    assert "interactive p99 TTFT / alone" in {goal["figure"] for goal in document["goals"]}


def test_the_configuration_of_serve_is_used(trace, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("engine: {max_seqs: 3, token_budget: 64, scheduling: {batch_floor: 0.2}}\n")
    out = tmp_path / "report.json"
    done = invoke("--trace", trace, "--config", config, "--device", "cpu-smollm2", "--json", out)
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert list(document["runs"]) == ["lanes"]
    assert (document["engine"]["max_seqs"], document["engine"]["token_budget"]) == (3, 64)


def test_how_the_host_plans_can_be_chosen(trace, tmp_path):
    out = tmp_path / "report.json"
    done = invoke("--trace", trace, "--device", "cpu-smollm2", "--overlap", "--host-ms", 2.5, "--json", out)
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    assert (document["overlaps"], document["host_s"]) == (True, 0.0025)


def test_a_curve_is_drawn(trace, tmp_path):
    pytest.importorskip("matplotlib")
    out, report = tmp_path / "curve.png", tmp_path / "report.json"
    done = invoke(
        "--trace", trace, "--policy", "lanes", "--policy", "fcfs", "--rates", "1,4", "--plot", out, "--json", report
    )
    assert done.exit_code == 0, done.output
    assert out.read_bytes().startswith(b"\x89PNG")
    assert list(json.loads(report.read_text())["runs"]) == ["lanes 1x", "lanes 4x", "fcfs 1x", "fcfs 4x"]


def test_routers_are_compared_on_a_cluster(tmp_path):
    out = tmp_path / "report.json"
    words = ("--rate", 20, "--duration", 2, "--adapters", 20, "--prompt", 64, "--output", 8, "--json", out)
    done = invoke(*words, "--replicas", 3, "--router", "ours", "--router", "hash", "--kill", 1, "--add", 1.5)
    assert done.exit_code == 0, done.output
    assert "3 replicas" in done.output
    document = json.loads(out.read_text())
    assert [change["dies"] for change in document["changes"]] == [True, False]
    assert {name: report["lost"] for name, report in document["routers"].items()} == {"ours": 0, "hash": 0}


def test_the_missing_extra_is_named(trace, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke("--trace", trace, "--plot", tmp_path / "curve.png")
    assert done.exit_code == 1
    assert "loralane[plot]" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "tpu"], "no device 'tpu'"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--policy", "best"], "policy must be one of"),
        (["--prompt", "9-3"], "LOW-HIGH"),
        (["--batch-share", "2"], "batch_share"),
        (["--rate-scale", "0"], "rate scale"),
        (["--rate-scale", "nan"], "rate scale"),
        (["--rate-scale", "0.0001"], "nothing arrives"),
        (["--duration", "inf"], "duration"),
        (["--rate", "inf"], "rate must be"),
        (["--cv", "inf"], "cv must be"),
        (["--zipf", "nan"], "zipf"),
        (["--batch-share", "nan"], "batch_share"),
        (["--batch-backlog", "-5"], "batch backlog"),
        (["--batch-backlog", "5", "--batch-deadline", "nan"], "batch deadline"),
        (["--batch-backlog", "5", "--batch-deadline", "-3"], "batch deadline"),
        (["--predicted", "0.5-2"], "shares must be LOW-HIGH"),
        (["--predicted", "0.5", "--overlap"], "exclude each other"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json"),
        (["--plot", "nowhere/x.png"], "--plot nowhere/x.png"),
        (["--plot", "x.png", "--goals"], "exclude each other"),
        (["--replicas", "2", "--router", "best"], "--router is one of ours"),
        (["--replicas", "2", "--goals"], "for one engine"),
        (["--replicas", "2", "--policy", "lanes", "--policy", "fcfs"], "one --policy"),
        (["--kill", "1"], "at least two --replicas"),
        (["--flash-crowd", "0.4@9-3", "--adapters", "3"], "flash crowd"),
        (["--flash-crowd", "0.4@3-9"], "needs adapters"),
        (["--tide", "nan"], "period of a tide"),
    ],
)
def test_mistakes_are_named(arguments, words):
    done = invoke("--duration", 5, *arguments)
    assert done.exit_code == 1
    assert words in done.output
    assert "Throughput" not in done.output


def test_a_picture_of_an_unknown_format_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    done = invoke("--duration", 5, "--plot", tmp_path / "x.foo")
    assert done.exit_code == 1
    assert "its suffix must be one of" in done.output


def test_an_engine_that_stalls_is_reported(monkeypatch):
    def stall(*_):
        raise Stalled("no step for 3600 s")

    monkeypatch.setattr("lab.commands.simulate.run_all", stall)
    done = invoke("--duration", 5)
    assert done.exit_code == 1
    assert "error: no step for 3600 s" in done.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": {"wings": 2}}, "wings"),
        ({"page_bytes": 0}, "page_bytes"),
        ({"noise_sigma": "loud"}, "does not describe"),
        ({"memory_bytes_per_s": 0}, "memory_bytes_per_s"),
    ],
)
def test_a_wrong_device_is_told(tmp_path, change, words):
    document = json.loads((FOLDER / "h100-8b.json").read_text())
    for name, value in change.items():
        (document if name in document else document["cost"])[name] = value
    path = tmp_path / "device.json"
    path.write_text(json.dumps(document))
    done = invoke("--duration", 5, "--device", path)
    assert done.exit_code == 1
    assert words in done.output


@pytest.mark.parametrize(
    ("device", "engine", "sizes"),
    [
        ("h100-8b", "{}", (256, 2048)),
        ("h100-8b", "{token_budget: 128}", (128, 128)),
        ("cpu-smollm2", "{max_seqs: 300}", (300, 300)),
    ],
)
def test_a_size_that_is_set_alone_bounds_the_other_as_in_an_engine(tmp_path, device, engine, sizes):
    file = tmp_path / "config.yaml"
    file.write_text(f"engine: {engine}")
    core = make_setup(device, file, {}).core
    assert (core.max_seqs, core.token_budget) == sizes


def test_ways_to_split_requests_side_by_side(tmp_path):
    out = tmp_path / "report.json"
    size = ("--rate", 20, "--duration", 2, "--prompt", "512-1024", "--output", 8, "--replicas", 2)
    ways = ("--split", "auto", "--split", "always", "--split", "never", "--link", "ethernet-100")
    done = invoke(*size, *ways, "--json", out)
    assert done.exit_code == 0, done.output
    assert "KV MB sent / split request" in done.output
    reports = json.loads(out.read_text())["routers"]
    assert list(reports) == ["split auto", "split always", "ours"]
    assert reports["split always"]["split"] > reports["ours"]["split"] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--split", "often", "--replicas", 2), "--split is one of auto, never, always"),
        (("--split", "auto"), "needs at least two --replicas"),
        (("--split", "auto", "--replicas", 2, "--router", "hash"), "behind the router 'ours' only"),
        (("--split", "auto", "--replicas", 2, "--prefill", 2), "--prefill must leave at least one"),
        (("--split", "auto", "--replicas", 2, "--link", "string"), "--link is one of nvlink"),
    ],
)
def test_what_cannot_be_split_is_refused(options, reason):
    done = invoke("--rate", 5, "--duration", 1, *options)
    assert done.exit_code == 1
    assert reason in " ".join(done.output.split())
