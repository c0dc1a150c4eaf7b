"""Memory that is taken before it is used: all of the pool, unless that is more than there is."""

from unittest.mock import MagicMock

import pytest
import torch

from engine.model import memory
from engine.model.memory import CPU, PIECE, populate, zeros

SIZES = [(3 * PIECE, 4 * PIECE, 1), (3 * PIECE, 2 * PIECE, 0), (9, 99, 0)]


@pytest.mark.parametrize(("size", "free", "provided"), SIZES)
def test_a_pool_is_provided_where_there_is_memory_for_all_of_it(monkeypatch, size, free, provided):
    threads = MagicMock()
    monkeypatch.setattr(memory.threading, "Timer", threads)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: free)
    populate(zeros(size, torch.uint8, CPU))
    assert threads.return_value.start.call_count == provided
