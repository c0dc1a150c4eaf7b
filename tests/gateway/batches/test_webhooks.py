"""Webhooks as a receiver sees them: a real server on loopback, a real Valkey, and everything that can go wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from base64 import b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from openai import InvalidWebhookSignatureError, OpenAI
from patient_valkey import PatientValkey
from receiver import Receiver, bloat, drip, flood, hang, receiving, status
from redis.asyncio import Redis

from gateway.batches.record import Batch, BatchError, NewBatch, Tally, new_batch_id
from gateway.batches.store import BatchStore
from gateway.batches.webhooks.delivery import DAY, DeliveryTiming, delivering
from gateway.batches.webhooks.event import Event
from gateway.batches.webhooks.outbox import Outbox
from gateway.config.file import ConfigError
from gateway.config.webhooks import EVENTS, WebhookConfig
from gateway.config.whole import parse_config
from gateway.redis.client import RedisCalls

SECRET = f"whsec_{b64encode(bytes(range(32))).decode()}"
FAST = DeliveryTiming(poll=0.01, timeout=30.0, lease=60.0, first_retry=0.02, longest_retry=0.05)
HASTY = replace(FAST, timeout=1.0)
"""Settings for receivers that never answer. The timeout suffices for those that do answer, even on a busy machine."""
OUTBOX = "t:webhooks:{acme}"


def endpoint(receiver: Receiver, **options) -> WebhookConfig:
    url = f"http://127.0.0.1:{receiver.port}/hooks/path-secret?token=query-secret"
    return WebhookConfig(url, SECRET, **{"allow_http": True, "allow_private": True, **options})


def batch(number: int) -> str:
    return f"batch_{number:024x}"


async def end(valkey: Redis, number: int = 1, status: str = "completed", age: float = 0.0) -> Event:
    """What the step that ends a job does."""
    seconds, _ = await valkey.time()
    event = Event(status, batch(number), int(seconds - age))
    await valkey.zadd(OUTBOX, {event.encoded: seconds - age})
    return event


@asynccontextmanager
async def courier(valkey: Redis, config: WebhookConfig, timing: DeliveryTiming = FAST, **options):
    counts: Counter[str] = Counter()

    def count(outcome: str) -> None:
        counts[outcome] += 1

    async with delivering(valkey, "t:", {"acme": config}, count, timing=timing, **options):
        yield counts


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def told(valkey: Redis, counts: Counter[str], outcome: str = "delivered", times: int = 1) -> None:
    """Until something has ended so, and nothing waits any more."""
    async with asyncio.timeout(60):
        while counts[outcome] < times or await valkey.zcard(OUTBOX):
            await asyncio.sleep(0.01)


@pytest.fixture
async def receiver():
    async with receiving() as receiver:
        yield receiver


@pytest.mark.parametrize("kind", EVENTS)
async def test_openais_client_verifies_and_reads_every_kind(valkey, receiver, kind):
    event = await end(valkey, status=kind.removeprefix("batch."))
    async with courier(valkey, endpoint(receiver)) as counts:
        await told(valkey, counts)
    [sent] = receiver.received
    assert sent.line == "POST /hooks/path-secret?token=query-secret HTTP/1.1"
    assert json.loads(sent.body) == {
        "id": f"evt_{1:024x}",
        "object": "event",
        "type": kind,
        "created_at": event.ended_at,
        "data": {"id": batch(1)},
    }
    client = OpenAI(api_key="sk-none", webhook_secret=SECRET)
    unwrapped = client.webhooks.unwrap(sent.body, sent.headers)
    assert (unwrapped.type, unwrapped.data.id, unwrapped.id) == (kind, batch(1), sent.id)
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.unwrap(sent.body.replace(b"batch_0", b"batch_1"), sent.headers)
    with pytest.raises(InvalidWebhookSignatureError):
        client.webhooks.unwrap(sent.body, sent.headers | {"webhook-id": "evt_other"})


@pytest.mark.parametrize(
    "badly", [status(500), status(404), status(302, "location: /elsewhere"), status(103), hang, drip, bloat]
)
async def test_what_was_not_received_is_sent_again_under_the_same_id(valkey, receiver, badly):
    receiver.script += [badly, badly]
    await end(valkey)
    async with courier(valkey, endpoint(receiver), HASTY if badly in (hang, drip) else FAST) as counts:
        await told(valkey, counts)
    assert counts == {"failed": 2, "delivered": 1}
    assert receiver.ids == [f"evt_{1:024x}"] * 3
    assert {each.line.split()[1] for each in receiver.received} == {"/hooks/path-secret?token=query-secret"}
    for each in receiver.received:
        OpenAI(api_key="sk-none", webhook_secret=SECRET).webhooks.unwrap(each.body, each.headers)


async def test_an_answer_that_never_ends_is_not_read(valkey, receiver):
    receiver.script += [flood]
    await end(valkey)
    async with courier(valkey, endpoint(receiver)) as counts:
        await told(valkey, counts)
    assert counts == {"delivered": 1}
    assert receiver.connections == 1


async def test_a_receiver_that_is_not_there_yet_is_tried_again(valkey):
    async with receiving() as gone:
        config = endpoint(gone)
    await end(valkey)
    async with courier(valkey, config) as counts:
        await until(lambda: counts["failed"] >= 2)
    assert await valkey.zcard(OUTBOX) == 1


async def test_gone_is_the_end_of_it(valkey, receiver):
    receiver.script += [status(410)]
    await end(valkey)
    with structlog.testing.capture_logs() as logs:
        async with courier(valkey, endpoint(receiver)) as counts:
            await told(valkey, counts, "given_up")
    assert (len(receiver.received), counts) == (1, {"given_up": 1})
    assert [(line["event"], line["log_level"], line["reason"]) for line in logs] == [
        ("webhook_given_up", "error", "http 410")
    ]


async def test_after_three_days_it_is_given_up_loudly_but_never_untried(valkey, receiver):
    receiver.script += [status(503)]
    await end(valkey, 1, age=3 * DAY + 60)
    with structlog.testing.capture_logs() as logs:
        async with courier(valkey, endpoint(receiver)) as counts:
            await told(valkey, counts, "given_up")
            await end(valkey, 2, age=5 * DAY)
            await told(valkey, counts)
    assert counts == {"given_up": 1, "delivered": 1}
    [line] = logs
    assert (line["log_level"], line["batch_id"], line["tenant"]) == ("error", batch(1), "acme")


async def test_a_failure_waits_for_as_long_as_it_is_old(valkey, receiver):
    receiver.script += [status(500)]
    event = await end(valkey, age=1000.0)
    timing = replace(FAST, longest_retry=DeliveryTiming().longest_retry)
    async with courier(valkey, endpoint(receiver), timing) as counts:
        await until(lambda: counts["failed"])
        async with asyncio.timeout(60):
            while (await valkey.zscore(OUTBOX, event.encoded)) - event.ended_at < 1000 + 2 * FAST.lease:
                await asyncio.sleep(0.01)
    due = await valkey.zscore(OUTBOX, event.encoded)
    assert 1400 < due - event.ended_at < 2600


@given(st.floats(0, 4 * DAY))
def test_the_wait_grows_with_age_within_its_bounds(age):
    timing = DeliveryTiming()
    middle = min(max(age, 5.0), 3 * 3600.0)
    assert middle / 2 <= timing.retry_in(age) <= middle * 1.5


async def test_several_gateways_share_the_work_and_none_is_told_twice(valkey, receiver):
    for number in range(60):
        await end(valkey, number)
    one, other, third = (courier(valkey, endpoint(receiver)) for _ in range(3))
    async with one as a, other as b, third as c:
        async with asyncio.timeout(60):
            while await valkey.zcard(OUTBOX):
                await asyncio.sleep(0.01)
    assert sorted(receiver.ids) == [f"evt_{number:024x}" for number in range(60)]
    assert a + b + c == {"delivered": 60}


async def test_a_gateway_killed_after_delivering_leaves_it_to_another_that_uses_the_same_id(
    valkey, valkey_server, receiver, tmp_path
):
    await end(valkey)
    script = Path(__file__).parents[1] / "webhook_courier.py"
    url = endpoint(receiver).url
    words = [sys.executable, script, valkey_server.connection_url, url, SECRET]
    child = await asyncio.create_subprocess_exec(*words)

    async def die(writer: asyncio.StreamWriter) -> None:
        """The receiver has it, and its sender never learns."""
        child.kill()
        await child.wait()
        await status(200)(writer)

    receiver.script += [die]
    try:
        await until(lambda: receiver.received)
        async with courier(valkey, endpoint(receiver)) as counts:
            await told(valkey, counts)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
    assert counts == {"delivered": 1}
    assert receiver.ids == [f"evt_{1:024x}"] * 2
    assert receiver.received[0].body == receiver.received[1].body


async def test_events_that_the_endpoint_did_not_ask_for_are_not_sent(valkey, receiver):
    await end(valkey, 1, "completed")
    await end(valkey, 2, "failed")
    async with courier(valkey, endpoint(receiver, events=("batch.failed",))) as counts:
        await told(valkey, counts)
    assert receiver.ids == [f"evt_{2:024x}"]


async def test_a_receiver_that_hangs_keeps_no_other_tenant_waiting(valkey, receiver):
    await end(valkey)
    await valkey.zadd("t:webhooks:{globex}", {Event("failed", batch(9), 1).encoded: 1})
    receiver.script += [hang]
    patient = replace(FAST, timeout=60.0, lease=120.0)
    async with receiving() as other:
        endpoints = {"acme": endpoint(receiver), "globex": endpoint(other)}
        async with delivering(valkey, "t:", endpoints, lambda outcome: None, timing=patient):
            await until(lambda: receiver.received and other.received)
    assert other.ids == [f"evt_{9:024x}"]


async def test_an_outbox_that_is_away_is_asked_again(tmp_path, receiver):
    server = PatientValkey(port=0, data_dir=tmp_path, unix_socket_path=tmp_path / "v.sock", appendonly="yes")
    server.start()
    client = Redis(unix_socket_path=str(tmp_path / "v.sock"))
    await end(client)
    server.stop()
    try:
        with structlog.testing.capture_logs() as logs:
            async with courier(client, endpoint(receiver)) as counts:
                await until(lambda: logs)
                server.start()
                await until(lambda: counts["delivered"])
    finally:
        server.stop()
        await client.aclose()
    assert [line["event"] for line in logs] == ["webhook_outbox_away"]
    assert receiver.ids == [f"evt_{1:024x}"]


async def test_no_log_has_the_secret_or_what_may_be_one_in_the_url(valkey, receiver):
    receiver.script += [status(500), hang, status(410)]
    await end(valkey)
    config = endpoint(receiver)
    with structlog.testing.capture_logs() as logs:
        async with courier(valkey, config, HASTY) as counts:
            await told(valkey, counts, "given_up")
    text = f"{logs} {config!r}"
    assert len(logs) == 3
    assert not [word for word in (SECRET, SECRET[6:30], "path-secret", "query-secret") if word in text]


# Where it goes


def resolving(monkeypatch, *answers: list[str]) -> list[str]:
    """Names resolve to these, one answer after the other; returns the names that were asked for."""
    asked, left = [], list(answers)
    resolve = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **options):
        if not str(host).endswith(".example"):
            return resolve(host, port, *args, **options)
        asked.append(host)
        found = left.pop(0) if len(left) > 1 else left[0]
        return [(2, 1, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


async def test_a_name_that_leads_inside_is_not_followed(valkey, receiver, monkeypatch):
    resolving(monkeypatch, ["127.0.0.1"], ["1.1.1.1", "127.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"])
    url = f"http://hooks.example:{receiver.port}/"
    await end(valkey)
    with structlog.testing.capture_logs() as logs:
        async with courier(valkey, WebhookConfig(url, SECRET, allow_http=True)) as counts:
            await until(lambda: counts["failed"] >= 4)
    assert receiver.connections == 0
    assert {line["reason"].partition(":")[0] for line in logs} == {"UnsafeUrl"}


async def test_a_name_is_resolved_once_so_that_it_cannot_change_after_the_check(valkey, receiver, monkeypatch):
    asked = resolving(monkeypatch, ["127.0.0.1"], ["169.254.169.254"])
    url = f"http://hooks.example:{receiver.port}/"
    await end(valkey)
    async with courier(valkey, WebhookConfig(url, SECRET, allow_http=True, allow_private=True)) as counts:
        await told(valkey, counts)
    assert (asked, counts) == (["hooks.example"], {"delivered": 1})
    assert receiver.received[0].headers["host"] == f"hooks.example:{receiver.port}"


async def test_another_address_is_tried_where_one_does_not_answer(valkey, receiver, monkeypatch):
    resolving(monkeypatch, ["127.0.0.2", "127.0.0.1"])
    url = f"http://hooks.example:{receiver.port}/"
    await end(valkey)
    async with courier(valkey, WebhookConfig(url, SECRET, allow_http=True, allow_private=True)) as counts:
        await told(valkey, counts)
    assert counts == {"delivered": 1}


async def test_a_name_server_that_does_not_answer_holds_up_no_other_tenant(valkey, receiver, monkeypatch):
    """The process has a single thread for all its other work, such as for resolving names."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    asked, answer, resolve = threading.Event(), threading.Event(), socket.getaddrinfo

    def getaddrinfo(host, *args, **options):
        if host == "slow.example":
            asked.set()
            answer.wait(60)
        return resolve("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    slow = WebhookConfig(f"http://slow.example:{receiver.port}/", SECRET, allow_http=True, allow_private=True)
    counts: Counter[str] = Counter()
    endpoints = {"acme": slow, "globex": endpoint(receiver)}
    event = await end(valkey)
    async with delivering(valkey, "t:", endpoints, lambda outcome: counts.update([outcome]), timing=FAST):
        try:
            await until(asked.is_set)
            await valkey.zadd("t:webhooks:{globex}", {event.encoded: 0})
            await until(lambda: counts["delivered"] == 1)
            assert await valkey.zcard(OUTBOX) == 1
        finally:
            answer.set()
        await told(valkey, counts)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """Return the path of a file with a certificate for hooks.example and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=hooks.example", "-addext", "subjectAltName=DNS:hooks.example", "-days", "30"]
    subprocess.run([*words, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@pytest.mark.parametrize(("host", "fits"), [("hooks.example", True), ("other.example", False)])
async def test_tls_is_held_to_the_name_although_the_address_is_connected_to(
    valkey, certificate, monkeypatch, host, fits
):
    resolving(monkeypatch, ["127.0.0.1"])
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=f"{certificate}.crt")
    await end(valkey)
    async with receiving(serving) as receiver:
        config = WebhookConfig(f"https://{host}:{receiver.port}/", SECRET, allow_private=True)
        with structlog.testing.capture_logs() as logs:
            async with courier(valkey, config, tls=trusting) as counts:
                await until(lambda: counts)
    assert receiver.names[0] == host
    assert counts["delivered"] == fits
    assert len(receiver.received) == fits
    assert fits or "Hostname mismatch" in logs[0]["reason"]


async def test_a_certificate_no_authority_vouches_for_is_refused(valkey, certificate, monkeypatch):
    resolving(monkeypatch, ["127.0.0.1"])
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate)
    await end(valkey)
    async with receiving(serving) as receiver:
        config = WebhookConfig(f"https://hooks.example:{receiver.port}/", SECRET, allow_private=True)
        async with courier(valkey, config) as counts:
            await until(lambda: counts["failed"])
    assert receiver.received == []


# The outbox


def outbox(client: Redis) -> Outbox:
    return Outbox(RedisCalls.without_breaker(client, "t:", 2.0), "acme")


async def test_a_claimed_event_is_no_other_gateways_until_its_time_is_up_and_keeps_its_place(valkey):
    event = await end(valkey)
    one, other = outbox(valkey), outbox(valkey)
    claim = await one.claim(60.0, 10)
    assert (claim.events, claim.pending) == ((event,), 1)
    assert (await other.claim(60.0, 10)).events == ()
    await valkey.zadd(OUTBOX, {event.encoded: claim.now() - 1})  # as if it were
    assert (await other.claim(60.0, 10)).events == (event,)
    await other.remove(event)
    await one.put_off(event, claim.now())
    assert await valkey.zcard(OUTBOX) == 0, "what was delivered does not come back"


async def test_no_more_is_claimed_than_asked_for_the_oldest_first(valkey):
    for number in range(5):
        await end(valkey, number, age=100.0 - number)
    claim = await outbox(valkey).claim(60.0, 2)
    assert [event.batch_id for event in claim.events] == [batch(0), batch(1)]
    assert claim.pending == 5


# The configuration


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"url": "http://hooks.example/"}, "url: the URL must begin with https://"),
        ({"url": "https://127.0.0.1/secret"}, "url: 127.0.0.1 is at 127.0.0.1"),
        ({"url": "https://user:secret@hooks.example/"}, "no user"),
        ({"secret": "c2VjcmV0"}, "secret must be whsec_"),
        ({"secret": "whsec_c2VjcmV0"}, "secret must be whsec_ and 24 to 64 bytes"),
        ({"secret": "whsec_not base64 at all"}, "secret must be"),
        ({"events": ("batch.done",)}, "events must be some of"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_without_repeating_secrets(options, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        WebhookConfig(**{"url": "https://hooks.example/", "secret": SECRET, **options})
    assert "secret" not in str(caught.value).removeprefix("secret must be")


def test_the_section_reads_its_secrets_from_the_environment_and_says_where_it_is_wrong():
    def load(entry):
        return parse_config({"batches": {"webhooks": {"acme": entry}}}, {"HOOK": SECRET}, Path("/"))

    url = "https://hooks.example/x"
    config = load({"url": url, "secret": "${HOOK}", "events": ["batch.failed"]})
    assert config.batches.webhooks == {"acme": WebhookConfig(url, SECRET, ("batch.failed",))}
    assert SECRET not in repr(config)
    for entry, reason in (
        ({"url": url, "secret": SECRET}, r"batches.webhooks.acme.secret: write \$\{VARIABLE\}"),
        ({"url": url}, "batches.webhooks.acme.secret: is required"),
        (
            {"url": url, "secret": "${HOOK}", "event": []},
            "webhooks.acme.event: unknown key; did you mean events",
        ),
        ({"url": "ftp://x", "secret": "${HOOK}"}, "batches.webhooks.acme: url: the URL must begin with https://"),
        ({"url": url, "secret": "${OTHER}"}, "OTHER is not set"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            load(entry)
        assert SECRET not in str(caught.value)


# The step that ends a job


@pytest.fixture
async def ending(valkey):
    """Brings a new batch to its end in some way; returns it."""
    store = BatchStore(valkey, prefix="t:", webhook_tenants={"acme"})

    async def claimed(task: str):
        lease = await store.claim("me")
        assert lease is not None
        assert lease.task == task
        return lease

    async def end_of(how: str, tenant: str = "acme", window: str = "24h") -> Batch:
        new = NewBatch(new_batch_id(), tenant, "key", "/v1/completions", "file-1", window)
        await store.create(new, 100)
        lease = await claimed("validate")
        if how == "failed":
            await store.invalid(lease, [BatchError("invalid_json", "no")])
            return await store.get(tenant, new.id)
        await store.validated(lease, 1)
        if how == "completed":
            shard = await claimed("shard")
            await store.commit(shard, ["part"], [0], Tally(completed=1))
            await store.release(shard)
        else:
            await store.cancel(tenant, new.id)
        assert await store.finished(await claimed("finalize"), None, None)
        return await store.get(tenant, new.id)

    return end_of


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
async def test_the_end_of_a_batch_is_told(valkey, receiver, ending, how):
    batch = await ending(how)
    assert batch.status == how
    async with courier(valkey, endpoint(receiver)) as counts:
        await told(valkey, counts)
    told_of = json.loads(receiver.received[0].body)
    assert (told_of["type"], told_of["data"]["id"]) == (f"batch.{how}", batch.id)
    assert told_of["created_at"] == batch.times[f"{how}_at"]


async def test_events_of_a_tenant_without_an_endpoint_are_not_kept(valkey, ending):
    await ending("failed", tenant="globex")
    assert await valkey.keys("t:webhooks*") == []
