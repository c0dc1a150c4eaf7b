"""Memory that is taken before it is used: all of the pool, unless that is more than there is."""

import pytest
import torch

from engine.model import memory
from engine.model.memory import CPU, PIECE, populate, zeros


@pytest.mark.parametrize(("size", "free", "provided"), [(3 * PIECE, 3 * PIECE, 1), (3 * PIECE, 2 * PIECE, 0), (1, 9, 0)])
def test_a_pool_is_provided_where_there_is_memory_for_all_of_it(monkeypatch, size, free, provided):
    asked = []
    monkeypatch.setattr(memory, "_provide", asked.append)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: free)
    started = []
    monkeypatch.setattr(memory, "Thread", lambda **options: started.append(options) or Started(options))
    populate(zeros(size, torch.uint8, CPU))
    assert len(asked) == len(started) == provided


class Started:
    """A thread that has done its work when it has been started."""

    def __init__(self, options):
        self.options = options

    def start(self):
        self.options["target"](*self.options["args"])
