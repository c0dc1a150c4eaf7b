"""Gateways that are taken out of service, as processes: SIGTERM and `loralane gateways drain` cut nothing off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from threading import Thread

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.test_hangup import KEYS, SECONDS, heard, started
from tests.gateway.patient_valkey import PatientValkey

KEY, ADMIN_KEY = KEYS["ACME"], KEYS["GLOBEX"]
FILE = """
model: {{source: {model}, name: tiny}}
engine: {{memory_gb: 0.25, threads: 1, dtype: float32}}
http: {{port: 0, drain_seconds: {drain}}}
grpc: {{port: 0}}
redis: {redis}
admin: {{keys: ["${{GLOBEX}}"]}}
batches: {{storage: "file://{storage}"}}
tenants:
  acme: {{keys: ["${{ACME}}"]}}
"""
SLOW = """
from functools import partial
from gateway.__main__ import main
from gateway.serve import launch
launch.Launch = partial(launch.Launch, engine=("tests.e2e.slow_engine", "--fake"))
main()
"""
"""A program that is `loralane` but for the engine, which has no model and takes 50 ms for a step."""
HEADERS = {"authorization": f"Bearer {KEY}"}


@contextmanager
def serving(folder, model, *arguments, drain=60.0, redis="{}"):
    """A gateway over a slow engine; yields its process, its log and the URL of its HTTP port."""
    folder.mkdir(exist_ok=True)
    file, storage = folder / "gateway.yaml", folder.parent / "files"
    file.write_text(FILE.format(model=model, drain=drain, redis=redis, storage=storage))
    with started(folder, "--config", str(file), *arguments, program=("-c", SLOW)) as (process, log):
        url = re.search(r"http://127\.0\.0\.1:\d+", heard(process, log, "Ctrl-C stops it"))[0]
        yield process, log, url


def completion(tokens, **more):
    return {"model": "tiny", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "seed": 7, **more}


class Stream(Thread):
    """Reads a stream of completions in a thread. `begun` is set with its first token."""

    def __init__(self, url, tokens):
        super().__init__(daemon=True)
        self.url, self.tokens, self.lines, self.error = url, tokens, [], None
        self.start()

    def run(self):
        body = completion(self.tokens, stream=True, stream_options={"include_usage": True})
        try:
            post = httpx.stream("POST", f"{self.url}/v1/completions", json=body, headers=HEADERS, timeout=SECONDS)
            with post as answer:
                for line in answer.iter_lines():
                    self.lines += [line] if line else []
        except Exception as error:
            self.error = error

    def wait_begun(self):
        until(lambda: len(self.lines) > 1 or not self.is_alive())
        assert self.error is None and self.is_alive(), self.lines

    def assert_whole(self):
        self.join(SECONDS)
        assert self.error is None
        assert self.lines[-1] == "data: [DONE]"
        assert json.loads(self.lines[-2][6:])["usage"]["completion_tokens"] == self.tokens


def until(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def ready(url):
    return httpx.get(f"{url}/ready", timeout=SECONDS)


def complete(url, tokens=1):
    return httpx.post(f"{url}/v1/completions", json=completion(tokens), headers=HEADERS, timeout=SECONDS)


def grpc_address(url):
    return f"127.0.0.1:{httpx.get(url, headers={'accept': 'application/json'}).json()['grpc']['port']}"


# --- SIGTERM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [pytest.param(170), pytest.param(420, marks=pytest.mark.nightly)])
def test_a_stream_outlives_sigterm_while_new_requests_are_served_and_then_refused(tiny_model, tmp_path, tokens):
    with serving(tmp_path / "one", tiny_model) as (process, log, url), ExitStack() as stack:
        kept = stack.enter_context(httpx.Client(base_url=url, headers=HEADERS, timeout=SECONDS))
        assert kept.get("/v1/models").headers.get("connection") is None
        health = health_pb2_grpc.HealthStub(stack.enter_context(grpc.insecure_channel(grpc_address(url))))
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        stream = Stream(url, tokens)
        stream.wait_begun()
        assert ready(url).status_code == 200
        process.terminate()
        heard(process, log, "stopping: running requests have 60 s to end")
        answer = ready(url)
        assert (answer.status_code, answer.json()["reason"], answer.json()["status"]) == (503, "draining", "not_ready")
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert kept.get("/v1/models").headers["connection"] == "close"
        late = complete(url)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        refused = until(lambda: answer if (answer := complete(url)).status_code != 200 else None)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert refused.headers["x-loralane-draining"] == "true"
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert httpx.get(f"{url}/health").status_code == 200
        assert ready(url).status_code == 503
        assert stream.is_alive(), "it runs longer than requests are served"
        stream.assert_whole()
        assert process.wait(SECONDS) == 0
        assert "Traceback" not in log.read_text()


def test_a_second_sigterm_ends_what_runs(tiny_model, tmp_path):
    with serving(tmp_path / "one", tiny_model) as (process, log, url):
        stream = Stream(url, 2000)
        stream.wait_begun()
        process.terminate()
        heard(process, log, "stopping: running requests have")
        assert stream.is_alive()
        process.terminate()
        assert process.wait(30) == 0, "the stream would take 100 s"
        stream.join(SECONDS)
        error, done = stream.lines[-2:]
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the gateway is stopping; try again"
        assert done == "data: [DONE]"


def test_requests_that_take_longer_than_the_drain_end_with_an_error(tiny_model, tmp_path):
    with serving(tmp_path / "one", tiny_model, drain=1.0) as (process, _, url):
        stream = Stream(url, 2000)
        stream.wait_begun()
        process.terminate()
        assert process.wait(60) == 0, "the stream would take 100 s"
        stream.join(SECONDS)
        assert "the gateway is stopping" in stream.lines[-2]


# --- administrators -------------------------------------------------------------------------------------------------


def loralane(url, *arguments):
    """Run a command of an administrator, and return its result or, if it has none, what it says of what it did."""
    command = [sys.executable, "-m", "gateway", *arguments, "--url", url, "--key", ADMIN_KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout or done.stderr


def gateways(url):
    return {each["address"]: each for each in json.loads(loralane(url, "gateways", "ls", "--json"))}


@pytest.fixture
def redis(tmp_path):
    server = PatientValkey(data_dir=tmp_path)
    server.start()
    yield f"{{url: redis://127.0.0.1:{server.port}}}"
    server.stop()


def batch_of(url, lines):
    body = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": completion(100, seed=number)}
        for number in range(lines)
    ]
    text = "\n".join(map(json.dumps, body)).encode()
    with httpx.Client(base_url=f"{url}/v1", headers=HEADERS, timeout=SECONDS) as client:
        file = client.post("/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).json()
        order = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        return client.post("/batches", json=order).json()["id"]


def batch(url, batch_id):
    return httpx.get(f"{url}/v1/batches/{batch_id}", headers=HEADERS, timeout=SECONDS).json()


@pytest.mark.nightly
def test_a_gateway_that_another_one_drains_hands_its_batch_over_and_loses_no_line(tiny_model, tmp_path, redis):
    with (
        serving(tmp_path / "one", tiny_model, redis=redis) as (one, log, url),
        ExitStack() as stack,
    ):
        number_of_lines = 500
        batch_id = batch_of(url, number_of_lines)
        until(lambda: batch(url, batch_id)["request_counts"]["completed"])
        two, _, other = stack.enter_context(serving(tmp_path / "two", tiny_model, redis=redis))
        until(lambda: len(gateways(other)) == 2)
        known = gateways(other)
        assert {each["state"] for each in known.values()} == {"serving"}
        stream = Stream(url, 300)
        stream.wait_begun()
        assert "is draining" in loralane(other, "gateways", "drain", known[url]["id"])
        assert batch(other, batch_id)["status"] == "in_progress"
        assert (gateways(other)[url]["state"], gateways(other)[other]["state"]) == ("draining", "serving")
        assert ready(url).status_code == 503
        stream.assert_whole()
        assert one.poll() is None, "it was not asked to end"
        assert "is draining" in loralane(other, "gateways", "drain", known[url]["id"], "--stop")
        assert one.wait(SECONDS) == 0
        assert "batch_lease_ran_out" not in log.read_text()
        ended = until(lambda: found if (found := batch(other, batch_id))["status"] == "completed" else None)
        assert ended["request_counts"] == {"total": number_of_lines, "completed": number_of_lines, "failed": 0}
        answers = httpx.get(f"{other}/v1/files/{ended['output_file_id']}/content", headers=HEADERS, timeout=SECONDS)
        ids = [json.loads(line)["custom_id"] for line in answers.text.splitlines()]
        assert sorted(ids, key=int) == [f"{number}" for number in range(number_of_lines)]
        assert len(gateways(other)) == 1
        assert two.poll() is None


@pytest.mark.nightly
def test_a_process_of_several_that_is_drained_leaves_its_port_to_the_others(tiny_model, tmp_path):
    with serving(tmp_path / "one", tiny_model, "--gateways", "2") as (process, _, url):
        until(lambda: len(listed(url)) == 2)
        stream = Stream(url, 100)
        stream.wait_begun()
        busy = until(lambda: next((each for each in listed(url) if each["requests"]), None))
        assert "is draining" in loralane(url, "gateways", "drain", busy["id"], "--stop")
        assert {complete(url).status_code for _ in range(20)} == {200}, "new connections go to the other process"
        stream.assert_whole()
        until(lambda: len(found := listed(url)) == 2 and busy["id"] not in {each["id"] for each in found})
        stream = Stream(url, 100)
        stream.wait_begun()
        process.terminate()
        stream.assert_whole()
        assert process.wait(SECONDS) == 0


def listed(url):
    """The gateways that administrators see, without the seconds that a command takes to start."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return httpx.get(f"{url}/admin/v1/gateways", headers=headers, timeout=SECONDS).json()["gateways"]
