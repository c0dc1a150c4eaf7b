"""Restarts that an engine is asked for."""

import threading

from engine.rpc.news import Draining


class BusyEngine:
    """An engine that always has requests."""

    def __init__(self):
        self.stopped = threading.Event()

    def clock(self):
        return 0.0

    def look(self, question):
        return True

    def stop(self):
        self.stopped.set()


def test_a_second_restart_with_fewer_seconds_shortens_the_first():
    engine = BusyEngine()
    draining = Draining(engine)
    draining.begin(stop=True, seconds=3600)
    draining.begin(stop=False, seconds=0)  # a drain leaves the restart as it is
    assert draining._until == 3600
    draining.begin(stop=True, seconds=0)
    assert engine.stopped.wait(60)


def test_a_drain_that_a_signal_began_cannot_be_ended():
    engine = BusyEngine()
    draining = Draining(engine)
    draining.begin(stop=True, seconds=3600)
    assert draining.end() and not draining.is_on
    draining.begin(stop=True, seconds=3600, final=True)
    assert not draining.end() and draining.is_on
    draining.begin(stop=True, seconds=0)
    assert engine.stopped.wait(60)
