"""What a router knows of the links over which KV moves."""

import pytest

from gateway.routing.news import LEAST_WINDOW_S, LinkUse


def test_the_share_of_a_link_is_that_of_the_last_seconds():
    link = LinkUse()
    assert link.share(0.0) == 0.0
    for second in range(20):
        link.take(0.3, second + 0.3, float(second))
    assert link.share(19.0) == pytest.approx(0.3, rel=0.15)
    assert link.until == 19.3
    assert link.share(60.0) < 0.001


def test_a_first_transfer_is_no_share_of_much():
    link = LinkUse()
    link.take(0.2, 100.2, 100.0)
    assert link.share(100.0) == pytest.approx(0.2 / LEAST_WINDOW_S)
