"""One line a request, over both protocols and however it ends; never a key, never what was said."""

import asyncio
import io
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import pytest
import structlog
from fakes import BASE, GatewayApp, build_gateway_app
from grpc_app import as_key, ask, until
from records import make_record

from engine.core.messages.requests import Lane, TokenEvent
from engine.process.lossy_log import write_last_lines
from gateway.observe.request_log import LONGEST_NAME, RequestLog, log_fields
from gateway.pb.generation_pb2_grpc import GenerationStub
from gateway.requests.record import Asked, Charge
from gateway.rpc.api import GrpcServer
from lab.traffic.traces import read_trace

PROMPT, ANSWER = "a private question", "a private answer"
CHAT = {"model": "poet", "messages": [{"role": "user", "content": PROMPT}]}
PATH, MESSAGES = "/v1/chat/completions", "/v1/messages"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"

FIELDS = {
    *("event", "timestamp", "id", "request_id", "trace_id", "route", "tenant", "key", "model"),
    *("member", "member_reason", "adapter", "adapter_version", "lane_asked", "lane"),
    *("limiter_ms", "queue_ms", "ttft_ms", "tpot_ms", "duration_ms", "device_ms"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "reserved_tokens", "actual_tokens"),
    *("proposed_tokens", "accepted_tokens"),
    *("engine", "engine_reason", "engine_moves", "finish", "status", "error", "refused_by", "shadowed"),
}


@dataclass
class Logged:
    """A gateway and its request log."""

    gateway_app: GatewayApp
    out: io.StringIO = field(default_factory=io.StringIO)

    async def post(self, body=CHAT, key="sk-acme", path=PATH, **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.gateway_app.client(key) as client:
            return await client.post(path, content=content, headers=headers)

    def lines(self):
        write_last_lines()
        return [json.loads(line) for line in self.out.getvalue().splitlines()]

    def only(self):
        """The log's only line, which has every field and no secret."""
        [line] = self.lines()
        assert line.keys() == FIELDS
        assert "sk-" not in self.out.getvalue()
        assert "private" not in self.out.getvalue()
        return line


@pytest.fixture
async def logged(tmp_path) -> Logged:
    out = io.StringIO()
    gateway_app = await build_gateway_app(tmp_path, observers=(RequestLog(out),))
    gateway_app.engine.reply = lambda request: ANSWER
    return Logged(gateway_app, out)


@pytest.mark.parametrize("path", [PATH, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ends_well(logged, stream, path):
    body = {**CHAT, "stream": stream, "service_tier": "flex", "max_tokens": 40}
    await logged.post(body, path=path, **{"x-request-id": "r1"})
    line = logged.only()
    told = ("request_id", "route", "tenant", "model", "adapter", "lane_asked", "lane", "finish", "status", "error")
    expected = ("r1", path, "acme", "poet", "poet", "batch", "batch", "stop", 200, None)
    assert tuple(line[name] for name in told) == expected
    assert line["actual_tokens"] == line["prompt_tokens"] + line["completion_tokens"] > len(ANSWER)
    assert line["reserved_tokens"] >= line["actual_tokens"]
    assert None not in [line[name] for name in ("limiter_ms", "queue_ms", "ttft_ms", "tpot_ms", "duration_ms")]
    assert line["adapter_version"] == logged.gateway_app.adapters.records["poet"].version


@pytest.mark.parametrize(
    ("request_", "status", "error", "tenant"),
    [
        ({"key": "sk-wrong"}, 401, "invalid_api_key", None),
        ({"key": None}, 401, "invalid_api_key", None),
        ({"body": b"{private"}, 400, "invalid_json", "acme"),
        ({"body": {"model": BASE, "messages": "private"}}, 400, "invalid_request", "acme"),
        ({"body": {**CHAT, "model": "unknown"}}, 404, "model_not_found", "acme"),
        (
            {"body": {**CHAT, "messages": [{"role": "user", "content": "x" * 9999}]}},
            400,
            "context_length_exceeded",
            "acme",
        ),
        ({"body": b"x" * 2**24}, 413, "request_too_large", "acme"),
    ],
)
@pytest.mark.parametrize("path", [PATH, MESSAGES])
async def test_a_request_that_is_turned_away(logged, request_, status, error, tenant, path):
    request = dict(request_)
    if isinstance(body := request.get("body"), dict):
        request["body"] = body | {"max_tokens": 5}
    assert (await logged.post(path=path, **request)).status_code == status
    line = logged.only()
    assert (line["status"], line["error"], line["tenant"], line["finish"]) == (status, error, tenant, "error")
    assert (line["ttft_ms"], line["actual_tokens"], line["route"]) == (None, 0, path)


async def test_a_limit_that_refuses_is_named_with_its_scope(logged):
    big = {"model": "pirate", "messages": CHAT["messages"], "max_tokens": 200}
    assert (await logged.post(big, key="sk-globex")).status_code == 429
    line = logged.only()
    assert (line["status"], line["error"], line["reserved_tokens"] > 200) == (429, "insufficient_quota", True)
    assert line["refused_by"] == {"scope": "tenant:globex", "limit": "tokens_per_minute", "value": "200"}


async def test_an_engine_that_is_not_there(logged):
    logged.gateway_app.engine.ready = False
    assert (await logged.post()).status_code == 503
    assert (logged.only()["status"], logged.only()["error"]) == (503, "engine_unavailable")


@pytest.mark.parametrize("path", [PATH, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_ours(logged, stream, path):
    logged.gateway_app.engine.reply = None
    await logged.post({**CHAT, "stream": stream, "max_tokens": 40}, path=path)
    assert (logged.only()["status"], logged.only()["error"]) == (500, "internal_error")


async def test_a_fault_while_an_answer_is_put_together(logged, monkeypatch):
    monkeypatch.setattr("gateway.openai.calls.ApiCall.envelope", None)
    assert (await logged.post()).status_code == 500
    assert (logged.only()["status"], logged.only()["error"]) == (500, "internal_error")


async def test_a_fault_before_the_gateway_knows_the_request(logged, monkeypatch):
    monkeypatch.setattr("gateway.openai.calls.chat_request", None)
    assert (await logged.post()).status_code == 500
    assert (logged.only()["status"], logged.only()["tenant"]) == (500, "acme")


@pytest.mark.parametrize("path", [PATH, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves(logged, stream, path):
    logged.gateway_app.engine.go_on = asyncio.Event()
    task = asyncio.create_task(logged.post({**CHAT, "stream": stream, "max_tokens": 40}, path=path))
    await until(lambda: logged.gateway_app.engine.requests)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await until(lambda: logged.gateway_app.gateway.active == 0)
    assert (logged.only()["finish"], logged.only()["status"]) == ("cancelled", 499)


async def test_a_client_that_leaves_while_it_sends(logged):
    async def receive():
        return {"type": "http.disconnect"}

    headers = [(b"authorization", b"Bearer sk-acme")]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
    await logged.gateway_app.app(scope, receive, None)
    assert (logged.only()["finish"], logged.only()["status"], logged.only()["tenant"]) == ("cancelled", 499, "acme")


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        (TRACEPARENT, TRACE_ID),
        (TRACEPARENT.replace("00-4", "01-4") + "-later", TRACE_ID),
        (TRACEPARENT + "-later", None),
        (TRACEPARENT.replace("00-4", "ff-4"), None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (TRACEPARENT.upper(), None),
        ("nonsense", None),
    ],
)
async def test_the_callers_trace_is_told_if_its_header_is_valid(logged, sent, told):
    await logged.post(traceparent=sent)
    assert logged.only()["trace_id"] == told


@pytest.mark.parametrize(
    ("message", "metadata", "status", "error"),
    [
        (ask("poet", prompt=PROMPT), as_key(traceparent=TRACEPARENT, x_request_id="r1"), 200, None),
        (ask("poet", prompt=PROMPT), as_key("wrong"), 401, "invalid_api_key"),
        (ask("unknown", prompt=PROMPT), as_key(), 404, "model_not_found"),
        (ask("", prompt=PROMPT), as_key(), 400, "invalid_request"),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_grpc_is_logged_alike(logged, method, message, metadata, status, error):
    server = GrpcServer(logged.gateway_app.services, grace_seconds=0.0)
    async with server as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = getattr(GenerationStub(channel), method)(message, metadata=metadata)
        with suppress(grpc.aio.AioRpcError):
            await call if method == "Generate" else [chunk async for chunk in call]
    line = logged.only()
    assert (line["route"], line["status"], line["error"]) == (f"/loralane.v1.Generation/{method}", status, error)
    assert (line["trace_id"], line["request_id"]) == (TRACE_ID, "r1") or status != 200


def test_the_log_can_be_read_as_a_trace(tmp_path):
    path = tmp_path / "requests.log"
    whole = {"started": 10.0, "prompt_tokens": 7, "completion_tokens": 5, "ended": 12.0, "finish": "stop"}
    with path.open("w") as file:
        log = RequestLog(file)
        log.finished(make_record(**whole, adapter="poet", cached={0: 4}))
        log.finished(make_record(**whole | {"lane": Lane.BATCH}))
        log.finished(make_record(**whole, error_code="engine_error"))
        write_last_lines()
        file.write('{"event": "engine_ready"}\nWARNING: another line\n')
    poet, base = read_trace(path)
    assert (poet.prompt_tokens, poet.output_tokens, poet.cached_tokens, poet.tenant) == (7, 5, 4, "acme")
    assert (poet.adapter, poet.lane, base.adapter, base.lane) == (0, Lane.INTERACTIVE, -1, Lane.BATCH)


def test_a_request_is_one_line_of_numbers():
    done = make_record(
        adapter="poet",
        adapter_hash="f00d",
        asked=Asked("poet", Lane.BATCH),
        prompt_tokens=7,
        reserved_tokens=57,
        completion_tokens=5,
        cached={0: 4, 1: 2},
        submitted=10.5,
        charge=Charge.DUE,
        admitted=10.75,
        first_token=11.0,
        last_token=13.0,
        ended=14.0,
    )
    done.end("stop", 200)
    out = io.StringIO()
    RequestLog(out).finished(done)
    write_last_lines()
    line = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert (line["queue_ms"], line["ttft_ms"], line["tpot_ms"], line["duration_ms"]) == (250, 1000, 500, 4000)
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (7, 6, 5)
    assert (line["reserved_tokens"], line["actual_tokens"]) == (57, 12)
    assert (line["lane_asked"], line["lane"], line["adapter_version"]) == ("batch", "interactive", "f00d")
    assert (line["event"], line["finish"], line["status"], line["error"]) == ("request", "stop", 200, None)


@pytest.mark.parametrize("again", [False, True])
def test_a_program_that_quiets_its_logs_keeps_the_lines_of_requests(again):
    """Its configuration ends with this test: the second time, the first one's is not found."""
    quiet = structlog.make_filtering_bound_logger(logging.CRITICAL)
    assert structlog.get_config()["wrapper_class"] is not quiet
    out = io.StringIO()
    log = RequestLog(out)
    structlog.configure(processors=[], wrapper_class=quiet, context_class=lambda *values: {"more": 1})
    log.finished(make_record())
    write_last_lines()
    assert json.loads(out.getvalue()).keys() == FIELDS


def test_a_request_that_never_ran_has_no_times():
    refused = make_record()
    refused.end("error", 429, "rate_limit_exceeded", {"scope": "tenant:acme"})
    line = log_fields(refused)
    assert (line["ttft_ms"], line["tpot_ms"], line["actual_tokens"]) == (None, None, 0)
    assert line["refused_by"] == {"scope": "tenant:acme"}


def test_when_the_engine_began_is_what_the_engine_says():
    waited = make_record(submitted=11.0)
    waited.note_event(0, 0, TokenEvent("1-0", wait=2.0, adapter_wait=1.5), now=20.0)
    waited.note_event(0, 0, TokenEvent("1-1", wait=9.0), now=20.5)
    assert (waited.times.queue_seconds, waited.times.adapter_wait) == (2.0, 1.5)
    hasty = make_record(submitted=11.0)
    hasty.note_event(0, 0, TokenEvent("1-0", wait=2.0), now=12.0)
    assert hasty.times.queue_seconds == 1.0, "never after its news has come"


def test_a_name_that_is_no_name_is_clipped():
    assert len(log_fields(make_record(model="x" * 2**20))["model"]) < LONGEST_NAME + 10


async def test_a_watcher_that_fails_keeps_no_caller_from_an_answer(tmp_path):
    class Broken(RequestLog):
        def finished(self, record):
            raise OSError("the disk is full")

    out = io.StringIO()
    logged = Logged(await build_gateway_app(tmp_path, observers=(Broken(), RequestLog(out))), out)
    assert (await logged.post()).status_code == 200
    assert logged.only()["status"] == 200
    assert len(logged.gateway_app.watcher.records) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_short_lines_and_obeys_no_callers_words():
    record = make_record(
        model="pi\x1b[2Jrate\n", started=1.0, ended=2.5, prompt_tokens=1200, completion_tokens=34, finish="stop"
    )
    terminal, file = Terminal(), io.StringIO()
    RequestLog(terminal).finished(record)
    RequestLog(file).finished(record)
    write_last_lines()
    line = terminal.getvalue()
    assert line.endswith(" 200  acme  pi?[2Jrate?  1,200 + 34 tokens  in all 1.50 s  stop\n")
    assert json.loads(file.getvalue())["tenant"] == "acme"
