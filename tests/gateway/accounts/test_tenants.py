"""Keys, tenants and what they may use."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest

from engine.core.messages.requests import Lane
from gateway.accounts.mirror import AccountMirror
from gateway.accounts.record import KeyOwner, key_account, tenant_account
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.errors import ApiError, Fault
from gateway.core.limits import Limits
from gateway.core.tenants import ADMIN_TENANT, Principal, Tenant, hash_key

KEY = "sk-a-long-random-string"
ACME = Tenant("acme", adapters=("support-*", "legal"))


def ring() -> AccountMirror:
    mirror = AccountMirror(lambda tenants: None)
    mirror.put(tenant_account(ACME, 0.0))
    mirror.put(key_account(hash_key(KEY), KeyOwner("acme"), 0.0))
    return mirror


def test_a_known_key_authenticates_its_owner():
    principal = ring().authenticate(KEY)
    assert principal.tenant is ACME
    assert hash_key(KEY).startswith(principal.key_id)
    assert len(principal.key_id) == 12


@pytest.mark.parametrize("token", [None, "", "sk-other", KEY + "x", KEY[:-1], hash_key(KEY)])
def test_any_other_key_is_refused_without_being_repeated(token, caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(ApiError) as caught:
        ring().authenticate(token)
    assert caught.value.fault is Fault.INVALID_API_KEY
    assert not token or token not in caught.value.message + caplog.text


def test_no_key_is_known_to_an_empty_ring():
    with pytest.raises(ApiError):
        AccountMirror(lambda tenants: None).authenticate("anything")


def test_the_ring_shows_no_hash_in_its_repr():
    assert hash_key(KEY) not in repr(ring())


@pytest.mark.parametrize(
    ("adapter", "allowed"),
    [("support-v1", True), ("legal", True), ("legal-2", False), ("Support-v1", False), ("", False)],
)
def test_adapters_are_permitted_by_pattern(adapter, allowed):
    assert ACME.may_use(adapter) is allowed


def test_administrators_are_no_tenants_and_tenants_no_administrators():
    viewer = Administrator("eve", AdminRole.VIEWER)
    admin, tenant = Principal(ADMIN_TENANT, "k1", viewer), Principal(ACME, "k2")
    assert (admin.as_admin(AdminRole.VIEWER), tenant.as_tenant()) == (admin, tenant)
    for wrong in (admin.as_tenant, partial(tenant.as_admin, AdminRole.VIEWER)):
        with pytest.raises(ApiError) as caught:
            wrong()
        assert caught.value.fault is Fault.FORBIDDEN


@pytest.mark.parametrize(
    ("default", "highest", "asked", "effective"),
    [
        (Lane.INTERACTIVE, Lane.INTERACTIVE, None, Lane.INTERACTIVE),
        (Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.BATCH, Lane.BATCH),
        (Lane.BATCH, Lane.INTERACTIVE, None, Lane.BATCH),
        (Lane.BATCH, Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.INTERACTIVE),
        (Lane.BATCH, Lane.BATCH, Lane.INTERACTIVE, Lane.BATCH),
    ],
)
def test_a_lane_above_the_highest_is_clamped(default, highest, asked, effective):
    assert Tenant("t", default, highest).effective_lane(asked) is effective


@pytest.mark.parametrize("name", ["", "a b", "{acme}", "a:b", "-x", "x" * 65, "acme\n"])
def test_names_that_would_break_keys_or_logs_are_refused(name):
    with pytest.raises(ValueError, match="tenant name"):
        Tenant(name)


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="above highest_lane"):
        Tenant("t", default_lane=Lane.INTERACTIVE, highest_lane=Lane.BATCH)
    with pytest.raises(ValueError, match="weight"):
        Tenant("t", weight=0.0)
    with pytest.raises(ValueError, match="tokens_per_minute"):
        Limits(tokens_per_minute=0)


def test_a_share_of_a_limit_is_at_least_one():
    assert Limits(10, 1).replica_share(3, "degraded") == Limits(3, 1)
    assert Limits(None, 9, 6, 5, ("tokens_per_day",)).replica_share(3, "degraded") == Limits(
        None, 3, 2, 1, ("tokens_per_day",)
    )


def test_each_limit_may_say_what_becomes_of_it_while_redis_is_away():
    limits = Limits(9, 9, 9, when_redis_is_away={"requests_per_minute": "open", "concurrent_requests": "closed"})
    assert limits.policies("degraded") == {"open", "degraded", "closed"}
    assert limits.replica_share(3, "degraded") == replace(
        limits, requests_per_minute=None, tokens_per_minute=3, concurrent_requests=3
    )
    assert replace(limits, shadow=("concurrent_requests",)).policies("open") == {"open"}
    assert Limits().policies("closed") == set()
    with pytest.raises(ValueError, match="when_redis_is_away: must be one of degraded, closed, open"):
        Limits(when_redis_is_away={"requests_per_minute": "shut"})
