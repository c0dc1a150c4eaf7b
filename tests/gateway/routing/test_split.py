"""Where a request runs: on one replica, or its prompt on one and its answer on another."""

from dataclasses import replace

import pytest

from gateway.routing.decision import Reason
from gateway.routing.news import Ask, News, Role
from gateway.routing.router import Router
from gateway.routing.split import SplitMode, Splitting

FAST, SLOW = 400e9, 0.1e9
IDLE = News(prompt_token_s=25e-6, decode_step_s=0.008)
DECODES = replace(IDLE, decoding=30, decode_step_s=0.010)
PROMPTS = replace(IDLE, prompt_share=0.6)
ASK = Ask(prompt_tokens=8192, output_tokens=256, may_split=True)
PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


def choose(*news, ask=ASK, roles=(), mode=SplitMode.AUTO, bytes_per_s=FAST):
    """Return the names of the replicas that are chosen for the prompt and for the rest, and the reason."""
    router = Router(splitting=Splitting(mode, bytes_per_s, 1e-4, kv_bytes_per_token=131_072, copies=False))
    for number, each in enumerate(news):
        router.hear(router.join(str(number), role=roles[number] if roles else BOTH), each, 0.0)
    decision = router.choose(ask, 0.0)
    return decision.replica.name, decision.decode and decision.decode.name, decision.reason


def test_a_prompt_runs_where_it_delays_no_decodes_and_the_answer_where_no_prompts_delay_it():
    assert choose(DECODES, PROMPTS) == ("1", "0", Reason.SPLIT)


def test_an_idle_replica_serves_all_of_a_request():
    busy = [replace(news, wait_s=0.2) for news in (DECODES, PROMPTS)]
    assert choose(IDLE, *busy) == ("0", None, Reason.LEAST_DELAY)


def test_a_slow_link_or_a_short_answer_keeps_a_request_on_one_replica():
    assert choose(DECODES, PROMPTS, bytes_per_s=1e9)[:2] == ("1", "0")
    assert choose(DECODES, PROMPTS, bytes_per_s=SLOW)[:2] == ("1", None)
    assert choose(DECODES, PROMPTS, ask=ASK._replace(output_tokens=4), bytes_per_s=1e9)[:2] == ("1", None)


def test_what_the_second_replica_holds_is_not_sent():
    router = Router(splitting=Splitting(SplitMode.ALWAYS, 1e9, 1e-4, kv_bytes_per_token=131_072))
    first, second = router.join("0", role=PREFILL), router.join("1", role=DECODE)
    for replica in (first, second):
        replica.hear(IDLE, 0.0)
    ask = ASK._replace(prefix_keys=tuple(range(32)))
    all_of_it = router.decide(ask, 0.0).placing.transfer
    router.learn(second, ask.prefix_keys[:16])
    assert router.decide(ask, 0.0).placing.transfer.arrives_at < 0.6 * all_of_it.arrives_at


def test_transfers_that_are_under_way_delay_the_next():
    router = Router(splitting=Splitting(SplitMode.ALWAYS, 12.5e9, 1e-4, kv_bytes_per_token=131_072))
    first, second = router.join("0", role=PREFILL), router.join("1", role=DECODE)
    for replica in (first, second):
        replica.hear(IDLE, 0.0)
    arrivals = [router.choose(ASK, 0.0).placing.transfer.arrives_at for _ in range(5)]
    sent_s = 8192 * 131_072 / 12.5e9
    assert arrivals[-1] >= 4 * sent_s and arrivals == sorted(arrivals)
    assert (first.sends.until, second.receives.until) == (arrivals[-1], arrivals[-1])


def test_a_link_that_is_busy_keeps_requests_on_one_replica():
    """Each transfer ends before the next request comes, but a link that others need costs more."""

    def split(gap_s):
        router = Router(splitting=Splitting(SplitMode.AUTO, 1.2e9, 1e-4, 131_072, copies=False))
        replicas = [router.join(str(number)) for number in range(2)]
        decisions = []
        for number in range(10):
            for replica, news in zip(replicas, (DECODES, PROMPTS), strict=True):
                replica.hear(news, number * gap_s)
            decisions.append(router.choose(ASK, number * gap_s).decode is not None)
        return sum(decisions)

    assert split(10.0) == 10 > split(1.0) > 0


def test_prompts_keep_away_from_replicas_where_answers_are_to_come():
    """The first answer begins at 0.2 s, long after the next news, which say nothing of it."""
    router = Router(splitting=Splitting(SplitMode.ALWAYS, FAST, 1e-4, 131_072, copies=False))
    replicas = [router.join(str(number)) for number in range(3)]
    for replica in replicas:
        replica.hear(IDLE, 0.0)
    one = router.choose(ASK, 0.0)
    for replica in replicas:
        replica.hear(replace(IDLE, wait_s=0.1 if replica is one.replica else 0.0), 0.1)
    assert (one.decode.decodes(until=0.15), one.decode.decodes(until=0.3)) == (0, 1)
    assert router.choose(ASK, 0.1).replica not in (one.replica, one.decode)
    one.decode.hear(IDLE, 0.4)
    assert one.decode.decodes(until=1.0) == 0


def test_answers_of_requests_that_were_cancelled_are_not_to_come():
    router = Router()
    replica = router.join("0")
    replica.hear(IDLE, 0.0)
    for _ in range(3):
        router.choose(ASK, 0.0)
    assert replica.decodes(until=10.0) == 3
    for _ in range(3):
        router.finish(replica, ASK.lane)
    replica.hear(IDLE, 0.1)
    assert replica.decodes(until=10.0) == 0


def test_an_answer_is_delayed_by_the_prompts_that_are_left_when_it_begins():
    def second(wait_s):
        news = (IDLE, replace(IDLE, wait_s=wait_s), replace(IDLE, decode_step_s=1.06 * IDLE.decode_step_s))
        return choose(*news, roles=(PREFILL, DECODE, DECODE), mode=SplitMode.ALWAYS)[1]

    assert 8192 * IDLE.prompt_token_s > 0.2
    assert (second(0.2), second(0.3)) == ("1", "2")


def test_an_answer_keeps_away_from_a_replica_that_computes_prompts_until_it_begins():
    def second(wait_s):
        news = (IDLE, replace(IDLE, wait_s=wait_s), replace(IDLE, decode_step_s=1.02 * IDLE.decode_step_s))
        return choose(*news, roles=(PREFILL, DECODE, DECODE), mode=SplitMode.ALWAYS)[1]

    assert (second(0.0), second(0.2)) == ("1", "2")


def test_an_answer_leaves_the_replica_of_its_prompt_if_it_is_long_beside_what_that_costs():
    assert choose(IDLE, IDLE)[1:] == ("1", Reason.SPLIT)
    assert choose(IDLE, IDLE, ask=ASK._replace(output_tokens=4))[1:] == (None, Reason.LEAST_DELAY)


def test_the_own_prompt_counts_in_the_share_of_prompts_when_the_answer_begins():
    """A step and the last piece of KV take 11 ms, and the answer 320 ms, or 4 % more after the longer prompt."""
    ask, link = ASK._replace(output_tokens=40), 100e9
    assert choose(IDLE, IDLE, ask=ask, bytes_per_s=link)[1:] == ("1", Reason.SPLIT)
    assert choose(IDLE, IDLE, ask=ask._replace(prompt_tokens=2048), bytes_per_s=link)[1] is None


def test_an_answer_does_not_stay_with_its_prompt_while_other_replicas_compute_many_prompts():
    def second(third):
        return choose(IDLE, IDLE, third, ask=ASK._replace(prompt_tokens=512), roles=(BOTH, DECODE, PREFILL))[1]

    assert (second(IDLE), second(PROMPTS)) == (None, "1")


def test_while_no_replica_knows_what_an_answer_costs_requests_are_split():
    begun = replace(IDLE, decode_step_s=0.0)
    assert choose(begun, begun, bytes_per_s=SLOW)[1:] == ("1", Reason.SPLIT)
    assert choose(IDLE, begun, bytes_per_s=SLOW)[1:] == (None, Reason.LEAST_DELAY)


def test_an_answer_goes_where_free_pages_hold_it_beside_those_to_come():
    """A running request has 8 pages: two answers more fit."""
    almost = replace(IDLE, running=(10, 0), num_pages=100, free_pages=20)
    slower = replace(IDLE, running=(10, 0), num_pages=100, free_pages=90, decode_step_s=2 * IDLE.decode_step_s)

    def seconds(*news):
        router = Router(splitting=Splitting(SplitMode.ALWAYS, FAST, 1e-4, 131_072, copies=False))
        for number, (role, each) in enumerate(zip((PREFILL, DECODE, DECODE), news, strict=True)):
            router.hear(router.join(str(number), role=role), each, 0.0)
        return [router.choose(ASK, 0.0).decode.name for _ in range(3)]

    assert seconds(IDLE, almost, slower) == ["1", "1", "2"]
    assert seconds(IDLE, almost, replace(slower, free_pages=0)) == ["1", "1", "1"], "none has room"
    assert seconds(IDLE, replace(almost, free_pages=90), slower) == ["1", "1", "1"]


def test_a_copy_from_host_memory_delays_the_decodes_there():
    def split(*, copies):
        router = Router(splitting=Splitting(SplitMode.AUTO, 1e9, 1e-4, 131_072, copies))
        for number, news in enumerate((DECODES, PROMPTS)):
            router.join(str(number)).hear(replace(news, copy_bytes_per_s=1e9), 0.0)
        return router.choose(ASK, 0.0).decode is not None

    assert split(copies=False) and not split(copies=True)


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ((PREFILL, DECODE), ("0", "1")),
        ((DECODE, PREFILL), ("1", "0")),
        ((BOTH, PREFILL), ("1", "0")),
        ((DECODE, DECODE), None),
        ((PREFILL, PREFILL), None),
    ],
)
def test_roles_are_kept_and_without_two_a_request_is_not_split(roles, expected):
    first, second, _ = choose(IDLE, IDLE, roles=roles, mode=SplitMode.ALWAYS)
    assert (second and (first, second)) == expected


def test_requests_that_may_not_be_split_are_not():
    for ask in (ASK._replace(may_split=False), ASK._replace(output_tokens=1)):
        assert choose(DECODES, PROMPTS, ask=ask, mode=SplitMode.ALWAYS)[1] is None
    assert choose(DECODES, PROMPTS, mode=SplitMode.NEVER)[1] is None
    assert choose(DECODES, mode=SplitMode.ALWAYS)[1] is None


def test_an_adapter_in_memory_on_both_sides_is_preferred():
    resident = {"lora"}
    ask = ASK._replace(adapter_hash="lora", adapter_bytes=1 << 30)
    news = (PROMPTS, replace(PROMPTS, on_device=resident), DECODES, replace(DECODES, on_device=resident))
    roles = (PREFILL, PREFILL, DECODE, DECODE)
    assert choose(*news, ask=ask, roles=roles, mode=SplitMode.ALWAYS)[:2] == ("1", "3")


def test_both_replicas_count_a_split_request_until_it_has_ended():
    router = Router(splitting=Splitting(SplitMode.ALWAYS, FAST, 1e-4, kv_bytes_per_token=131_072))
    replicas = [router.join(str(number)) for number in range(2)]
    for replica in replicas:
        replica.hear(IDLE, 0.0)
    decision = router.choose(ASK, 0.0)
    assert [replica.unfinished[ASK.lane] for replica in replicas] == [1, 1]
    prompt_s = 8192 * IDLE.prompt_token_s
    assert (decision.replica.prompts_until, decision.decode.prompts_until) == (pytest.approx(prompt_s), 0.0)
