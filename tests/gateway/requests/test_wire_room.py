"""What requests and unread answers hold at the gateway's ports: one tenant is bounded, and never keeps another out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import ApiError, Fault
from gateway.core.limits import Limits
from gateway.core.tenants import Tenant
from gateway.requests.wire_room import BODY_BYTES, STRANGERS, TENANT_BYTES, WireRoom

FLOOD, NEIGHBOUR = Tenant("flood"), Tenant("neighbour")


def small_room() -> WireRoom:
    return WireRoom(tenant_bytes=100, strangers_bytes=30, process_bytes=150, granted_bytes=10)


def refusal(room: WireRoom, tenant: Tenant | None, num_bytes: int) -> ApiError:
    with pytest.raises(ApiError) as caught, room.hold(tenant) as hold:
        hold.take(num_bytes)
    return caught.value


def test_the_requests_of_one_tenant_are_bounded_together():
    room = small_room()
    with room.hold(FLOOD) as first, room.hold(FLOOD) as second:
        first.take(60)
        second.take(40)
        error = refusal(room, FLOOD, 1)
        assert (error.fault, error.retry_after) == (Fault.RATE_LIMIT_EXCEEDED, 1.0)
        assert "100 bytes here, of at most 100; read your answers" in error.message
        first.free()
        second.take(60)
    assert room.total == room.held("flood") == 0


def test_a_refused_request_holds_what_it_held():
    room = small_room()
    with room.hold(FLOOD) as first, room.hold(FLOOD) as second:
        first.take(90)
        second.take(5)
        with pytest.raises(ApiError):
            second.take(6)
        assert (second.num_bytes, room.held("flood")) == (5, 95)


def test_a_single_request_may_be_larger_than_the_tenants_room():
    room = small_room()
    with room.hold(FLOOD) as hold:
        hold.take(90)
        hold.take(30)


def test_a_tenant_has_room_for_as_many_of_the_longest_bodies_as_it_has_slots():
    room = WireRoom()
    assert room.bound(FLOOD) == room.bound(Tenant("flood", limits=Limits(concurrent_requests=9))) == TENANT_BYTES
    two_slots = Tenant("flood", limits=Limits(concurrent_requests=2))
    with room.hold(two_slots) as first, room.hold(two_slots) as second:
        first.take(BODY_BYTES)
        second.take(BODY_BYTES)
        assert refusal(room, two_slots, 1).fault is Fault.RATE_LIMIT_EXCEEDED


def test_other_callers_never_keep_a_small_request_out():
    room = small_room()
    with room.hold(FLOOD) as flood, room.hold(Tenant("second")) as second, room.hold() as stranger:
        flood.take(100)
        second.take(20)
        stranger.take(30)
        assert refusal(room, NEIGHBOUR, 11).fault is Fault.OVERLOADED
        with room.hold(NEIGHBOUR) as neighbour:
            neighbour.take(10)


def test_strangers_have_little_room_and_tenants_do_not_need_it():
    room = small_room()
    with room.hold() as stranger:
        stranger.take(30)
        assert refusal(room, None, 1).fault is Fault.OVERLOADED
        with room.hold(NEIGHBOUR) as neighbour:
            neighbour.take(50)


def test_a_caller_that_authenticates_takes_its_bytes_along():
    room = small_room()
    with room.hold() as hold:
        hold.take(20)
        hold.identify(FLOOD)
        assert (room.held(STRANGERS), room.held("flood"), room.total) == (0, 20, 20)
        hold.take(80)


def test_unread_answers_cannot_be_refused_and_keep_further_requests_of_their_tenant_out():
    room = small_room()
    with room.hold(FLOOD) as answer:
        answer.count(120)
        assert refusal(room, FLOOD, 1).fault is Fault.RATE_LIMIT_EXCEEDED
        with room.hold(NEIGHBOUR) as neighbour:
            neighbour.take(30)
    answer.free()
    assert room.total == 0


CALLS = st.tuples(st.integers(0, 5), st.sampled_from(["take", "count", "free", "identify"]), st.integers(0, 60))


@given(st.lists(CALLS))
def test_bounds_and_sums_hold_after_any_calls(calls):
    room = small_room()
    tenants = [None, None, FLOOD, FLOOD, NEIGHBOUR, NEIGHBOUR]
    holds = [room.hold(tenant) for tenant in tenants]
    for index, kind, amount in calls:
        hold, before = holds[index], holds[index].num_bytes
        try:
            match kind:
                case "take":
                    hold.take(amount)
                    alone = room.held(hold.tenant) == hold.num_bytes and hold.tenant != STRANGERS
                    assert alone or room.held(hold.tenant) <= (30 if hold.tenant == STRANGERS else 100)
                    assert hold.tenant == STRANGERS or room.held(hold.tenant) <= 10 or room.total <= 150
                case "count":
                    hold.count(amount)
                case "free":
                    hold.free()
                case "identify":
                    hold.identify(FLOOD)
        except ApiError:
            assert hold.num_bytes == before
        for name in {hold.tenant for hold in holds}:
            assert room.held(name) == sum(hold.num_bytes for hold in holds if hold.tenant == name)
        assert room.total == sum(hold.num_bytes for hold in holds)
    for hold in holds:
        hold.free()
    assert room.total == 0 and not room._held
