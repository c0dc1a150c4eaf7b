"""Engines that operators add on one gateway, and what other gateways and later ones do with them."""

import asyncio
from dataclasses import replace

import pytest
from local_engines import Answer, ask, until
from patient_valkey import PatientValkey
from redis.asyncio import Redis
from structlog.testing import capture_logs

from engine.rpc.target import EngineTarget, EngineTls
from gateway.core.errors import ApiError, Fault
from gateway.engines.directory import EngineDirectory
from gateway.engines.member import decode_member, member_store
from gateway.engines.pool import EnginePool
from gateway.routing.router import MAX_REPLICAS
from tests.engine.rpc.test_transport import free_port


def address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
async def opened(valkey_server, valkey):
    """Opens directories of gateways over one Valkey."""
    directories, clients = [], []

    async def build(pools, tls=None, server=valkey_server) -> EngineDirectory:
        clients.append(Redis.from_url(server.connection_url))
        directory = EngineDirectory(member_store(clients[-1]), pools, tls or {})
        await directory.start()
        directories.append(directory)
        return directory

    yield build
    for directory in directories:
        await directory.close()
    for client in clients:
        await client.aclose()


async def test_an_engine_that_is_added_on_one_gateway_serves_on_all_and_later_ones(engines, opened):
    one, other = await engines.pool("a"), await engines.pool("a")
    directory, follower = await opened({"m": one}), await opened({"m": other})
    place = address()
    engines.start("b", place)
    member = await directory.add("m", "b", place)
    assert (member.model, member.engine, member.address, member.added_by) == ("m", "b", place, "operator")
    for pool in (one, other):
        await asyncio.wait_for(pool.wait_serving(2), 60)
        assert [(each.name, each.added_by) for each in pool.overviews()] == [("a", "configuration"), ("b", "operator")]
    assert follower.members == directory.members == [member]
    later = await engines.pool("a")
    await opened({"m": later})
    await asyncio.wait_for(later.wait_serving(2), 60)


async def test_requests_of_an_engine_that_is_removed_move_to_others(engines, opened):
    one, other = await engines.pool("a"), await engines.pool("a")
    directory, _ = await opened({"m": one}), await opened({"m": other})
    place = address()
    engines.start("b", place)
    await directory.add("m", "b", place)
    for pool in (one, other):
        await asyncio.wait_for(pool.wait_serving(2), 60)
    answers = [Answer((one, other)[i % 2], ask(f"r{i}", length=200)) for i in range(12)]
    await until(lambda: all(len(answer.tokens) > 10 for answer in answers))
    await directory.remove("m", "b")
    assert list(one.addresses) == ["a"]
    await until(lambda: list(other.addresses) == ["a"])
    for answer in answers:
        await answer.whole()
        assert answer.trial.losses == 0
    assert {"a", "b"} == {engine for answer in answers for engine in answer.engines[:1]}
    with pytest.raises(ApiError, match="was added"):
        await directory.remove("m", "b")


async def test_an_engine_that_was_added_again_at_another_address_is_reached_there(engines, opened):
    one, other = await engines.pool("a"), await engines.pool("a")
    directory, _ = await opened({"m": one}), await opened({"m": other})
    await directory.add("m", "b", address())
    await directory.remove("m", "b")
    place = address()
    engines.start("b", place)
    await directory.add("m", "b", place)
    await asyncio.wait_for(other.wait_serving(2), 60)
    assert other.addresses["b"] == place


async def test_what_cannot_join_is_refused(engines, opened, tmp_path):
    pool = await engines.pool("a")
    directory, second = await opened({"m": pool, "n": EnginePool()}), await opened({})
    place = address()
    await directory.add("m", "b", place)
    await second.add("elsewhere", "x", address())

    async def refused(*args):
        with pytest.raises(ApiError) as caught:
            await directory.add(*args)
        return caught.value

    assert (await refused("m", "b", address())).fault is Fault.ENGINE_CONFLICT
    assert (await refused("m", "a", address())).fault is Fault.ENGINE_CONFLICT
    assert (await refused("n", "c", place)).fault is Fault.ENGINE_CONFLICT
    assert "is 'b' already" in (await refused("n", "c", place)).message
    for name in ("", "a/b", "-b", "a b", "x" * 129):
        assert (await refused("m", name, address())).param == "name"
    for wrong in ("unix:/tmp/socket", "host", "host:0", "gpu2.internal:7001", "0.0.0.0:7001"):
        error = await refused("m", "c", wrong)
        assert (error.fault, error.param) == (Fault.INVALID_REQUEST, "address")
    assert [member.engine for member in directory.members] == ["x", "b"]
    assert list(pool.addresses) == ["a", "b"]


async def test_two_gateways_cannot_add_one_address_at_once(opened):
    one, other = await opened({}), await opened({})
    place = address()
    results = await asyncio.gather(one.add("m", "x", place), other.add("m", "y", place), return_exceptions=True)
    (error,) = [result for result in results if isinstance(result, ApiError)]
    assert error.fault is Fault.ENGINE_CONFLICT


async def test_an_engine_whose_tls_files_are_unusable_is_refused_and_not_kept(engines, opened, tmp_path):
    pool, files = await engines.pool("a"), [tmp_path / name for name in ("ca", "cert", "key")]
    directory = await opened({"m": pool}, {"m": EngineTls(*files)})
    with pytest.raises(ApiError, match="ca") as caught:
        await directory.add("m", "b", "gpu2.internal:7001")
    assert caught.value.param == "address"
    assert not directory.members
    assert list(pool.addresses) == ["a"]


async def test_a_model_has_a_most_of_engines(engines, opened):
    pool = await engines.pool("a")
    for number in range(1, MAX_REPLICAS):
        await pool.add(f"e{number}", EngineTarget(f"127.0.0.1:{number}"))
    with pytest.raises(ApiError, match="at most 64"):
        await (await opened({"m": pool})).add("m", "b", address())


async def test_an_engine_that_the_configuration_names_by_now_is_not_connected_twice(engines, opened):
    place, other = address(), address()
    engines.start(place, place)
    directory = await opened({})
    await directory.add("m", "gpu-2", place)
    await directory.add("m", "a", other)
    pool = await engines.pool("a", place)
    with capture_logs() as logs:
        await opened({"m": pool})
    assert list(pool.addresses) == ["a", place]
    reasons = {entry["member"]: entry["reason"] for entry in logs if entry["event"] == "engine_not_added"}
    assert "has another name in the configuration" in reasons["m/gpu-2"]
    assert "the name 'a' already" in reasons["m/a"]


async def test_without_redis_nothing_changes_and_nothing_is_lost(engines, opened):
    pool = await engines.pool("a")
    server = PatientValkey()
    server.start()
    directory = await opened({"m": pool}, server=server)
    place = address()
    engines.start("b", place)
    await directory.add("m", "b", place)
    await asyncio.wait_for(pool.wait_serving(2), 60)
    server.stop()
    for change in (directory.add("m", "c", address()), directory.remove("m", "b")):
        with pytest.raises(ApiError) as caught:
            await change
        assert caught.value.fault is Fault.REGISTRY_UNAVAILABLE
    assert list(pool.addresses) == ["a", "b"]
    assert pool.overviews()[1].state == "serving"


def test_fields_of_newer_gateways_are_ignored():
    text = b'{"model":"m","engine":"b","address":"x:1","added_by":"ray","created":1.0,"region":"north"}'
    member = decode_member(text, 7)
    assert (member.name, member.aliases, member.generation) == ("m/b", ("x:1",), 7)
    assert replace(member, engine="c").name == "m/c"


async def test_an_engine_that_ray_runs_is_removed_by_its_owner_or_once_it_is_gone(engines, opened):
    pool, place = await engines.pool(), address()
    directory = await opened({"m": pool})
    engines.start("ray-0", place)
    await directory.add("m", "ray-0", place, "ray")
    await asyncio.wait_for(pool.wait_serving(1), 60)
    with pytest.raises(ApiError, match=r"Ray runs 'ray-0'.* drain it"):
        await directory.remove("m", "ray-0")
    await engines.stop("ray-0")
    await until(lambda: pool.overviews()[0].state not in ("serving", "draining"))
    await directory.remove("m", "ray-0")
    engines.start("ray-1", place)
    await directory.add("m", "ray-1", place, "ray")
    await asyncio.wait_for(pool.wait_serving(1), 60)
    await directory.remove("m", "ray-1", "ray")
    assert directory.members == []
