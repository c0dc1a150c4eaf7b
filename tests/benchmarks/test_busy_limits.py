"""The verdict on limits on a busy machine: every round asked for is judged, and no error is passed over."""

from __future__ import annotations

from collections import Counter
from io import StringIO

import pytest
from rich.console import Console

from benchmarks.busy_limits import FIT, MOST_SECONDS, Round, judged, play

EXACT = Round(FIT, Counter(), 0.5)
LATE = Round(FIT + 1, Counter(), MOST_SECONDS)


def played(asked, rounds):
    """The verdict on rounds that go as given, the last one again and again; and the tenants that played."""
    tenants = []

    def one(number):
        tenants.append(number)
        return rounds[min(number, len(rounds) - 1)]

    return play(asked, one, iter), tenants


def test_late_rounds_are_repeated_with_other_tenants_and_counted():
    verdict, tenants = played(5, [EXACT, LATE, EXACT, LATE, EXACT])
    assert (verdict.passed, verdict.exact, verdict.repeated) == (True, 5, 2)
    assert tenants == list(range(7))
    console = Console(file=StringIO(), width=200)
    console.print(judged(verdict, 3, 6))
    assert [cell.strip() for cell in console.file.getvalue().splitlines()[4].split("│")[1:-1]] == [
        *("3", "6", "5 of 5", "2", "none", f"{MOST_SECONDS:.2f}")
    ]


def test_rounds_that_are_all_late_pass_nothing_and_come_to_an_end():
    verdict, tenants = played(5, [LATE])
    assert (verdict.passed, verdict.exact, verdict.repeated) == (False, 0, 5)
    assert len(tenants) == 10


def test_a_round_in_time_that_admits_another_number_is_not_repeated():
    verdict, tenants = played(3, [EXACT, Round(FIT + 3, Counter(), 0.5), EXACT])
    assert (verdict.passed, verdict.exact, verdict.faults) == (False, 2, "6 admitted: 1x")
    assert len(tenants) == 3


@pytest.mark.parametrize("seconds", [0.5, MOST_SECONDS])
def test_an_error_fails_the_run_even_in_a_late_round(seconds):
    verdict, _ = played(3, [Round(FIT, Counter({503: 2}), seconds), EXACT])
    assert (verdict.passed, verdict.faults) == (False, "status 503: 2x")
