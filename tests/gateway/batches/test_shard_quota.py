"""Which shards a gateway holds, of those that wait for tenants' limits and of those that it could claim."""

from types import SimpleNamespace

from gateway.batches.dispatcher import by_tenant_turns
from gateway.batches.tenant_turns import MAX_SHARDS, MAX_TASKS, shard_quota, task_quota


def claimed_in_turns(*tenants: str) -> list[str]:
    """Tenants of the shards of one model that are claimed while each of these tenants has more, in turns."""
    held: list[str] = []
    while True:
        quota = shard_quota(("model", tenant) for tenant in held)
        found = [tenant for tenant in tenants if quota.admits("model", tenant)]
        if not found:
            return held
        held.append(min(found, key=held.count))


def test_a_tenant_alone_leaves_half_of_the_shards_to_others():
    held = claimed_in_turns("acme")
    assert len(held) == MAX_SHARDS / 2
    assert shard_quota(("model", tenant) for tenant in held).admits("model", "globex")
    assert shard_quota(("model", tenant) for tenant in held).admits("other model", "acme")


def test_there_are_never_more_than_the_maximum_and_each_tenant_gets_some():
    held = claimed_in_turns("acme", "globex", "initech")
    assert len(held) <= MAX_SHARDS
    assert {held.count(tenant) for tenant in set(held)} == {MAX_SHARDS // 4}
    many = [f"tenant-{number}" for number in range(2 * MAX_SHARDS)]
    assert claimed_in_turns(*many) == many[:MAX_SHARDS]


def test_each_kind_of_task_has_places_of_its_own_and_a_tenant_leaves_half_of_them():
    held = [("validate", "acme")] * (MAX_TASKS // 2)
    quota = task_quota(held)
    assert not quota.admits("validate", "acme")
    assert quota.admits("validate", "globex") and quota.admits("finalize", "acme") and quota.admits("sweep", "acme")
    full = task_quota([*held, ("validate", "globex"), ("validate", "initech")])
    assert (full.has_room("validate"), full.has_room("finalize")) == (False, True)


def test_the_slow_shards_of_one_tenant_come_after_the_first_one_of_each():
    def slow(tenant: str, seconds: float) -> SimpleNamespace:
        return SimpleNamespace(
            lease=SimpleNamespace(tenant=tenant),
            turns=SimpleNamespace(limit_window=SimpleNamespace(seconds_to_next=seconds)),
        )

    crowd = [slow("acme", seconds) for seconds in (3.0, 1.0, 2.0)]
    single = slow("globex", 50.0)
    assert by_tenant_turns([single, *crowd]) == [crowd[1], single, crowd[2], crowd[0]]
