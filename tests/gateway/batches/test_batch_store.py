"""The store of batches: what callers see of it, turns, clusters, and a Redis that is away."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from batch_fakes import MovedStore, claimed, running, wanted
from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster

from gateway.api_schema.batches import BatchCounts
from gateway.batches.lease import CONTROL_TASKS, SHARD_SIZE
from gateway.batches.record import BatchError, Tally, new_batch_id, result_file_id, shown_batch
from gateway.batches.store import PAGE, BatchStore
from gateway.batches.tenant_turns import CREATING_SECONDS
from gateway.core.errors import ApiError, Fault
from gateway.redis.connect import connect_cluster


@pytest.fixture
async def store(valkey: Redis) -> MovedStore:
    store = MovedStore(valkey, lease_seconds=15.0, timeout=30.0)
    await store.wait(0)
    return store


async def fault_of(work) -> Fault:
    with pytest.raises(ApiError) as refusal:
        await work
    return refusal.value.fault


async def test_a_batch_as_its_tenant_sees_it_from_beginning_to_end(store):
    new = wanted(metadata={"name": "nightly"}, output_expires_after=3600)
    created = shown_batch(await store.create(new, 1))
    assert (created.status, created.metadata) == ("validating", {"name": "nightly"})
    assert created.expires_at - created.created_at == 3600
    await store.wait(5)
    await store.validated(await claimed(store, "validate"), 2, "a model")
    await store.wait(5)
    shard = await claimed(store, "shard")
    assert shard.seconds_left == 3590
    assert await store.commit(shard, ["part"], [1, 0], Tally(1, 1, 20, 10, 7))
    await store.release(shard)
    finalize = await claimed(store, "finalize")
    assert await store.parts(finalize) == ["part"]
    assert shown_batch(await store.get("acme", new.id)).status == "finalizing"
    assert await store.finished(finalize, "file-a", None)
    ended = shown_batch(await store.get("acme", new.id))
    times = {
        name: when - created.created_at
        for name, when in msgspec.structs.asdict(ended).items()
        if name.endswith("_at") and when
    }
    assert times == {"created_at": 0, "expires_at": 3600, "in_progress_at": 5, "finalizing_at": 10, "completed_at": 10}
    assert (ended.status, ended.model, ended.output_file_id) == ("completed", "a model", "file-a")
    assert ended.request_counts == BatchCounts(total=2, completed=1, failed=1)
    assert ended.usage.total_tokens == 27
    assert ended.usage.input_tokens_details.cached_tokens == 10


async def test_a_batch_that_is_refused_says_why(store):
    batch = await store.create(wanted(), 1)
    errors = [BatchError("invalid_json_line", "this line is not valid JSON", None, 49_999)]
    assert await store.invalid(await claimed(store, "validate"), errors)
    shown = shown_batch(await store.get("acme", batch.id))
    told = {"code": "invalid_json_line", "message": "this line is not valid JSON", "param": None, "line": 49_999}
    assert (shown.status, msgspec.to_builtins(shown.errors)) == ("failed", {"object": "list", "data": [told]})


async def test_other_tenants_have_no_such_batch(store):
    batch = await store.create(wanted("acme"), 1)
    assert await fault_of(store.get("globex", batch.id)) is Fault.BATCH_NOT_FOUND
    assert await fault_of(store.cancel("globex", batch.id)) is Fault.BATCH_NOT_FOUND
    assert await store.list("globex") == ([], False)
    assert await fault_of(store.list("globex", after=batch.id)) is Fault.INVALID_REQUEST


async def test_a_list_goes_from_the_newest_page_by_page(store):
    ids = []
    for _ in range(5):
        await store.wait(1)
        ids.append((await store.create(wanted(), 10)).id)
    first, more = await store.list("acme", limit=2)
    last, no_more = await store.list("acme", after=first[-1].id, limit=3)
    assert [batch.id for batch in first + last] == ids[::-1]
    assert (more, no_more) == (True, False)


async def test_what_is_forgotten_leaves_the_list(store, valkey):
    kept, forgotten = [await store.create(wanted(), 10) for _ in range(2)]
    await valkey.delete(f"loralane:batch:{{acme}}:{forgotten.id}")
    found, _ = await store.list("acme")
    assert [batch.id for batch in found] == [kept.id]
    assert await valkey.zcard("loralane:batches:{acme}") == 1


async def test_a_list_may_have_forgotten_more_than_it_remembers(store, valkey, monkeypatch):
    read, rounds = store._read, []

    async def counted(tenant, ids):
        rounds.append(len(ids))
        return await read(tenant, ids)

    monkeypatch.setattr(store, "_read", counted)
    kept = await store.create(wanted(), 10)
    await valkey.zadd("loralane:batches:{acme}", {f"batch_{number:024x}": number for number in range(2500)})
    found, more = await store.list("acme", after=kept.id, limit=1)
    assert (found, more, sum(rounds)) == ([], False, 2500)
    assert len(rounds) < 20, "most rounds read 256 records"


async def test_a_batch_is_remembered_for_so_long_after_its_end(store, valkey):
    batch = await running(store, 1)
    await store.cancel("acme", batch.id)
    await store.finished(await claimed(store, "finalize"), None, None)
    key = f"loralane:batch:{{acme}}:{batch.id}"
    assert await valkey.pttl(key) == -1, "nothing is forgotten that is not swept"
    assert await store.swept(await claimed(store, "sweep"))
    assert 29 * 86_400 < await valkey.ttl(key) <= 30 * 86_400
    assert await valkey.zcard("loralane:batchindex:{batches}") == 0


async def test_of_a_tenants_batches_the_newest_are_remembered_and_all_that_have_work(store, valkey, monkeypatch):
    monkeypatch.setattr("gateway.batches.store.MAX_REMEMBERED", 2)
    ids = []
    for number in range(5):
        await store.wait(1)
        batch = await store.create(wanted(window="1h" if number else "20d"), 10)  # the first is the least urgent
        ids.append(batch.id)
        if not number:
            continue
        await store.cancel("acme", batch.id)
        await store.finished(await claimed(store, "finalize"), None, None)
        await store.swept(await claimed(store, "sweep"))
    found, _ = await store.list("acme")
    assert [batch.id for batch in found] == [ids[4], ids[3], ids[0]], "the oldest has not ended"
    assert await fault_of(store.get("acme", ids[1])) is Fault.BATCH_NOT_FOUND
    assert await valkey.zcard("loralane:batches:{acme}") == 3


async def test_tenants_take_turns_while_windows_are_alike(store):
    for tenant, window in (("acme", "24h"), ("globex", "23h")):
        await running(store, 3 * SHARD_SIZE, tenant=tenant, window=window)
    turns = [(await claimed(store, "shard")).tenant for _ in range(6)]
    assert sorted(turns[:2]) == sorted(turns[2:4]) == sorted(turns[4:]) == ["acme", "globex"]


async def test_who_has_much_less_time_left_goes_first(store):
    for tenant, window in (("acme", "24h"), ("globex", "1h"), ("acme", "30m")):
        await running(store, 2 * SHARD_SIZE, tenant=tenant, window=window)
    windows = [(await claimed(store, "shard")).batch.completion_window for _ in range(6)]
    assert windows == ["30m", "30m", "1h", "1h", "24h", "24h"]


async def test_small_tasks_need_not_wait_behind_lines(store):
    await running(store, 2 * SHARD_SIZE, window="1h")
    late = await store.create(wanted("globex", "24h"), 1)
    assert (await store.claim("me")).task == "shard"
    assert (await store.claim("me", CONTROL_TASKS)).batch_id == late.id


async def test_work_is_found_behind_pages_of_batches_that_have_none(store):
    for number in range(PAGE + 5):
        await store.create(wanted("acme", "1h"), PAGE * 2)
        assert (await store.claim("me")).task == "validate", number
    last = await store.create(wanted("globex", "24h"), 1)
    assert (await store.claim("me")).batch_id == last.id
    assert await store.claim("me") is None


async def test_an_entry_without_a_batch_leaves_the_index_when_it_must_be_dead(store, valkey):
    """The gateway that made the entry may still be about to create the batch; until then the entry stays."""
    index = "loralane:batchindex:{batches}"
    await valkey.zadd(index, {f"acme/{new_batch_id()}": store.now_ms / 1000 + 60})
    await store.wait(60 + CREATING_SECONDS)
    assert (await store.claim("me"), await valkey.zcard(index)) == (None, 1)
    await store.wait(1)
    assert (await store.claim("me"), await valkey.zcard(index)) == (None, 0)


async def test_who_died_between_sweeping_and_leaving_the_index_leaves_it_to_others(store, valkey):
    batch = await running(store, 1)
    entry = f"acme/{batch.id}"
    await store.cancel("acme", batch.id)
    await store.finished(await claimed(store, "finalize"), None, None)
    await store.swept(await claimed(store, "sweep"))
    await valkey.zadd("loralane:batchindex:{batches}", {entry: store.now_ms / 1000 + 3600})
    assert (await store.claim("me"), await valkey.zcard("loralane:batchindex:{batches}")) == (None, 0)


async def test_a_bug_in_a_commit_changes_nothing(store, valkey):
    batch = await running(store, 2 * SHARD_SIZE)
    shard = await claimed(store, "shard")
    await store.commit(shard, ["one"], [0, 3], Tally(completed=2))
    for positions in ([1, 2, 3], [4, 4], [5, SHARD_SIZE]):
        with pytest.raises(ValueError, match="are not batch_"):
            await store.commit(shard, ["two"], positions, Tally(completed=3))
    assert await valkey.bitcount(f"loralane:batchbits:{{acme}}:{batch.id}") == 2
    assert (await store.get("acme", batch.id)).tally == Tally(completed=2)


async def test_what_counts_is_never_called_lost(store):
    await running(store, 8)
    shard = await claimed(store, "shard")
    assert await store.commit(shard, ["part"], [0], Tally(completed=1)), "but the answer does not arrive"
    await store.wait(15)
    await claimed(store, "shard")
    assert await store.commit(shard, ["part"], [0], Tally(completed=1)), "or the objects would be deleted"
    assert not await store.commit(shard, ["late"], [1], Tally(completed=1))


async def test_a_shard_that_rests_does_not_hold_up_the_end(store):
    batch = await running(store, SHARD_SIZE + 8)
    first, second = await claimed(store, "shard"), await claimed(store, "shard")
    await store.release(first, 60)
    await store.cancel(batch.tenant, batch.id)
    assert await store.claim("me", {"finalize"}) is None, "the other may still commit"
    await store.release(second, 60)
    await claimed(store, "finalize")


async def test_a_shard_is_claimed_for_the_models_of_its_open_lines(store):
    batch = await store.create(wanted(), 1)
    await store.validated(await claimed(store, "validate"), 200, None, [("a", 130), ("gone", 60), ("b", 10)])

    async def shard_for(**models: bool) -> int | None:
        """Claim a shard, and return its number."""
        named = {"a": False, "b": False, "": False, **models}
        lease = await store.claim("me", {"shard"}, models=lambda tenant: named)
        leases.append(lease)
        return lease and lease.shard

    leases = []
    assert (await store.get("acme", batch.id)).model_lines == (("a", 130), ("gone", 60), ("b", 10))
    assert await shard_for() is None
    assert await shard_for(b=True) == 1
    await store.commit(leases[-1], ["part"], range(190, 200), Tally(completed=10))
    await store.release(leases[-1])
    assert await shard_for(b=True) is None, "its lines are answered"
    assert await shard_for(**{"": True}) == 1, "models that are not named"
    await store.release(leases[-1])
    assert [await shard_for(a=True) for _ in range(3)] == [0, 1, None]


async def test_a_shard_that_was_answered_but_not_released_waits_for_no_model(store):
    batch = await store.create(wanted(), 1)
    await store.validated(await claimed(store, "validate"), 1, None, [("a", 1)])
    await store.commit(await claimed(store, "shard"), ["part"], [0], Tally(completed=1))
    await store.wait(16)
    orphan = await store.claim("me", {"shard"}, models=lambda tenant: {"": True, "a": False})
    await store.release(orphan)
    assert (await claimed(store, "finalize")).batch_id == batch.id


async def test_cancelling_before_validation_leaves_no_lines(store):
    batch = await store.create(wanted(), 1)
    validating = await claimed(store, "validate")
    assert (await store.cancel("acme", batch.id)).status == "cancelling"
    assert await store.renew([validating]) == {validating: "ending"}
    assert await store.claim("me") is None, "the worker that validates has until the end of the lease"
    assert await store.validated(validating, 10)
    finalize = await claimed(store, "finalize")
    assert (finalize.last, finalize.batch.outcome) == (0, "cancelled")


async def test_a_window_that_ends_while_no_worker_is_awake(store):
    batch = await running(store, 10, window="90s")
    shard = await claimed(store, "shard")
    await store.commit(shard, ["part"], [2], Tally(completed=1))
    await store.wait(1_000_000)
    assert await store.renew([shard]) == {shard: "ending"}
    finalize = await claimed(store, "finalize")
    assert (finalize.batch.outcome, list(finalize.open_positions())) == ("expired", [0, 1, *range(3, 10)])
    assert not await store.commit(shard, ["late"], [3], Tally(completed=1))
    await store.finished(finalize, "file-a", "file-b")
    ended = await store.get("acme", batch.id)
    assert (ended.status, ended.expired_at) == ("expired", store.now_ms // 1000)


async def test_all_lines_answered_is_completed_however_late_it_is_noticed(store):
    await running(store, 1, window="10s")
    shard = await claimed(store, "shard")
    await store.commit(shard, ["part"], [0], Tally(completed=1))
    await store.wait(100)
    assert (await claimed(store, "finalize")).batch.outcome == "completed"


async def test_who_finalizes_too_slowly_does_not_end_what_another_ends(store):
    batch = await running(store, 1)
    await store.cancel("acme", batch.id)
    slow = await claimed(store, "finalize")
    await store.wait(16)
    quick = await claimed(store, "finalize")
    assert not await store.finished(slow, "file-a", None)
    assert (await store.get("acme", batch.id)).status == "cancelling"
    assert await store.finished(quick, None, "file-b")
    assert not await store.finished(quick, None, "file-c")
    ended = await store.get("acme", batch.id)
    assert (ended.output_file_id, ended.error_file_id) == (None, "file-b")


async def test_finalizing_again_has_begun_when_it_began_first(store):
    batch = await running(store, 1, window="10s")
    await store.wait(20)
    await claimed(store, "finalize")
    began = store.now_ms // 1000
    await store.wait(20)
    await claimed(store, "finalize")
    assert (await store.get("acme", batch.id)).finalizing_at == began


async def test_a_batch_that_is_being_cancelled_does_not_fail(store):
    batch = await store.create(wanted(), 1)
    validating = await claimed(store, "validate")
    await store.cancel("acme", batch.id)
    assert await store.invalid(validating, [BatchError("empty_file", "there is nothing")])
    await store.finished(await claimed(store, "finalize"), None, None)
    assert (await store.get("acme", batch.id)).status == "cancelled"


async def test_fences_grow_even_if_redis_forgets_its_last_second(store, valkey):
    batch = await running(store, 1)
    before = await claimed(store, "shard")
    await store.wait(16)
    await valkey.hdel(f"loralane:batch:{{acme}}:{batch.id}", "fence")
    assert (await claimed(store, "shard")).fence > before.fence


async def test_one_of_many_gateways_gets_a_task(valkey):
    stores = [BatchStore(valkey, timeout=30.0) for _ in range(5)]
    await running(stores[0], 20 * SHARD_SIZE)
    leases = await asyncio.gather(*(stores[number % 5].claim(f"gateway {number}") for number in range(30)))
    shards = [lease.shard for lease in leases if lease]
    assert sorted(shards) == list(range(20))


async def test_every_call_works_across_slots(cluster_ports):
    async with connect_cluster(f"redis://127.0.0.1:{cluster_ports[0]}") as client:
        await client.flushall(target_nodes=RedisCluster.PRIMARIES)
        store = BatchStore(client, timeout=30.0)
        for number in range(6):
            batch = await running(store, 3, tenant=f"tenant-{number}")
            shard = await claimed(store, "shard")
            assert await store.renew([shard]) == {shard: "yours"}
            assert await store.commit(shard, ["part"], [0, 1], Tally(completed=2))
            await store.release(shard)
            assert (await store.cancel(batch.tenant, batch.id)).status == "cancelling"
            finalize = await claimed(store, "finalize")
            assert await store.parts(finalize) == ["part"]
            assert await store.finished(finalize, result_file_id(batch.id, "output"), None)
            assert await store.swept(await claimed(store, "sweep"))
            [ended], more = await store.list(batch.tenant)
            assert (ended.status, more) == ("cancelled", False)
        assert await store.claim("me") is None


async def test_redis_away_is_ours_to_blame():
    client = Redis.from_url("redis://127.0.0.1:1")
    store = BatchStore(client, timeout=1.0)
    for work in (store.create(wanted(), 1), store.get("acme", new_batch_id()), store.list("acme"), store.claim("me")):
        assert await fault_of(work) is Fault.REGISTRY_UNAVAILABLE
    await client.aclose()


async def test_where_redis_is_stands_in_the_log_and_not_in_an_answer():
    client = Redis.from_url("redis://127.0.0.1:1")
    with pytest.raises(ApiError) as caught:
        await BatchStore(client, timeout=1.0).get("acme", new_batch_id())
    assert "127.0.0.1" not in caught.value.message
    assert "127.0.0.1:1" in caught.value.reason
    await client.aclose()


async def test_an_operator_sees_the_newest_batches_of_all_tenants(store, valkey, monkeypatch):
    monkeypatch.setattr("gateway.batches.store.MAX_NEWEST", 3)
    made = []
    for tenant in ("acme", "globex", "acme", "initech"):
        await store.wait(1)
        made.append(await store.create(wanted(tenant), 10))
    await store.cancel("globex", made[1].id)
    await store.finished(await claimed(store, "finalize"), None, None)
    seen = [(batch.tenant, batch.status) for batch in await store.newest(100)]
    assert seen == [("initech", "validating"), ("acme", "validating"), ("globex", "cancelled")]
    assert [batch.id for batch in await store.newest(1)] == [made[3].id]
    with pytest.raises(ApiError):
        await store.create(wanted("acme"), 1)
    await valkey.delete(f"loralane:batch:{{initech}}:{made[3].id}")
    assert [batch.id for batch in await store.newest(100)] == [made[2].id, made[1].id], (
        "what is refused pushes none out"
    )
