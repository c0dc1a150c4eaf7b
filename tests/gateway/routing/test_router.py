"""The router: homes of adapters, overflow, prefixes, sessions, batch work, stale news, replicas that come and go."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from engine.core.messages.requests import Lane
from gateway.routing.decision import NoReplica, Reason
from gateway.routing.news import Ask, News
from gateway.routing.placement import ROUND_S, wanted_replicas
from gateway.routing.prefixes import PREFIX_TOKENS, prefix_keys
from gateway.routing.router import BOUND, STALE_S, STICKY_S, Router
from gateway.routing.sessions import MOST_OF_TENANT, Sessions

IDLE = News(prompt_token_s=1e-5)
MB = 1_000_000


def make_router(count=4, news=IDLE):
    router = Router()
    for number in range(count):
        router.join(f"replica-{number}").hear(news, 0.0)
    return router


def ask(adapter_hash=None, **values):
    return Ask(**{"prompt_tokens": 500, "adapter_bytes": 100 * MB, "adapter_hash": adapter_hash, **values})


def home_of(router, adapter_hash):
    return router.replicas[router.placement.ranks(adapter_hash)[0]]


def test_requests_of_one_adapter_go_to_its_home_while_it_keeps_up():
    router = make_router()
    decisions = []
    for second in range(10):
        decision = router.choose(ask("adapter"), float(second))
        for replica in router.replicas.values():
            on_device = {"adapter"} if replica is decision.replica else set()
            replica.hear(replace(IDLE, on_device=on_device), float(second))
        decisions.append(decision)
    assert {decision.replica.name for decision in decisions} == {home_of(router, "adapter").name}
    assert [decision.reason for decision in decisions] == [Reason.HOME] + [Reason.RESIDENT] * 9


def test_adapters_are_spread_over_all_replicas():
    router = make_router(8)
    homes = Counter(home_of(router, f"adapter-{number}").name for number in range(4000))
    assert len(homes) == 8
    assert max(homes.values()) < 1.2 * min(homes.values())


def test_a_request_overflows_when_its_home_is_slower_than_a_load_elsewhere():
    router = make_router()
    home = home_of(router, "adapter")
    home.hear(replace(IDLE, on_device={"adapter"}, wait_s=30.0), 0.0)
    decision = router.choose(ask("adapter"), 0.0)
    assert decision.replica is not home
    assert decision.reason is Reason.OVERFLOW


def test_a_request_waits_at_home_rather_than_loading_its_adapter_elsewhere_for_little():
    router = make_router()
    home = home_of(router, "adapter")
    home.hear(replace(IDLE, on_device={"adapter"}, wait_s=0.05), 0.0)
    assert router.choose(ask("adapter"), 0.0).replica is home


def test_what_was_sent_since_the_news_counts_until_the_next_news():
    router = make_router(2)
    first = router.choose(ask(prompt_tokens=10_000), 0.0).replica
    second = router.choose(ask(prompt_tokens=10_000), 0.0).replica
    assert second is not first
    first.hear(IDLE, 0.1)
    assert router.choose(ask(), 0.1).replica is first


def test_a_replica_is_believed_to_work_on_between_its_news():
    router = make_router(2)
    first, second = router.replicas.values()
    first.hear(replace(IDLE, wait_s=0.3), 0.0)
    second.hear(replace(IDLE, wait_s=0.2), 0.2)
    assert router.decide(ask(), 0.2).replica is first, "0.1 s of what waited there is left"


def test_a_silent_replica_is_not_believed_to_work_on_for_long():
    router = make_router(2)
    silent, busy = router.replicas.values()
    silent.hear(replace(IDLE, wait_s=1.0), 0.0)
    busy.hear(replace(IDLE, wait_s=0.4), 2.0)
    assert router.decide(ask(), 2.0).replica is busy


def test_a_replica_that_has_only_begun_to_work_costs_as_much_as_the_fastest_other():
    """At no cost, it would get all of these requests until it tells its own."""
    router = Router()
    known, slow, begun = (router.join(name) for name in ("known", "slow", "begun"))
    router.hear(known, replace(IDLE, decode_step_s=0.01), 0.0)
    router.hear(slow, News(prompt_token_s=2e-5, decode_step_s=0.02), 0.0)
    router.hear(begun, News(), 0.0)
    assert (begun.news.prompt_token_s, begun.news.decode_step_s) == (1e-5, 0.01)
    taken = Counter(router.choose(ask(prompt_tokens=10_000), 0.0).replica.name for _ in range(5))
    assert taken == {"known": 2, "slow": 1, "begun": 2}
    router.hear(begun, News(prompt_token_s=3e-5, decode_step_s=0.03), 0.1)
    assert (begun.news.prompt_token_s, begun.news.decode_step_s) == (3e-5, 0.03)


def test_an_adapter_gets_more_replicas_at_once_and_loses_them_after_three_quiet_rounds():
    router, now = make_router(8), 0.0

    def play_round(adapter_hash):
        nonlocal now
        for _ in range(100):
            router.choose(ask(adapter_hash), now)
        now += ROUND_S
        router.tick(now)

    router.tick(now)
    for _ in range(3):
        play_round("hot")
    assert router.placement.replicas("hot") == 8
    replicas = []
    for _ in range(40):
        play_round("other")
        replicas.append(router.placement.replicas("hot"))
    assert replicas[0] == 8
    assert replicas[-1] == 1
    assert all(replicas[i] - replicas[i + 1] in (0, 1) for i in range(39))
    changes = [i for i in range(39) if replicas[i] != replicas[i + 1]]
    assert all(later - earlier >= 3 for earlier, later in pairwise(changes))


def test_a_request_goes_where_its_prefix_is_unless_the_wait_costs_more_than_computing_it():
    router = make_router()
    tokens = tuple(range(4 * PREFIX_TOKENS))
    keyed = ask(prompt_tokens=len(tokens), prefix_keys=prefix_keys(tokens, None))
    holder = router.choose(keyed, 0.0).replica
    for replica in router.replicas.values():
        replica.hear(IDLE, 0.0)
    decision = router.choose(keyed, 0.0)
    assert (decision.replica, decision.reason, decision.cached_tokens) == (holder, Reason.PREFIX, len(tokens))
    holder.hear(replace(IDLE, wait_s=2 * len(tokens) * IDLE.prompt_token_s), 0.0)
    assert router.choose(keyed, 0.0).replica is not holder


def test_prefixes_of_other_adapters_and_realms_have_other_keys():
    tokens = tuple(range(PREFIX_TOKENS + 5))
    keys = {prefix_keys(tokens, adapter, realm) for adapter in (None, "a", "b") for realm in ("", "x", "y")}
    assert len(keys) == 9
    assert all(len(key) == 1 for key in keys)
    assert prefix_keys(tokens[:-6], None) == ()


def test_prefixes_before_an_activated_adapter_begins_have_the_base_models_keys():
    tokens = tuple(range(3 * PREFIX_TOKENS))
    base, size = prefix_keys(tokens, None), PREFIX_TOKENS
    shared = {begin: prefix_keys(tokens, "a", "", begin) for begin in (0, 5, size - 1, size, size + 1, 3 * size)}
    same = {begin: sum(map(int.__eq__, keys, base)) for begin, keys in shared.items()}
    assert same == {0: 0, 5: 0, size - 1: 0, size: 1, size + 1: 1, 3 * size: 3}
    assert len(set(shared.values())) == len(shared)


def test_a_session_stays_on_its_replica_until_it_drains():
    router = make_router()
    first = router.choose(ask(session="chat"), 0.0).replica
    first.hear(replace(IDLE, wait_s=0.9 * STICKY_S), 0.0)
    decision = router.choose(ask(session="chat"), 0.0)
    assert (decision.replica, decision.reason) == (first, Reason.SESSION)
    first.draining = True
    moved = router.choose(ask(session="chat"), 0.0).replica
    assert moved is not first
    first.draining = False
    assert router.choose(ask(session="chat"), 0.0).replica is moved


@pytest.mark.parametrize("lane", Lane)
def test_one_session_does_not_pin_more_load_to_a_replica_than_its_share(lane):
    router = make_router(news=replace(IDLE, prompt_token_s=1e-3))
    for number in range(40):
        router.choose(ask(session="chat", lane=lane, prompt_tokens=400), 0.0)
        counts = [replica.unfinished[lane] for replica in router.replicas.values()]
        assert max(counts) <= BOUND * (number + 1 + len(counts)) / len(counts) + STICKY_S / 0.4


def test_a_session_leaves_a_replica_whose_news_are_stale_while_others_tell():
    router = make_router()
    first = router.choose(ask(session="chat"), 0.0).replica
    for replica in router.replicas.values():
        if replica is not first:
            replica.hear(IDLE, STALE_S + 1)
    assert router.choose(ask(session="chat"), STALE_S + 1).replica is not first
    assert router.choose(ask(session="chat"), 3 * STALE_S).reason is Reason.SESSION


def test_a_tenant_with_many_sessions_makes_the_router_forget_its_own_only():
    router = make_router()
    first = router.choose(ask(session="chat", tenant="acme"), 0.0).replica
    for replica in router.replicas.values():
        replica.hear(replace(IDLE, wait_s=0.9 * STICKY_S if replica is first else 0.0), 0.0)
    for number in range(MOST_OF_TENANT + 1):
        router._sessions.put("globex", f"chat-{number}", first.index)
    assert router._sessions.get("globex", "chat-0") is None
    assert router._sessions.get("globex", "chat-1") == first.index
    assert router.choose(ask(session="chat", tenant="acme"), 0.0).replica is first
    assert router.choose(ask(session="chat", tenant="globex"), 0.0).replica is not first


def test_the_sessions_of_all_tenants_together_are_bounded(monkeypatch):
    monkeypatch.setattr("gateway.routing.sessions.MOST_SESSIONS", 10)
    sessions = Sessions()
    for number in range(30):
        sessions.put(f"tenant-{number % 3}", f"chat-{number}", number)
    assert len(sessions) == 10
    assert sessions.get("tenant-2", "chat-29") == 29
    sessions.leave(29)
    assert sessions.get("tenant-2", "chat-29") is None


@pytest.mark.parametrize("adapter_hash", [None, "adapter"])
def test_no_replica_gets_more_than_its_bounded_share_of_batch_work(adapter_hash):
    router = make_router()
    for number in range(200):
        router.choose(ask(adapter_hash, lane=Lane.BATCH), 0.0)
        counts = [replica.unfinished[Lane.BATCH] for replica in router.replicas.values()]
        assert max(counts) <= BOUND * (number + 1 + len(counts)) / len(counts)


def test_batch_work_of_an_adapter_goes_home_while_there_is_room():
    router = make_router()
    for number in range(40):
        name = f"adapter-{number}"
        decision = router.choose(ask(name, lane=Lane.BATCH), 0.0)
        router.finish(decision.replica, Lane.BATCH)
        assert decision.replica is home_of(router, name)


def test_batch_work_without_an_adapter_goes_where_interactive_work_is_light():
    router = make_router()
    for replica in router.replicas.values():
        replica.hear(replace(IDLE, wait_s=1.0 + replica.index), 0.0)
    router.replicas[2].hear(IDLE, 0.0)
    assert router.choose(ask(lane=Lane.BATCH), 0.0).replica is router.replicas[2]


def test_stale_news_degrade_to_the_rendezvous_rank_and_not_to_an_error():
    router = make_router()
    decision = router.choose(ask("adapter"), STALE_S + 1)
    assert (decision.replica, decision.reason) == (home_of(router, "adapter"), Reason.STALE)


def test_a_replica_whose_news_are_stale_is_left_out_while_others_tell():
    router = make_router()
    home = home_of(router, "adapter")
    for replica in router.replicas.values():
        if replica is not home:
            replica.hear(IDLE, 10.0)
    assert router.choose(ask("adapter"), 10.0).replica is not home


def test_a_replica_that_leaves_moves_its_own_adapters_only():
    router = make_router(8)
    names = [f"adapter-{number}" for number in range(500)]
    before = {name: home_of(router, name) for name in names}
    router.leave(router.replicas[3])
    after = {name: home_of(router, name) for name in names}
    assert all(after[name] is home or home.name == "replica-3" for name, home in before.items())
    joined = router.join("replica-3")
    assert joined.index == 3
    assert {name: home_of(router, name).name for name in names} == {n: home.name for n, home in before.items()}


def test_no_decision_names_a_replica_that_drains_or_left():
    router = make_router(3)
    router.replicas[0].draining = True
    router.leave(router.replicas[1])
    assert router.choose(ask("adapter", session="chat"), 0.0).replica.name == "replica-2"
    router.replicas[2].draining = True
    with pytest.raises(NoReplica):
        router.choose(ask("adapter"), 0.0)


def test_prefixes_and_sessions_of_a_replica_that_left_are_forgotten():
    router = make_router(2)
    tokens = tuple(range(PREFIX_TOKENS))
    keyed = ask(prefix_keys=prefix_keys(tokens, None), session="chat")
    gone = router.choose(keyed, 0.0).replica
    router.leave(gone)
    router.join("fresh").hear(IDLE, 0.0)
    decision = router.choose(keyed, 0.0)
    assert (decision.cached_tokens, decision.reason) == (0, Reason.LEAST_DELAY)


def test_the_least_recently_used_prefixes_are_forgotten():
    router = Router()
    for name in ("one", "two"):
        router.join(name, 2).hear(IDLE, 0.0)
    replica = router.replicas[0]
    for key in (1, 2, 1, 3):
        router.prefixes.add(replica.index, (key,))
    assert [bool(router.prefixes.matches((key,))) for key in (1, 2, 3)] == [True, False, True]


@pytest.mark.parametrize(
    ("share", "num_replicas", "wanted"),
    [(0.0, 8, 1), (0.01, 8, 1), (0.03, 8, 2), (0.4, 8, 8), (1.0, 1, 1), (0.02, 64, 8), (0.12, 64, 16), (0.9, 64, 64)],
)
def test_how_many_replicas_an_adapter_gets(share, num_replicas, wanted):
    assert wanted_replicas(share, num_replicas) == wanted
