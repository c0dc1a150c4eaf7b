"""The owners of a step's time: every second of every step belongs to the requests that were in it."""

from collections import Counter

import pytest

from engine.core.messages.requests import Lane
from tests.core.virtual import SteppedEngine


def taken(stepped, lane):
    """Return the device seconds of a lane's ended requests. Requests of the batch lane have `batch` in their names."""
    ends = stepped.ends.values()
    return sum(end.device_seconds for end in ends if ("batch" in end.request_id) == (lane is Lane.BATCH))


@pytest.mark.parametrize("overlaps", [False, True])
def test_all_device_time_is_told_to_the_requests_that_took_it(overlaps):
    stepped = SteppedEngine(adapters={"pirate": 4, "poet": 4}, overlaps=overlaps, num_pages=120)
    stepped.learn()
    for number in range(24):
        stepped.batch(f"batch-{number}", 100, 60, adapter_hash=("pirate", "poet", None)[number % 3])
    stepped.step(30)
    for number in range(4):
        stepped.submit(f"chat-{number}", 30, 20, adapter_hash="poet")
        stepped.step(10)
    stepped.finish()
    assert stepped.state.counters.preemptions, "what is computed twice is time too"
    for lane in Lane:
        assert taken(stepped, lane) == pytest.approx(stepped.ledger.busy[lane])


def test_device_time_grows_with_every_token_and_what_makes_it_longer():
    stepped = SteppedEngine()
    stepped.learn()
    seen = Counter()
    for name, prompt, out in (("short", 20, 4), ("long", 20, 40), ("deep", 200, 4)):
        stepped.submit(name, prompt, out)
        told = []
        while name not in stepped.ends:
            told += [
                event.device_seconds for event in stepped.engine.step() if event.tokens and event.request_id == name
            ]
            if len(told) == out:
                break
        assert told == sorted(set(told))
        seen[name] = told[-1]
    assert min(seen["long"], seen["deep"]) > seen["short"] > 0
