"""What strangers and tenants send to hurt: every answer comes from the error table, as JSON, with a request id."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import BASE
from raw_http import closed, connect, read, read_one, request, send
from served import Served, served

from gateway.core.errors import Fault
from gateway.http.guard import GuardedProtocol

CHAT = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOLD = {(fault.row.http_status, fault.row.code) for fault in Fault}


class Hasty(GuardedProtocol):
    head_seconds = body_seconds = write_seconds = 0.3
    min_rate = 2**30
    max_unread_bytes = 100_000


@pytest.fixture(scope="module")
def gateway(tmp_path_factory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("adapters"), max_body_bytes=100_000) as running:
        yield running
        running.run(running.gateway_app.assert_empty())


@pytest.fixture(scope="module")
def hasty(tmp_path_factory) -> Iterator[Served]:
    """Loses patience soon, and lets little pile up in the kernel."""
    with served(tmp_path_factory.mktemp("adapters"), protocol=Hasty, send_buffer=4096) as running:
        running.gateway_app.engine.info.max_model_len = 100_000
        yield running


class Unread(Hasty):
    """Timeouts that are long for writing an answer and short for everything else."""

    write_seconds = 60.0


def chat(**fields: Any) -> bytes:
    return json.dumps({**CHAT, **fields}).encode()


def written(text: str) -> bytes:
    """A chat whose last field is written by hand."""
    return chat()[:-1] + b", " + text.encode("utf-8", "surrogatepass") + b"}"


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


TOOL = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]'

NOT_JSON = {
    "nothing": b"",
    "half": chat()[:-1],
    "two documents": chat() + b"{}",
    "broken UTF-8": chat().replace(b"hi", b"\xff\xfe"),
    "broken UTF-8 in a key": b'{"\xc3": 1}',
    "UTF-16": chat().decode().encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf" + chat(),
    "null byte": chat().replace(b"hi", b"h\0i"),
    "lone surrogate": written('"user": "\\ud800"'),
    "NaN": written('"temperature": NaN'),
    "Infinity": written('"temperature": -Infinity'),
    "1e400": written('"temperature": 1e400'),
    "too many digits": written('"seed": ' + "9" * 5000),
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_is_no_json(gateway, name):
    send(gateway, request(NOT_JSON[name])).check(400, "invalid_json")


def test_what_is_nested_too_deep(gateway):
    for levels in (200, 20_000):
        answer = send(gateway, request(written('"user": ' + nested(levels))))
        answer.check(400, None, "nested more than 100 levels deep")


NO_CHAT = {
    "array": (b"[1]", "invalid_type"),
    "text": (b'"model"', "invalid_type"),
    "null": (b"null", "invalid_type"),
    "huge integer": (written('"seed": ' + "9" * 40), "integer_above_max_value"),
    "huge n": (chat(n=10**30), "integer_above_max_value"),
    "n of 129": (chat(n=129), "integer_above_max_value"),
    "no n": (chat(n=0), "integer_below_min_value"),
    "huge max_tokens": (chat(max_tokens=2**31), "integer_above_max_value"),
    "negative max_tokens": (chat(max_tokens=-1), "integer_below_min_value"),
    "fraction of a token": (chat(max_tokens=1.5), "invalid_type"),
    "yes": (chat(max_tokens=True), "invalid_type"),
    "long stop": (chat(stop="x" * 20_000), None),
    "many stops": (chat(stop=["x"] * 17_000), None),
    "empty stop": (chat(stop=[""]), None),
    "stops of numbers": (chat(stop=[1]), "invalid_type"),
    "many stop ids": (chat(stop_token_ids=[5] * 1025), None),
    "stop id beyond": (chat(stop_token_ids=[10**30]), "integer_above_max_value"),
    "stop id below": (chat(stop_token_ids=[-1]), "integer_below_min_value"),
    "many biases": (chat(logit_bias={str(-number): 1 for number in range(1025)}), "integer_below_min_value"),
    "bias of nothing": (chat(logit_bias={"9" * 40: 1}), "integer_above_max_value"),
    "bias too strong": (chat(logit_bias={"5": 1e300}), "decimal_above_max_value"),
    "bias of a word": (chat(logit_bias={"word": 1}), "invalid_type"),
    "many alternatives": (chat(logprobs=True, top_logprobs=10**6), "integer_above_max_value"),
    "many messages": (chat(messages=[{"role": "user", "content": "x"}] * 1000), "context_length_exceeded"),
    "long role": (chat(messages=[{"role": "x" * 50_000, "content": "x"}]), "invalid_value"),
    "deep tools": (written(TOOL % nested(900)), None),
}


@pytest.mark.parametrize("name", NO_CHAT)
def test_what_is_no_chat(gateway, name):
    body, code = NO_CHAT[name]
    send(gateway, request(body)).check(400, code)


def test_many_prompts_times_many_answers(gateway):
    body = json.dumps({"model": BASE, "prompt": ["a"] * 13, "n": 10, "max_tokens": 1}).encode()
    send(gateway, request(body, path="/v1/completions")).check(400, None, "at most 128 answers")


def test_of_keys_given_twice_the_last_counts_for_checks_and_for_use(gateway):
    send(gateway, request(written('"model": "unknown-model"'))).check(404, "model_not_found", "unknown-model")
    send(gateway, request(written('"temperature": 9'))).check(400, "decimal_above_max_value", "temperature")
    assert send(gateway, request(chat(model="unknown-model")[:-1] + b', "model": "tiny"}')).status == 200


def test_a_name_is_said_back_in_part(gateway):
    answer = send(gateway, request(chat(model="x" * 90_000)))
    answer.check(404, "model_not_found")
    assert len(answer.body) < 1000


CHUNKED = "transfer-encoding: chunked"
SMUGGLED = b"0\r\n\r\nGET /admin/v1/check HTTP/1.1\r\nhost: here\r\n\r\n"
NO_HTTP = {
    "noise": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "method": b"EAT / HTTP/1.1\r\nhost: here\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\nhost: here\r\n\r\n",
    "connect": b"CONNECT here:80 HTTP/1.1\r\nhost: here\r\n\r\n",
    "no path": b"GET  HTTP/1.1\r\n\r\n",
    "raw bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\nhost: here\r\n\r\n",
    "null in a header": request(b"", "x-a: a\0b"),
    "name of a header": request(b"", "x a: b"),
    "line feed in a header": b"GET /health HTTP/1.1\r\nx-a: b\nc\r\n\r\n",
    "length and chunks": request(SMUGGLED, "content-length: 4", CHUNKED),
    "chunks and length": request(SMUGGLED, CHUNKED, "content-length: 4"),
    "two lengths": request(b"{}", "content-length: 2", "content-length: 3"),
    "negative length": request(b"{}", "content-length: -2"),
    "hexadecimal length": request(b"{}", "content-length: 0x2"),
    "signed length": request(b"{}", "content-length: +2"),
    "endless length": request(b"{}", "content-length: " + "9" * 40),
    "unknown coding": request(b"{}", "transfer-encoding: chunked, identity"),
    "hidden coding": request(SMUGGLED, "transfer-encoding: xchunked", "content-length: 4"),
    "chunk without a size": request(b"zz\r\n{}\r\n0\r\n\r\n", CHUNKED),
    "endless chunk": request(b"f" * 40 + b"\r\n{}", CHUNKED),
    "chunk longer than it says": request(b"1\r\n{}\r\n0\r\n\r\n", CHUNKED),
}


def small_chunks(body: bytes) -> bytes:
    return request(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n", CHUNKED)


def test_chunks_of_a_byte_each_are_few(gateway):
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "hi" * 1500}]}).encode()
    assert len(body) < GuardedProtocol.free_chunks
    assert b"chunks" not in send(gateway, small_chunks(body)).body
    with connect(gateway) as connection:
        connection.sendall(small_chunks(b" " * 5000))
        answer = read(connection)
        answer.check(400, None)
        assert b"the chunks of a body must have 16 bytes or more each" in answer.body


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http(gateway, name):
    with connect(gateway) as connection:
        connection.sendall(NO_HTTP[name])
        read(connection).check(400, None)
        assert closed(connection)


HEADS = {
    "one long header": request(b"", "x-a: " + "a" * 70_000),
    "an endless header": request(b"", "x-a: " + "a" * 3_000_000)[:-4],
    "many headers": request(b"", *[f"x-{number}: a" for number in range(200)]),
    "a long path": request(b"", path="/" + "a" * 70_000),
    "a long query": request(b"", path="/health?" + "a" * 70_000),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_too_large(gateway, name):
    with connect(gateway) as connection:
        try:
            connection.sendall(HEADS[name])
        except ConnectionError:
            assert name == "an endless header", "only what is never read to its end"
            return
        try:
            answer = read(connection)
        except ConnectionError:
            assert name == "an endless header"
            return
        answer.check(413, "request_too_large", "headers")
        assert closed(connection)


@pytest.mark.parametrize("again", [b"", request(b"", method="GET", path="/health")])
def test_a_body_that_comes_with_the_end_of_its_head_is_not_counted_as_head(gateway, again):
    whole = request(b" " * 90_000 + chat()) + again
    with connect(gateway) as connection:
        connection.sendall(whole[:20])
        time.sleep(0.05)  # so that the head comes in two parts
        connection.sendall(whole[20:])
        assert read(connection).status == 200


@pytest.mark.parametrize("key", ["a" * 60_000, "\xff\xfe", "sk-acme, Bearer sk-acme", "sk-acme sk-acme"])
def test_keys_that_are_none(gateway, key):
    head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {key}\r\ncontent-length: 0\r\n\r\n"
    send(gateway, head.encode("latin-1")).check(401, "invalid_api_key")


@pytest.mark.parametrize("host", ["[", "a b", "//evil", "here:99999999", "\xff"])
@pytest.mark.parametrize(("path", "status"), [("/models/", 404), ("/nothing", 404), ("/v1/models/unknown", 404)])
def test_what_the_caller_calls_us_counts_for_nothing(gateway, host, path, status):
    head = f"GET {path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer sk-acme\r\n\r\n"
    answer = send(gateway, head.encode("latin-1"))
    answer.check(status, "model_not_found" if "/v1/models" in path else None)
    assert "location" not in answer.headers


PATHS = [
    "/v1/models/../../etc/passwd",
    "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/v1/models/%00",
    "/v1/models/pirate%2f..%2fpoet",
    "/v1/models/%ff%fe",
    "/v1/models/%zz",
    "/v1/models//",
    "//v1/models",
    "/v1/%6dodels%2f",
    "/V1/MODELS",
    "/admin/v1/adapters/..%2f..%2fv1%2fmodels",
    "/v1/models/..%2f..%2fadmin%2fv1%2fcheck",
    "/health%00",
    "/%2e%2e/health",
    "http://evil/nothing",
    "*",
]


@pytest.mark.parametrize("path", PATHS)
def test_paths_lead_where_routes_are_and_nowhere_else(gateway, path):
    answer = send(gateway, request(b"", method="GET", path=path))
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"]) in TOLD
    assert answer.status in (400, 403, 404)


@pytest.mark.parametrize("path", ["/v1/models/pirate?x=%00", "/v1/models/", "/v1/models/pirate/", "/health/?x=/"])
def test_a_query_and_one_slash_at_the_end_change_nothing(gateway, path):
    assert send(gateway, request(b"", method="GET", path=path)).status == 200


@pytest.mark.parametrize("body", [b"x" * 100_001, b"186a1\r\n" + b"x" * 100_001 + b"\r\n0\r\n\r\n"])
def test_bodies_that_are_too_large(gateway, body):
    headers = [CHUNKED] if body.startswith(b"186a1") else []
    send(gateway, request(body, *headers)).check(413, "request_too_large")


def test_requests_sent_ahead_are_answered_in_order(gateway):
    with connect(gateway) as connection:
        connection.sendall(request(chat()) * 3 + request(b"", method="GET", path="/version"))
        for _ in range(3):
            assert read_one(connection)["object"] == "chat.completion"
        assert "version" in read_one(connection)


def test_a_bad_request_behind_a_good_one_ends_the_connection(gateway):
    with connect(gateway) as connection:
        connection.sendall(request(chat()) + b"\x00\x01\x02\r\n\r\n")
        assert closed(connection)


def test_a_head_that_never_ends(hasty):
    with connect(hasty) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nx-a: ")
        read(connection).check(400, None, "did not arrive in time")
        assert closed(connection)


def test_a_connection_on_which_nothing_comes(hasty):
    with connect(hasty) as connection:
        assert closed(connection)


def test_a_body_that_never_ends(hasty):
    with connect(hasty) as connection:
        connection.sendall(request(b'{"mod', "content-length: 100"))
        read(connection).check(400, None, "did not arrive in time")
        assert closed(connection)


def test_a_body_that_goes_on_after_it_was_refused(hasty):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000000\r\n\r\n"
    with connect(hasty) as connection:
        connection.sendall(head)
        assert connection.recv(12) == b"HTTP/1.1 401"
        with pytest.raises(ConnectionError):
            connection.sendall(b"x" * 100_000_000)


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_for_an_answer_is_not_late(hasty, stream):
    hasty.gateway_app.engine.pause = 0.2
    try:
        answer = send(hasty, request(chat(stream=stream, max_tokens=4), "connection: close"))
    finally:
        hasty.gateway_app.engine.pause = 0.0
    assert answer.status == 200
    assert b"error" not in answer.body


@pytest.fixture(scope="module")
def patient(tmp_path_factory) -> Iterator[Served]:
    """Waits for its readers, and lets little pile up in the kernel."""
    with served(tmp_path_factory.mktemp("adapters"), protocol=Unread, send_buffer=4096) as running:
        running.gateway_app.engine.info.max_model_len = 100_000
        yield running


def chat_answered_at_length(served: Served, tokens: int) -> bytes:
    """Return the body of a chat whose answer takes about 3 kB for each of `tokens` tokens."""
    served.gateway_app.engine.reply = lambda sent: "x" * tokens
    return chat(max_tokens=tokens + 1000, logprobs=True, top_logprobs=20)


@pytest.mark.parametrize("connection_header", ["close", "keep-alive"])
@pytest.mark.slow
def test_who_reads_late_gets_the_whole_answer(patient, connection_header):
    """After the last of what may come on a connection nothing is late any more, for as long as it takes to write."""
    with connect(patient) as connection:
        connection.sendall(request(chat_answered_at_length(patient, 2000), f"connection: {connection_header}"))
        time.sleep(4 * Unread.body_seconds)
        answer = read(connection)
    assert len(json.loads(answer.body)["choices"][0]["logprobs"]["content"]) == 2000


@pytest.mark.parametrize("connection_header", ["close", "keep-alive"])
@pytest.mark.slow
def test_a_short_answer_does_not_wait_for_its_reader_forever(hasty, connection_header):
    """The answer is too short to fill the transport's buffer, so that the transport never pauses the writer."""
    body = chat_answered_at_length(hasty, 20)
    with connect(hasty, receive_buffer=4096) as connection:
        connection.sendall(request(body, f"connection: {connection_header}"))
        time.sleep(10 * Hasty.write_seconds)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            read(connection)


def test_who_never_reads_is_cut_off_and_settled(hasty):
    gateway_app = hasty.gateway_app
    gateway_app.engine.reply = lambda sent: "x" * 20_000
    fields = {"stream": True, "max_tokens": 30_000, "logprobs": True, "top_logprobs": 20}
    before = len(gateway_app.watcher.records)
    with connect(hasty, receive_buffer=4096) as connection:
        connection.sendall(request(chat(**fields)))
        for _ in range(1000):
            if len(gateway_app.watcher.records) > before:
                break
            time.sleep(0.02)
        record = gateway_app.watcher.records[-1]
    assert (record.outcome.finish, record.outcome.status) == ("cancelled", 499)
    assert 0 < record.work.completion_tokens < 20_000
    hasty.run(gateway_app.assert_empty())
    lease = list(gateway_app.limiter.ends)[-1]
    assert gateway_app.limiter.ends[lease] == [record.work.prompt_tokens + record.work.completion_tokens]
