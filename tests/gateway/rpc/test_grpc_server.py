"""What surrounds generation: health, reflection, adapter administration, and the server itself."""

import asyncio
import struct

import grpc
import pytest
from fakes import BASE, write_adapter
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_app import MAX_MESSAGE_BYTES, as_key, ask, open_grpc_app, refused, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from engine.pb import engine_pb2 as pb_engine
from gateway.api_schema.adapters import AdapterStatus
from gateway.pb import adapters_pb2 as pb
from gateway.pb.adapters_pb2_grpc import AdapterAdminStub
from gateway.pb.generation_pb2_grpc import GenerationStub
from gateway.requests.readiness import readiness
from gateway.rpc import api as rpc_api
from gateway.rpc import standard
from gateway.rpc.api import SERVICES, GrpcServer

UNKNOWN, SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.ServingStatus.Value(name) for name in ("SERVICE_UNKNOWN", "SERVING", "NOT_SERVING")
)


@pytest.fixture
async def api(tmp_path):
    async with open_grpc_app(tmp_path) as opened:
        yield opened
        await opened.assert_empty()


def stream_by_reflection(port):
    """Services and a streamed text, for a client that knows a port and the name of a method."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        service = descriptor_pool.DescriptorPool(database).FindServiceByName("loralane.v1.Generation")
        method = service.methods_by_name["GenerateStream"]
        request, chunk = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        call = channel.unary_stream(f"/{service.full_name}/{method.name}", request.SerializeToString, chunk.FromString)
        chunks = call(request(model="tiny", prompt="hello", sampling={"max_tokens": 5}), metadata=as_key())
        return database.get_services(), "".join(chunk.choice.text for chunk in chunks)


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_is_found_under_both_of_its_names(api, version):
    service = f"grpc.reflection.{version}.ServerReflection"
    call = api.channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
    services = {one.name for one in (await call.read()).list_services_response.service}
    assert {*SERVICES, "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"} <= services
    call = api.channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)]))
    (text,) = (await call.read()).file_descriptor_response.file_descriptor_proto
    file = descriptor_pb2.FileDescriptorProto.FromString(text)
    assert file.package == f"grpc.reflection.{version}" and (version == "v1alpha") == (b"v1alpha" in text)


async def test_a_client_that_knows_nothing_can_generate(api):
    services, text = await asyncio.to_thread(stream_by_reflection, api.port)
    assert {*SERVICES, "grpc.health.v1.Health"} <= set(services)
    assert text == "Hello"


@pytest.mark.parametrize("service", ["", *SERVICES])
async def test_health_follows_the_engine(api, service):
    request = health_pb2.HealthCheckRequest(service=service)
    watch = api.health.Watch(request)
    assert (await api.health.Check(request)).status == (await watch.read()).status == SERVING
    api.gateway_app.engine.ready = False
    assert (await api.health.Check(request)).status == (await watch.read()).status == NOT_SERVING
    assert (await api.health.List(health_pb2.HealthListRequest())).statuses[service].status == NOT_SERVING


async def test_health_of_an_unknown_service(api):
    request = health_pb2.HealthCheckRequest(service="unknown")
    assert (await refused(api.health.Check(request))).code == "NOT_FOUND"
    assert (await api.health.Watch(request).read()).status == UNKNOWN


async def test_all_health_watches_share_one_poll(api, monkeypatch):
    polled = []

    def counting(models, limiter, model, **more):
        polled.append(model)
        return readiness(models, limiter, model, **more)

    monkeypatch.setattr(rpc_api, "readiness", counting)
    monkeypatch.setattr(standard, "WATCH_SECONDS", 3600)
    services = ("", BASE, "unknown", "loralane.v1.Generation") * 5
    watches = [api.health.Watch(health_pb2.HealthCheckRequest(service=service)) for service in services]
    assert [(await watch.read()).status for watch in watches] == [SERVING, SERVING, UNKNOWN, SERVING] * 5
    assert {"", BASE} <= set(polled) and len(polled) == len(set(polled))
    for watch in watches:
        watch.cancel()
    await until(lambda: not polls())


def polls():
    return [task for task in asyncio.all_tasks() if task.get_name() == "health-poll"]


async def test_health_watches_are_bounded(api, monkeypatch):
    monkeypatch.setattr(standard, "MOST_WATCHES", 2)
    request = health_pb2.HealthCheckRequest()
    watches = [api.health.Watch(request) for _ in range(2)]
    assert [(await watch.read()).status for watch in watches] == [SERVING, SERVING]
    refusal = await refused(api.health.Watch(request).read())
    assert (refusal.code, refusal.message) == ("UNIMPLEMENTED", "this server has 2 Watch calls, its maximum; use Check")
    api.gateway_app.engine.ready = False
    assert [(await watch.read()).status for watch in watches] == [NOT_SERVING, NOT_SERVING]
    for watch in watches:
        watch.cancel()
    await until(lambda: not polls())
    assert (await api.health.Watch(request).read()).status == NOT_SERVING


async def test_watchers_hear_of_the_end_and_do_not_delay_it(api):
    server = GrpcServer(api.gateway_app.services, grace_seconds=600)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        await asyncio.wait_for(server.stop(), 30)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_stopping_lets_running_calls_end(api):
    api.gateway_app.engine.go_on = asyncio.Event()
    server = GrpcServer(api.gateway_app.services, grace_seconds=600)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = GenerationStub(channel).GenerateStream(ask(), metadata=as_key())
        chunks = aiter(call)
        first = (await anext(chunks)).choice.text
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        api.gateway_app.engine.go_on.set()
        assert first + "".join([chunk.choice.text async for chunk in chunks]) == "Hello"
        await asyncio.wait_for(stopping, 30)


async def test_administration_needs_an_administrators_key(api):
    calls = (
        api.admin.Load(pb.LoadAdapterRequest(name="x", path="pirate"), metadata=as_key()),
        api.admin.Unload(pb.UnloadAdapterRequest(name="pirate"), metadata=as_key()),
        api.admin.List(pb.ListAdaptersRequest(), metadata=as_key()),
        api.admin.Reload(pb.ReloadAdapterRequest(name="pirate"), metadata=as_key()),
        api.admin.Pin(pb.PinAdapterRequest(name="pirate"), metadata=as_key()),
        api.admin.Alias(pb.AliasAdapterRequest(name="pirate"), metadata=as_key()),
        api.admin.Allow(pb.AllowTenantsRequest(name="pirate"), metadata=as_key()),
        api.admin.Watch(pb.WatchAdaptersRequest(), metadata=as_key()).read(),
    )
    assert {(await refused(call)).code for call in calls} == {"PERMISSION_DENIED"}
    assert list(api.gateway_app.adapters.records) == ["pirate", "poet"]


async def test_load_list_unload(api):
    load = pb.LoadAdapterRequest(name="more", path="pirate")
    loaded = await api.admin.Load(load, metadata=as_key("admin"))
    assert (loaded.name, loaded.rank, loaded.tier, loaded.pages) == ("more", 8, "resident", 3)
    assert list(loaded.target_modules) == ["q_proj", "v_proj"]
    listed = await api.admin.List(pb.ListAdaptersRequest(), metadata=as_key("admin"))
    assert [(adapter.name, adapter.running) for adapter in listed.adapters] == [("more", 1), ("pirate", 1), ("poet", 1)]
    for name in ("poet", "more"):
        answer = await api.admin.Unload(pb.UnloadAdapterRequest(name=name), metadata=as_key("admin"))
    assert answer.aborted == 0, "another name still serves this version"
    assert list(api.gateway_app.adapters.records) == ["pirate"]


async def test_reload_pin_alias_allow(api, tmp_path):
    admin = {"metadata": as_key("admin")}
    assert not (await api.admin.Reload(pb.ReloadAdapterRequest(name="poet"), **admin)).changed
    old = api.gateway_app.adapters.records["poet"].version
    write_adapter(tmp_path, "poet", "better weights")
    reloaded = await api.admin.Reload(pb.ReloadAdapterRequest(name="poet"), **admin)
    assert reloaded.changed
    assert reloaded.adapter.version == reloaded.adapter.served_version != old
    assert (await api.admin.Pin(pb.PinAdapterRequest(name="poet", pinned=True), **admin)).pinned
    await until(lambda: api.gateway_app.engine.pinned == {reloaded.adapter.version})
    assert list((await api.admin.Alias(pb.AliasAdapterRequest(name="poet", alias="p"), **admin)).aliases) == ["p"]
    removed = pb.AliasAdapterRequest(name="poet", alias="p", remove=True)
    assert list((await api.admin.Alias(removed, **admin)).aliases) == []
    allowed = await api.admin.Allow(pb.AllowTenantsRequest(name="poet", tenants=["globex"]), **admin)
    assert list(allowed.tenants) == ["globex"]


def told(message) -> tuple[dict[str, tuple[str, str]], list[str]]:
    return {adapter.name: (adapter.tier, adapter.version) for adapter in message.adapters}, list(message.removed)


async def test_watching_adapters(api):
    """All of them first; then what changes here, in the registry or in the engine, and nothing else."""
    records, engine = api.gateway_app.adapters.records, api.gateway_app.engine
    watch = api.admin.Watch(pb.WatchAdaptersRequest(interval_seconds=0.1), metadata=as_key("admin"))
    before = {name: ("resident", record.version) for name, record in records.items()}
    assert told(await watch.read()) == (before, [])
    more = await api.gateway_app.adapters.load("more", "poet")
    assert told(await watch.read()) == ({"more": ("resident", more.version)}, [])
    await api.gateway_app.adapters.unload("more")
    assert told(await watch.read()) == ({}, ["more"])
    pirate, poet = records["pirate"].version, records["poet"].version
    engine.picture = pb_engine.EngineStats(
        adapters=[
            pb_engine.AdapterStats(adapter=pirate, state="resident", running=9, hits=3),
            pb_engine.AdapterStats(adapter=poet, state="host"),
        ]
    )
    assert told(await watch.read()) == ({"poet": ("host", poet)}, [])
    watch.cancel()
    await until(lambda: not watching(api))


async def test_a_watch_ends_with_its_client_or_the_server(api):
    server, address = GrpcServer(api.gateway_app.services, grace_seconds=600), "127.0.0.1:{}"
    async with server as port, grpc.aio.insecure_channel(address.format(port)) as channel:
        admin, request = AdapterAdminStub(channel), pb.WatchAdaptersRequest()
        left, stays = (admin.Watch(request, metadata=as_key("admin")) for _ in range(2))
        for watch in (left, stays):
            assert len((await watch.read()).adapters) == 2
        await until(lambda: watching(api) == 2)
        left.cancel()
        await until(lambda: watching(api) == 1)
        await asyncio.wait_for(server.stop(), 30)
        assert await stays.read() is grpc.aio.EOF
    await until(lambda: not watching(api))


def watching(api) -> int:
    """Watches that wait for the registry's next change."""
    return len(api.gateway_app.adapters.next_change._waiters)


@pytest.mark.parametrize("seconds", [-1.0, 0.01, 61.0, float("nan")])
async def test_the_interval_of_a_watch_is_checked(api, seconds):
    request = pb.WatchAdaptersRequest(interval_seconds=seconds)
    refusal = await refused(api.admin.Watch(request, metadata=as_key("admin")).read())
    assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", ["interval_seconds"])


def test_the_message_has_the_fields_of_a_status():
    assert set(pb.Adapter.DESCRIPTOR.fields_by_name) == set(AdapterStatus.__struct_fields__)


async def test_refused_changes_name_the_field(api):
    async def why(call):
        refusal = await refused(call)
        return refusal.code, refusal.reason, refusal.fields

    admin = as_key("admin")
    taken = api.admin.Load(pb.LoadAdapterRequest(name="poet", path="pirate"), metadata=admin)
    assert await why(taken) == ("ALREADY_EXISTS", "ADAPTER_CONFLICT", ["name"])
    outside = api.admin.Load(pb.LoadAdapterRequest(name="more", path="/etc"), metadata=admin)
    assert await why(outside) == ("INVALID_ARGUMENT", "INVALID_REQUEST", ["path"])
    unknown = api.admin.Unload(pb.UnloadAdapterRequest(name="more"), metadata=admin)
    assert await why(unknown) == ("NOT_FOUND", "MODEL_NOT_FOUND", ["model"])


@pytest.mark.parametrize("name", ["a/../b", "t/", "..", ""])
async def test_names_that_mean_something_else_in_a_url_are_refused(name, api):
    calls = (
        (api.admin.Load, pb.LoadAdapterRequest(name=name, path="poet"), "name"),
        (api.admin.Alias, pb.AliasAdapterRequest(name="poet", alias=name), "alias"),
    )
    for method, request, field in calls:
        refusal = await refused(method(request, metadata=as_key("admin")))
        assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", [field])


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9])
async def test_drain_seconds_are_checked(api, seconds):
    request = pb.UnloadAdapterRequest(name="pirate", drain_seconds=seconds)
    refusal = await refused(api.admin.Unload(request, metadata=as_key("admin")))
    assert (refusal.code, refusal.fields) == ("INVALID_ARGUMENT", ["drain_seconds"])
    assert "pirate" in api.gateway_app.adapters.records


async def test_a_load_goes_on_when_its_caller_leaves(api, monkeypatch):
    begun, go_on, load_adapter = asyncio.Event(), asyncio.Event(), api.gateway_app.engine.load_adapter

    async def slowly(path):
        begun.set()
        await go_on.wait()
        return await load_adapter(path)

    monkeypatch.setattr(api.gateway_app.engine, "load_adapter", slowly)
    load = pb.LoadAdapterRequest(name="more", path="pirate")
    call = api.admin.Load(load, metadata=as_key("admin"))
    answer = asyncio.ensure_future(refused(call))
    await begun.wait()
    assert (await refused(api.admin.Load(load, metadata=as_key("admin")))).code == "FAILED_PRECONDITION"
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    go_on.set()
    await until(lambda: "more" in api.gateway_app.adapters.records)


async def test_a_message_too_large_never_reaches_us(api):
    too_large = ask(prompt="x" * MAX_MESSAGE_BYTES)
    assert (await refused(api.generation.Generate(too_large, metadata=as_key()))).code == "RESOURCE_EXHAUSTED"
    assert not api.gateway_app.watcher.records


MAX_CONCURRENT_STREAMS, SETTINGS, PING, GOAWAY, ACK = 3, 4, 6, 7, 1
NUM_PINGS = 10


async def ping_in_a_row(port):
    """Send NUM_PINGS pings of HTTP/2, each after the answer to the last. Return how many were answered, and the
    server's settings by number."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ping = struct.pack(">I B I 8s", 8 << 8 | PING, 0, 0, b"whatever")
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I B I", SETTINGS, 0, 0) + ping)
    answered, settings = 0, {}
    async with asyncio.timeout(30):
        while answered < NUM_PINGS:
            head, flags, _ = struct.unpack(">I B I", await reader.readexactly(9))
            frame = await reader.readexactly(head >> 8)
            if head & 255 == GOAWAY:
                assert b"too_many_pings" in frame
                break
            if head & 255 == SETTINGS and not flags & ACK:
                settings |= dict(struct.iter_unpack(">H I", frame))
            if head & 255 == PING and flags & ACK:
                answered += 1
                writer.write(ping)
    writer.close()
    return answered, settings


async def test_a_connection_has_bounded_calls_and_pings(api, monkeypatch):
    answered, settings = await ping_in_a_row(api.port)
    assert (answered < NUM_PINGS, settings[MAX_CONCURRENT_STREAMS]) == (True, rpc_api.MOST_STREAMS)
    interval = {"grpc.http2.min_ping_interval_without_data_ms": 0}
    assert interval.keys() < dict(rpc_api.KEEPALIVE).keys()
    monkeypatch.setattr(rpc_api, "KEEPALIVE", tuple((dict(rpc_api.KEEPALIVE) | interval).items()))
    async with GrpcServer(api.gateway_app.services) as port:
        assert (await ping_in_a_row(port))[0] == NUM_PINGS


async def test_a_port_in_use_is_an_error(api):
    with pytest.raises(OSError, match="cannot listen"):
        await GrpcServer(api.gateway_app.services, port=api.port).start()
