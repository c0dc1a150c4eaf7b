"""Memory that is taken before it is used: all of the pool, unless that is more than there is."""

from unittest.mock import MagicMock

import pytest
import torch

from engine.model.memory import allocation as memory
from engine.model.memory.allocation import CPU, PIECE, _control_group_room, populate, zeros

SIZES = [(3 * PIECE, 4 * PIECE, 1), (3 * PIECE, 2 * PIECE, 0), (9, 99, 0)]


@pytest.mark.parametrize(("size", "free", "provided"), SIZES)
def test_a_pool_is_provided_where_there_is_memory_for_all_of_it(monkeypatch, size, free, provided):
    threads = MagicMock()
    monkeypatch.setattr(memory.threading, "Timer", threads)
    monkeypatch.setattr(memory, "free_host_bytes", lambda: free)
    populate(zeros(size, torch.uint8, CPU))
    assert threads.return_value.start.call_count == provided


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({"memory.max": "100", "memory.current": "90", "memory.stat": "anon 30\nactive_file 20\ninactive_file 35"}, 65),
        ({"memory.max": "100", "memory.current": "120", "memory.stat": "anon 120"}, 0),
        ({"memory.max": "100", "memory.current": "90"}, 10),
        ({"memory.max": "max", "memory.current": "90"}, 1000),
        ({}, 1000),
    ],
)
def test_files_that_are_cached_are_free_memory_of_a_control_group(tmp_path, files, room):
    """After weights that are larger than the limit were read, nearly all of it would otherwise be in use."""
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert _control_group_room(tmp_path, 1000) == room
