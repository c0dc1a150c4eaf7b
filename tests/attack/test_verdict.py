"""What the verdict makes of an attack's figures."""

import pytest

from tests.attack.neighbour import Seen
from tests.attack.verdict import Phase, failures

ALONE = Seen(ttft=[0.1] * 200, itl=[0.02] * 200, health=[0.002] * 200)


def phase(**changes):
    calm = {"seen": ALONE, "before": {"gateway": 200 << 20}, "after": {"gateway": 200 << 20}}
    return Phase("a flood", **calm | changes)


def test_an_attack_that_nobody_notices_is_fine():
    slower = Seen(ttft=[0.19] * 200, itl=[0.039] * 200, health=[0.049] * 200)
    assert failures([ALONE], phase(seen=slower, after={"gateway": 219 << 20})) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seen": Seen(ttft=[*[0.1] * 190, *[0.21] * 10])}, "p99 TTFT is 210 ms, without an attack 100 ms"),
        ({"seen": Seen(itl=[*[0.02] * 190, *[0.05] * 10])}, "p99 ITL is 50 ms, without an attack 20 ms"),
        ({"seen": Seen(health=[*[0.002] * 199, 0.06])}, "/health took 60 ms"),
        ({"after": {"gateway": 221 << 20}}, "the RSS of the gateway is 221 MiB, before it was 200"),
        ({"trouble": ["a chat was counted twice"]}, "a chat was counted twice"),
        ({"seen": Seen(failures=["a chat failed"])}, "a chat failed"),
    ],
)
def test_an_attack_that_breaks_a_bound_is_named(changes, words):
    [sentence] = failures([ALONE], phase(**changes))
    assert sentence.startswith("beside a flood: ") and words in sentence


def test_what_an_honest_tenant_costs_is_allowed_twice():
    honest = Seen(ttft=[0.2] * 200, itl=[0.04] * 200, health=[0.002] * 200)
    beside = phase(seen=Seen(ttft=[0.39] * 200, itl=[0.09] * 200))
    [sentence] = failures([ALONE, honest], beside)
    assert "p99 ITL is 90 ms, without an attack 40 ms" in sentence


def test_memory_of_a_process_that_starts_during_an_attack_is_judged_by_the_next():
    assert failures([ALONE], phase(after={"gateway": 200 << 20, "grammar workers": 200 << 20})) == []
