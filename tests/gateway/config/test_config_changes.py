"""What differs between two configurations, and what of it a running gateway may take up."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.messages.requests import Lane
from gateway.config.changes import changes, leftovers, merge_live_sections, need_restart
from gateway.config.file import ConfigError
from gateway.config.lanes import BatchLane, InteractiveLane, LanesConfig
from gateway.config.sections import AdaptersConfig, AdminConfig, LimitsConfig, RedisConfig, TenantConfig
from gateway.config.whole import Config
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant, hash_key, key_id

OLD, NEW = hash_key("sk-the-old-one"), hash_key("sk-the-new-one")
ACME = Tenant("acme", limits=Limits(tokens_per_minute=1000))
TONE = AdaptersConfig(preload={"tone": Path("/a/tone")})
BEFORE = Config(tenants={"acme": TenantConfig(ACME, (OLD,))}, adapters=TONE)


@pytest.mark.parametrize(
    ("after", "lines"),
    [
        (BEFORE, []),
        (
            replace(BEFORE, lanes=LanesConfig(InteractiveLane(ttft_s=0.25), BatchLane(max_requests=5))),
            ["  lanes.batch.max_requests: 10000 -> 5", "  lanes.interactive.ttft_s: 0.5 -> 0.25"],
        ),
        (replace(BEFORE, limits=LimitsConfig("closed")), ["  limits.when_redis_is_away: degraded -> closed"]),
        (
            replace(BEFORE, adapters=AdaptersConfig((Path("/b"), Path("/a")), {"poet": Path("/a/poet")})),
            [
                "+ adapters.preload.poet: /a/poet",
                "- adapters.preload.tone: /a/tone",
                "  adapters.roots: none -> /a, /b",
            ],
        ),
        (
            replace(
                BEFORE, tenants={"acme": TenantConfig(replace(ACME, limits=Limits(), default_lane=Lane.BATCH), (NEW,))}
            ),
            [
                "  tenants.acme.default_lane: interactive -> batch",
                f"  tenants.acme.keys: {key_id(OLD)} -> {key_id(NEW)}",
                "  tenants.acme.limits.tokens_per_minute: 1000 -> none",
            ],
        ),
    ],
)
def test_every_value_that_differs_is_told_and_no_other(after, lines):
    assert changes(BEFORE, after) == lines


def test_a_new_tenant_is_told_with_all_it_has_and_no_hash_of_a_key():
    after = replace(BEFORE, tenants={**BEFORE.tenants, "globex": TenantConfig(Tenant("globex"), (NEW,))})
    lines = changes(BEFORE, after)
    assert f"+ tenants.globex.keys: {key_id(NEW)}" in lines
    assert "+ tenants.globex.weight: 1.0" in lines
    assert all(line.startswith("+ tenants.globex.") for line in lines)
    assert NEW not in "".join(lines)
    assert leftovers(after, BEFORE) == ["! tenants.globex: stays until it is deleted"]


def test_what_is_named_no_more_stays():
    after = replace(BEFORE, tenants={}, adapters=AdaptersConfig())
    assert leftovers(BEFORE, after) == [
        "! adapters.preload.tone: is served until it is unloaded",
        "! tenants.acme: stays until it is deleted",
    ]


def test_other_sections_need_a_restart_and_stay_as_they_are():
    lanes = LanesConfig(InteractiveLane(7))
    read = replace(BEFORE, redis=RedisConfig("redis://:secret@redis.example:6379"), lanes=lanes)
    assert need_restart(BEFORE, read) == ["redis"]
    assert merge_live_sections(BEFORE, read) == replace(BEFORE, lanes=lanes)


def test_sections_that_contradict_those_that_run_are_refused():
    """The admin's key, in the file that was read, is another's by now; here it is not."""
    running = replace(BEFORE, admin=AdminConfig((NEW,)))
    with pytest.raises(ConfigError, match="share a key"):
        merge_live_sections(running, replace(BEFORE, tenants={"acme": TenantConfig(ACME, (NEW,))}))
