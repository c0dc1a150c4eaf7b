"""The load generator against a server on loopback that answers well and badly."""

import asyncio
import json
import socket

import msgspec
import pytest
from bench_server import FakeServer, chunk, fake_server
from typer.testing import CliRunner

from gateway.serve.process import run_loop
from lab.bench.client import Target, error_code
from lab.bench.document import read
from lab.bench.drive import drive
from lab.bench.plan import BenchRequest
from lab.bench.speculation import Speculation
from lab.bench.sweep import Sweep
from lab.commands.bench import app

pytestmark = pytest.mark.slow

PROMPT = (5, 6, 7)


@pytest.fixture(autouse=True)
def no_full_collections(monkeypatch):
    """The command collects all garbage before it measures: in a process that has run hundreds of tests, for seconds."""
    monkeypatch.setattr("lab.bench.drive.gc.collect", lambda: 0)


@pytest.fixture(scope="module")
def server():
    with fake_server() as fake:
        yield fake


@pytest.fixture(autouse=True)
def _forget(server: FakeServer):
    server.bodies.clear()
    server.keys.clear()


def send(server: FakeServer, *items: BenchRequest, target: Target | None = None, **options):
    return run_loop(drive(target or Target(server.url, "secret"), items, **options))


def test_a_stream_is_timed_and_counted(server):
    [stream] = send(server, BenchRequest("good", PROMPT, 6, "interactive"))
    assert stream.error is None
    assert stream.tokens == 6
    assert sum(stream.chunk_tokens) == 6
    assert stream.cached == 3
    assert stream.times == sorted(stream.times)
    assert stream.sent < stream.times[0] <= stream.times[-1] <= stream.ended


def test_every_server_is_asked_for_the_same_work(server):
    send(
        server,
        BenchRequest("good", PROMPT, 2, "interactive"),
        BenchRequest("good", PROMPT, 2, "batch"),
        BenchRequest("good", PROMPT, 2),
    )
    interactive, batch, default = sorted(server.bodies, key=lambda body: body.get("priority", 99))
    assert (interactive["service_tier"], batch["service_tier"]) == ("priority", "flex")
    assert interactive["priority"] < batch["priority"]
    assert default.keys().isdisjoint({"service_tier", "priority"})
    for body in server.bodies:
        assert body["prompt"] == list(PROMPT)
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["stream"]) == (2, True, 0, True)
        assert body["stream_options"] == {"include_usage": True}
    assert set(server.keys) == {"Bearer secret"}


def test_a_strict_server_gets_nothing_it_may_not_know(server):
    target = Target(server.url + "/v1/", tiers=False, extensions=False)
    [stream] = send(server, BenchRequest("good", PROMPT, 2, "batch"), target=target)
    assert stream.error is None
    assert set(server.bodies[0]) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert server.keys == [None]


def test_chunks_cut_anywhere_are_put_together(server):
    [stream] = send(server, BenchRequest("pairs", PROMPT, 8))
    assert stream.error is None
    assert sum(stream.chunk_tokens) == 4  # one a chunk is seen,
    assert stream.tokens == 8  # and the server's count believed


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("full", "http 503 lane_queue_full"),
        ("plain", "http 500"),
        ("broken", "connection lost"),
        ("short", "cut short"),
        ("failing", "stream error deadline_exceeded"),
        ("garbled", "unreadable event"),
    ],
)
def test_failures_have_a_kind_and_spoil_nothing_else(server, model, error):
    bad, good = send(server, BenchRequest(model, PROMPT, 4), BenchRequest("good", PROMPT, 4))
    assert bad.error == error
    assert good.error is None


def test_a_silent_server_is_given_up(server):
    [stream] = send(server, BenchRequest("silent", PROMPT, 4), timeout_s=0.2)
    assert stream.error == "timeout"
    assert stream.times == []


def test_a_port_without_a_server_is_an_error_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = Target(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(OSError, match="refused"):
            run_loop(drive(target, [BenchRequest("m", PROMPT, 1)]))


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8000", "http://"])
def test_a_url_is_looked_at(url):
    with pytest.raises(ValueError, match="http://"):
        run_loop(drive(Target(url), [BenchRequest("m", PROMPT, 1)]))


def test_a_connection_that_never_opens_is_given_up(monkeypatch):
    async def never(*_):
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", never)
    with pytest.raises(OSError, match="no connection within"):
        run_loop(drive(Target("http://127.0.0.1:1"), [BenchRequest("m", PROMPT, 1)], timeout_s=0.05))


def test_an_interim_response_is_not_the_answer():
    async def answer(reader, writer):
        if await reader.read(65_536):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await asyncio.sleep(0.02)
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + chunk([7], "length") + b"data: [DONE]\n\n")
        writer.close()

    async def exchange():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as raw:
            port = raw.sockets[0].getsockname()[1]
            return await drive(Target(f"http://127.0.0.1:{port}"), [BenchRequest("m", PROMPT, 1)], timeout_s=5)

    [stream] = run_loop(exchange())
    assert (stream.error, stream.tokens) == (None, 1)


def test_requests_wait_for_their_time_and_for_no_other_request(server):
    items = [
        BenchRequest("silent", PROMPT, 1, at=0.0),
        BenchRequest("good", PROMPT, 1, at=0.1),
        BenchRequest("good", PROMPT, 1, at=0.2),
    ]
    streams = send(server, *items, timeout_s=1.0)
    assert [stream.error for stream in streams] == ["timeout", None, None]
    assert all(stream.sent > stream.item.at - 0.01 for stream in streams)  # timers count in milliseconds
    assert streams[2].sent < streams[0].ended


def test_concurrency_closes_the_loop(server):
    streams = send(server, *[BenchRequest("good", PROMPT, 2)] * 6, concurrency=2)
    for stream in streams:
        others = [other for other in streams if other is not stream and other.sent <= stream.sent < other.ended]
        assert len(others) < 2


def test_one_lane_may_end_the_run(server):
    others = [BenchRequest("good", PROMPT, 1, "interactive", at) for at in (0.0, 60.0, 120.0)]
    streams = send(server, BenchRequest("good", PROMPT, 20, "batch"), *others, stop_after="batch")
    assert [stream.item.at for stream in streams if stream.item.lane == "interactive"] == [0.0]
    assert sum(stream.item.lane == "batch" for stream in streams) == 1


def test_the_command_measures_and_writes(server, tmp_path):
    lanes = ["--lanes", "interactive:rate=50,n=5,in=4,out=3,ttft=60s", "--lanes", "batch:n=3,in=4-8,out=2"]
    options = ["--url", server.url, *lanes, "--adapters", "good,adapter", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["serve", *options, "--warmup", "2", "--seed", "3"])
    assert result.exit_code == 0, result.output
    for word in ("Throughput", "Latency", "TTFT", "ITL", "TPOT", "E2E", "interactive", "100.0%"):
        assert word in result.output
    written = read((tmp_path / "out.json").read_bytes())
    assert written.settings.plan.seed == 3
    assert [(lane.lane, lane.succeeded, lane.output_tokens) for lane in written.lanes] == [
        ("interactive", 5, 15),
        ("batch", 3, 6),
    ]
    assert {row.model for row in written.requests} == {"good", "adapter"}
    assert len(server.bodies) == 2 + 8  # warm-up requests are sent, and not in the document


def test_a_chat_counts_neither_the_role_nor_the_end(server):
    [stream] = send(
        server,
        BenchRequest("good", (), 5, "interactive", messages=({"role": "user", "content": "Hello"},)),
        target=Target(server.url, chat=True, extensions=False),
    )
    assert (stream.error, stream.tokens, stream.prompt_tokens, sum(stream.chunk_tokens)) == (None, 5, 9, 5)
    assert server.bodies[0] == {
        "model": "good",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 5,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": "priority",
        "priority": 0,
    }


def test_texts_are_completed_too(server):
    turns = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    send(server, BenchRequest("good", (), 2, messages=turns))
    assert server.bodies[0]["prompt"] == "Be brief.\n\nHello"


def test_the_command_sweeps_rates_and_finds_the_knee(server, tmp_path):
    files = {name: tmp_path / name for name in ("sweep.json", "results.jsonl", "knee.png")}
    options = ["--url", server.url, "--endpoint", "chat", "--models", "good", "--warmup", "1", "--seed", "3"]
    options += ["--rates", "200,400", "--lanes", "default:n=4,in=8-16,out=2", "--ttft-ms", "60000"]
    options += ["--price-per-hour", "3.6", "--json", str(files["sweep.json"]), "--plot", str(files["knee.png"])]
    result = CliRunner().invoke(app, ["serve", *options, "--vllm-json", str(files["results.jsonl"])])
    assert result.exit_code == 0, result.output
    assert "Knee: 400 requests/s" in result.output and "no higher rate was tried" in result.output
    assert "400 requests/s: " in result.output and "100.0% within the goals" in result.output
    written = msgspec.json.decode(files["sweep.json"].read_bytes(), type=Sweep)
    assert (written.knee, [point.rate for point in written.points]) == (400.0, [200.0, 400.0])
    assert all(point.document.cost for point in written.points)
    lines = [json.loads(line) for line in files["results.jsonl"].read_text().splitlines()]
    assert [(line["request_rate"], line["completed"]) for line in lines] == [(200.0, 4), (400.0, 4)]
    assert files["knee.png"].stat().st_size > 1000
    prompts = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(prompts)) == 1 + 4 + 4  # no run finds prompts of another one in a prefix cache


@pytest.mark.parametrize(
    "names",
    [
        ("loralane_proposed_tokens", "loralane_accepted_tokens", "loralane_generated_tokens"),
        ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens", "vllm:generation_tokens"),
    ],
)
def test_speculation_is_read_from_the_servers_counters(server, tmp_path, names):
    def told(*values):
        lines = (
            f'# TYPE {name} counter\n{name}_total{{model="{model}"}} {value}\n'
            for name, value in zip(names, values, strict=True)
            for model in "ab"
        )
        return "".join(lines)

    server.metrics[:] = [told(5, 3, 50), told(35, 18, 80)]
    options = ["--lanes", "batch:n=1,in=4,out=2", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["serve", "--url", server.url, *options])
    assert result.exit_code == 0, result.output
    assert "2.00 tokens a step; 30 of 60 proposed tokens accepted (50%)" in " ".join(result.output.split())
    assert read((tmp_path / "out.json").read_bytes()).speculation == Speculation(60, 30, 2.0)
    for texts in ([], ["nonsense {"], [told(5, 3, 50)], [told(5, 3, 50), told(5, 3, 70)]):
        server.metrics[:] = texts
        result = CliRunner().invoke(app, ["serve", "--url", server.url, *options])
        assert result.exit_code == 0 and "Speculation" not in result.output


def test_the_command_replays_a_trace_to_the_first_model(server, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [0]}\n' * 3)
    result = CliRunner().invoke(app, ["serve", "--url", server.url, "--trace", str(trace), "--warmup", "0"])
    assert result.exit_code == 0, result.output
    assert [(body["model"], len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [("good", 9, 2)] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lanes", "batch:m=1"], "there is no 'm'"),
        (["--lanes", "batch:n=2[/x]"], "cannot read '2[/x]'"),
        (["--models", "a,,b"], "all with names"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json"),
        (["--lanes", "batch"], "--trace"),
        (["--trace", "missing.csv"], "missing.csv"),
        (["--models", "full", "--lanes", "batch:n=1"], "every warm-up request failed: http 503 lane_queue_full"),
        (["--token-ids", "5"], "LOW-HIGH"),
        (["--sweep"], "give --ttft-ms, --tpot-ms or --itl-ms"),
        (["--sweep", "--rates", "1"], "leave out --rates"),
        (["--plot", "x.png"], "add --rates 1,2,4 or --sweep"),
        (["--rates", "1,x"], "such as 1,2,4"),
        (["--rates", "1", "--trace", "x.csv"], "give the trace as --dataset"),
        (["--rates", "1", "--share", "2"], "at most 1"),
        (["--ttft-ms", "0"], "--ttft-ms must be finite and positive"),
        (["--burstiness", "-1"], "--burstiness must be finite and positive"),
        (["--price-per-hour", "-1"], "the price must be"),
        (["--dataset", "missing.json"], "missing.json"),
        (["--rates", "1", "--plot", "x.txt2"], "its suffix must be one of"),
        (["--lanes", "interactive:rate=1", "--duration", "0"], "nothing to send|would never end"),
    ],
)
def test_the_command_explains_itself(server, options, words):
    result = CliRunner().invoke(app, ["serve", "--url", server.url, *options])
    assert result.exit_code == 1
    assert any(word in " ".join(result.output.split()) for word in words.split("|")), result.output


def test_a_run_in_which_nothing_succeeds_fails(server):
    options = ["--url", server.url, "--models", "full", "--lanes", "batch:n=2", "--warmup", "0"]
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 1
    assert "2 failed: http 503 lane_queue_full" in result.output


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"error": {"code": "model_not_found", "type": "invalid_request_error"}}', " model_not_found"),
        (b'{"error": {"code": 404, "type": "NotFoundError"}}', " NotFoundError"),
        (b'{"error": {"code": null, "type": ""}}', ""),
        (b'{"error": "no"}', ""),
        (b"<html>", ""),
    ],
)
def test_an_error_is_named_by_the_first_text_among_code_and_type(body, code):
    assert error_code(body) == code
