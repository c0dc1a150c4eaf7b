"""Host memory of packed adapters: pages come back, and none has two owners."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.adapters.peft.folder import MAX_KEPT_BYTES, ReadBuffer
from engine.model.memory.allocation import CPU
from engine.model.memory.host import Blob, PagedMemory, allocate_pages, runs
from engine.model.memory.host_store import HostStore, PackedAdapter
from lora_kernels.layout import AdapterLayout

ELEMS = 8


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=60))
def test_a_page_is_one_adapters_at_a_time(acts):
    memory, held = PagedMemory(torch.zeros(12, ELEMS, dtype=torch.float32)), []
    for takes, number in acts:
        free = 12 - sum(len(blob.pages) for blob, _ in held)
        if not takes and held:
            memory.give(held.pop(number % len(held))[0])
        elif takes and number > free:
            with pytest.raises(MemoryError, match=f"{number} pages for an adapter, and {free} are free"):
                memory.take(number)
        elif takes:
            blob, contents = memory.take(number), torch.rand(number, ELEMS) + 1
            assert not blob.contents().any() and blob.nbytes == number * ELEMS * 4
            blob.fill(contents)
            held.append((blob, contents))
        assert all(torch.equal(blob.contents(), contents) for blob, contents in held)


def test_pages_that_were_used_are_used_first():
    memory = PagedMemory(torch.zeros(100, ELEMS, dtype=torch.float32))
    touched = set()
    for size in (3, 5, 2, 5, 4, 1):
        blob = memory.take(size)
        touched.update(blob.pages.tolist())
        memory.give(blob)
    assert touched == set(range(5))


def test_places_follow_the_pages():
    blob = Blob(torch.arange(10 * ELEMS).view(10, ELEMS), np.array([7, 2, 3]))
    flat = blob.memory.view(-1).numpy()
    assert np.array_equal(flat[blob.places(np.arange(3 * ELEMS))], blob.contents().view(-1).numpy())


def test_more_memory_than_there_is_is_refused_by_name():
    with pytest.raises(ValueError, match=r"1e\+09 GiB for engine.host_adapter_gb; lower it"):
        allocate_pages(1e9, 0, 2048, torch.float32, CPU)


class Driver:
    """Stands in for `torch.cuda.cudart()`, and refuses with `code` if that is not 0."""

    def __init__(self, code=0):
        self.registered, self.code = [], code

    def cudaHostRegister(self, address, num_bytes, flags):
        self.registered.append((address, num_bytes))
        return self.code

    def cudaHostUnregister(self, address):
        return 0

    def cudaGetErrorString(self, code):
        return "operation not supported"


def test_for_a_gpu_the_budget_is_pinned_at_once_and_to_the_byte(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    adapters, saved = allocate_pages(0.01, 7, 3000, torch.bfloat16, torch.device("cuda"))
    assert adapters.shape == (int(0.01 * 2**30) // 6000, 3000) and saved.shape == (7, 3000)
    assert driver.registered == [(adapters.data_ptr(), (len(adapters) + 7) * 6000)]
    assert saved.data_ptr() == adapters.data_ptr() + adapters.nbytes
    memory = PagedMemory(adapters, fence=lambda: lambda: None)
    for pages in (700, 900, 1300):  # torch would pin 8, 8 and 8 MiB for 4.0, 5.1 and 7.4
        memory.give(memory.take(pages))
    assert len(driver.registered) == 1, "an adapter pins nothing"


def test_a_driver_that_does_not_pin_is_an_error_at_start(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Driver(code=801))
    match = r"operation not supported.*; lower engine.host_adapter_gb or engine.swap_gb"
    with pytest.raises(ValueError, match=match):
        allocate_pages(0.01, 7, 3000, torch.bfloat16, torch.device("cuda"))


def test_more_than_is_free_is_not_pinned(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr("engine.model.memory.host.free_host_bytes", lambda: 2**20)
    with pytest.raises(ValueError, match=r"0.01 GiB for engine.host_adapter_gb; lower it"):
        allocate_pages(0.01, 0, 3000, torch.bfloat16, torch.device("cuda"))
    assert not driver.registered


def test_pages_that_a_gpu_may_still_read_are_not_taken_before_it_has():
    waited = []
    fences = iter(range(9))

    def fence():
        number = next(fences)
        return lambda: waited.append(number)

    memory = PagedMemory(torch.zeros(4, ELEMS), fence)
    first, second = memory.take(2), memory.take(1)
    first.fill(torch.ones(2, ELEMS))
    memory.give(first)
    memory.give(second)
    third = memory.take(1)
    assert not waited and len(third.pages) == 1, "one page was free"
    assert first.memory[torch.from_numpy(first.pages)].all(), "the copies from the pages find what they copy"
    assert set(memory.take(2).pages) == set(first.pages) and waited == [0]
    assert set(memory.take(1).pages) == set(second.pages) and waited == [0, 1]
    with pytest.raises(MemoryError, match="1 pages for an adapter, and 0 are free"):
        memory.take(1)


def packed(name, blob):
    layout = AdapterLayout(np.zeros((2, 7), np.int32), np.zeros((2, 7, 2, 16), np.int64), np.full((2, 7), -1), 1)
    return PackedAdapter(name, layout, blob)


def test_the_store_holds_what_it_is_given_and_gives_its_memory_back():
    memory = PagedMemory(torch.zeros(5, ELEMS, dtype=torch.uint8))
    store = HostStore(memory)
    store.put(packed("a", memory.take(3)))
    store.put(packed("b", memory.take(2)))
    layout = 2 * 7 * (4 + 2 * 16 * 8 + 8)
    assert (store.num_bytes, store.get("a").blob.nbytes) == (5 * ELEMS + 2 * layout, 3 * ELEMS)
    store.drop("a")
    assert store.num_bytes == 2 * ELEMS + layout
    for missing in (store.get, store.drop):
        with pytest.raises(KeyError):
            missing("a")
    assert len(memory.take(3).pages) == 3


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (([],), []),
        (([4],), [((4, 5),)]),
        (([4, 5, 6],), [((4, 7),)]),
        (([4, 5, 3, 2],), [((4, 6),), ((3, 4),), ((2, 3),)]),
        (([4, 5, 6, 7], [1, 2, 9, 10]), [((4, 6), (1, 3)), ((6, 8), (9, 11))]),
        (([4, 6, 7], [1, 2, 3]), [((4, 5), (1, 2)), ((6, 8), (2, 4))]),
    ],
)
def test_neighbours_in_every_list_are_one_run(lists, expected):
    assert [tuple((part.start, part.stop) for part in run) for run in runs(*lists)] == expected


def test_a_thread_reads_into_memory_it_has_used_before():
    buffer = ReadBuffer()
    first = buffer.of(100)
    first[:] = b"x" * 100
    assert bytes(buffer.of(50)) == b"x" * 50
    assert len(buffer.of(200)) == 200
    buffer.of(1)[:] = b"z"
    large = buffer.of(MAX_KEPT_BYTES + 1)
    large[:1] = b"y"
    assert bytes(buffer.of(1)) == b"z", "one too large to keep has memory of its own"


def test_threads_do_not_share_what_they_read_into():
    buffer = ReadBuffer()
    mine = buffer.of(10)
    mine[:] = b"x" * 10
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: buffer.of(10).__setitem__(slice(None), b"y" * 10)).result()
    assert bytes(mine) == b"x" * 10
