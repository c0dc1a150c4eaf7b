"""Traces of requests: what spans contain, what they never contain, and what they cost while tracing is off."""

import asyncio
import gzip
import io
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from fakes import GatewayApp, build_gateway_app
from grpc_app import as_key, ask
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from records import make_record

from engine.core.messages.requests import Lane
from engine.process.lossy_log import write_last_lines
from gateway.config.file import ConfigError
from gateway.config.sections import ObservabilityConfig, TracesConfig
from gateway.core.trace_context import Ingress, TraceContext
from gateway.observe.request_log import RequestLog
from gateway.observe.setup import open_observers
from gateway.observe.tracing import Tracing, collector
from gateway.pb.generation_pb2_grpc import GenerationStub
from gateway.requests.record import RequestRecord
from gateway.rpc.api import GrpcServer

CHAT = {"model": "poet", "messages": [{"role": "user", "content": "a private question"}]}
PATH = "/v1/chat/completions"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = Ingress(PATH, TraceContext(TRACE_ID, SPAN_ID, sampled=True))
NOW = 1_000_000_000.0


class Kept:
    """Spans that were exported, by name."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        # The records' clock says 100 s when the world's says NOW.
        self.tracing = Tracing(
            SimpleSpanProcessor(self.exporter), ratio, clock=lambda: 100.0, wall_ns=lambda: int(NOW * 1e9)
        )

    @property
    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def times(self):
        """Start and end of each, in seconds on the records' clock."""
        return {
            name: (span.start_time / 1e9 - NOW + 100, span.end_time / 1e9 - NOW + 100)
            for name, span in self.spans.items()
        }


@pytest.fixture
def kept() -> Kept:
    return Kept()


def record(**fields) -> RequestRecord:
    known = {"ingress": Ingress(PATH), "started": 90.0, "ended": 99.0, "lane": Lane.BATCH, "finish": "stop"}
    return make_record(**known | fields)


def served(**fields) -> RequestRecord:
    """A request that went all the way."""
    times = {"reserving": 90.25, "reserved": 90.5, "submitted": 91.0, "admitted": 94.0, "first_token": 95.0}
    counts = {"prompt_tokens": 7, "completion_tokens": 5, "reserved_tokens": 57, "cached": {0: 4}}
    return record(**times, **counts, last_token=98.0, adapter="poet", adapter_hash="f00d", **fields)


def test_every_phase_is_a_child_with_its_own_times(kept):
    kept.tracing.finished(served(adapter_wait=2.0))
    assert kept.times() == {
        "chat poet": (90.0, 99.0),
        "limiter.reserve": (90.25, 90.5),
        "queue": (91.0, 94.0),
        "adapter.load": (91.0, 93.0),
        "prefill": (94.0, 95.0),
        "decode": (95.0, 98.0),
    }
    spans = kept.spans
    parents = {name: span.parent and span.parent.span_id for name, span in spans.items()}
    root, queue = spans["chat poet"].context.span_id, spans["queue"].context.span_id
    children = dict.fromkeys(("limiter.reserve", "queue", "prefill", "decode"), root)
    assert parents == {"chat poet": None, "adapter.load": queue, **children}
    assert len({span.context.trace_id for span in spans.values()}) == 1


def test_a_span_says_what_the_request_was(kept):
    kept.tracing.finished(served())
    root = kept.spans["chat poet"]
    assert root.kind is SpanKind.SERVER
    assert dict(root.attributes) == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "loralane",
        "gen_ai.request.model": "poet",
        "gen_ai.response.id": "1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
        "loralane.request_id": "r",
        "loralane.tenant": "acme",
        "loralane.lane": "batch",
        "loralane.adapter.name": "poet",
        "loralane.adapter.version": "f00d",
        "loralane.reserved_tokens": 57,
    }


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [(200, "", StatusCode.UNSET), (429, "rate_limit_exceeded", StatusCode.UNSET), (503, "preempted", StatusCode.ERROR)],
)
def test_a_fault_of_ours_is_an_error_and_a_callers_is_not(kept, status, code, expected):
    refused = record()
    refused.end("error" if code else "stop", status, code)
    kept.tracing.finished(refused)
    [span] = kept.exporter.get_finished_spans()
    assert (span.status.status_code, span.attributes.get("error.type", "")) == (expected, code)


def test_a_callers_trace_goes_on(kept):
    kept.tracing.finished(served(ingress=CALLER, trace_id=TRACE_ID))
    root = kept.spans["chat poet"]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_caller_decides_whether_its_trace_is_sampled(ratio, sampled):
    kept = Kept(ratio)
    kept.tracing.finished(served(ingress=Ingress(PATH, TraceContext(TRACE_ID, SPAN_ID, sampled))))
    assert bool(kept.spans) == sampled


def test_the_ratio_is_of_traces_that_begin_here():
    kept = Kept(0.5)
    for _ in range(400):
        kept.tracing.finished(record())
    assert 100 < len(kept.exporter.get_finished_spans()) < 300


def test_a_trace_that_begins_here_gives_the_record_its_id(kept):
    new, unsampled = record(), record()
    kept.tracing.finished(new)
    Kept(0.0).tracing.finished(unsampled)
    [span] = kept.exporter.get_finished_spans()
    assert new.trace_id == f"{span.context.trace_id:032x}"
    assert unsampled.trace_id == ""


async def test_http_and_grpc_are_traced_with_nothing_private_in_it(kept, tmp_path):
    log = io.StringIO()
    gateway_app = await build_gateway_app(tmp_path, observers=(kept.tracing, RequestLog(log)))
    traceparent = f"00-{TRACE_ID}-{SPAN_ID}-01"
    async with gateway_app.client() as client:
        await client.post(PATH, json=CHAT, headers={"traceparent": traceparent})
        await client.post(PATH, json={**CHAT, "model": "a private question"})
    server = GrpcServer(gateway_app.services, grace_seconds=0.0)
    async with server as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        message = ask("pirate", prompt="a private question")
        await GenerationStub(channel).Generate(message, metadata=as_key(traceparent=traceparent))
    spans = kept.spans
    assert {"chat poet", "generate_content pirate", "chat", "prefill", "decode"} <= spans.keys()
    assert spans["generate_content pirate"].attributes["rpc.method"] == "loralane.v1.Generation/Generate"
    write_last_lines()
    told = [json.loads(line)["trace_id"] for line in log.getvalue().splitlines()]
    assert told == [TRACE_ID, f"{spans['chat'].context.trace_id:032x}", TRACE_ID]
    served_spans = [span.to_json() for name, span in spans.items() if name != "chat"]  # whose model is what was sent
    assert not [text for text in served_spans if "private" in text or "sk-" in text]


class Collector(ThreadingHTTPServer):
    """Takes spans over OTLP/HTTP, or answers with `status`."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        self.paths: list[str] = []
        self.names: list[str] = []
        self.resources: list[dict[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append({item.key: item.value.string_value for item in group.resource.attributes})
            self.server.names += [span.name for scope in group.scope_spans for span in scope.spans]
        self.server.paths.append(self.path)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(params=[200, 400])
def otlp(request):
    server = Collector(request.param)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def answered(gateway_app: GatewayApp) -> int:
    async with gateway_app.client() as client:
        return (await client.post(PATH, json=CHAT)).status_code


async def test_a_collector_gets_all_spans_whatever_it_answers(otlp, tmp_path):
    config = ObservabilityConfig(request_log=False, traces=TracesConfig(otlp.endpoint + "/"))
    async with open_observers(config) as observers:
        gateway_app = await build_gateway_app(tmp_path, observers=observers)
        assert await answered(gateway_app) == 200
    assert set(otlp.paths) == {"/v1/traces"}
    assert sorted(otlp.names) == ["chat poet", "decode", "limiter.reserve", "prefill", "queue"]
    assert otlp.resources[0]["service.name"] == "loralane"


async def test_requests_do_not_notice_that_no_collector_listens(tmp_path):
    gateway_app = await build_gateway_app(tmp_path, observers=(Tracing(collector("http://127.0.0.1:9"), 1.0),))
    assert [await answered(gateway_app) for _ in range(3)] == [200] * 3


async def test_requests_do_not_notice_an_exporter_that_breaks(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(kept.exporter, "export", None)
    gateway_app = await build_gateway_app(tmp_path, observers=(kept.tracing,))
    assert await answered(gateway_app) == 200
    assert len(gateway_app.watcher.records) == 1


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None  # every import of it fails
import asyncio, gateway.serve.app
from gateway.config.sections import ObservabilityConfig
from gateway.observe.setup import open_observers

async def main():
    async with open_observers(ObservabilityConfig()) as observers:
        print([type(observer).__name__ for observer in observers], "gateway.observe.tracing" in sys.modules)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_without_traces_nothing_of_them_is_imported():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WITHOUT, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"['RequestLog'] False\n")


async def test_traces_without_the_extra_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "gateway.observe.tracing", None)
    with pytest.raises(ConfigError, match=r"loralane\[otel\]"):
        async with open_observers(ObservabilityConfig(traces=TracesConfig("http://127.0.0.1:4318"))):
            pass


@pytest.mark.parametrize(("field", "value"), [("endpoint", "127.0.0.1:4318"), ("ratio", 1.5), ("ratio", -0.1)])
def test_settings_that_cannot_be_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        TracesConfig(**{field: value})
