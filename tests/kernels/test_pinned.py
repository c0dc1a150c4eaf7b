"""Pinned memory: what is registered with a driver that only takes notes, and the ring through which arrays pass."""

import ast
import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_kernels.pinned import SYSTEM_PAGE, PinningError, UploadRing, pinned_zeros, upload, upload_into, upload_ring

ROOT, CPU = Path(__file__).parents[2], torch.device("cpu")


class Driver:
    """Stands in for `torch.cuda.cudart()`. `registered`: address -> bytes. It refuses with `code` if that is not 0."""

    def __init__(self, code=0):
        self.registered = {}
        self.code = code

    def cudaHostRegister(self, address, num_bytes, flags):
        assert flags == 0
        if not self.code:
            self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, code):
        return {2: "out of memory"}[code]


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.parametrize(("count", "dtype"), [(5, torch.float32), (42 << 20, torch.uint8), (3 * 4096, torch.bfloat16)])
def test_as_many_bytes_are_registered_as_are_asked_for(driver, count, dtype):
    memory = pinned_zeros(count, dtype)
    assert driver.registered == {memory.data_ptr(): count * dtype.itemsize}
    assert memory.shape == (count,) and not memory.any() and memory.data_ptr() % SYSTEM_PAGE == 0


def test_no_system_page_is_registered_twice(driver):
    held = [pinned_zeros(count, torch.uint8) for count in (1, 1, SYSTEM_PAGE, 7, SYSTEM_PAGE + 1)]
    pages = [
        address // SYSTEM_PAGE + i
        for address, size in driver.registered.items()
        for i in range(-(-size // SYSTEM_PAGE))
    ]
    assert len(held) == 5 and len(pages) == len(set(pages)) == 6


def test_memory_is_registered_until_its_last_view_is_gone(driver):
    view = pinned_zeros(100, torch.int32).view(10, 10)[3:]
    gc.collect()
    assert len(driver.registered) == 1
    del view
    gc.collect()
    assert not driver.registered


def test_the_driver_is_not_asked_for_nothing(driver):
    assert pinned_zeros(0, torch.float32).shape == (0,) and not driver.registered


@pytest.mark.parametrize(("limit", "words"), [(64 << 10, "0.1 MiB"), (-1, "any amount")])
def test_a_refusal_says_why_and_what_may_be_locked(driver, monkeypatch, limit, words):
    driver.code = 2
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    match = rf"does not pin 3\.0 MiB of host memory: out of memory.*{words} \(ulimit -l\)"
    with pytest.raises(PinningError, match=match):
        pinned_zeros(3 << 20, torch.uint8)


class Stream:
    """A stream whose copies are made only when a caller waits for a mark, so that waiting too little shows."""

    def __init__(self, monkeypatch):
        self.pending, self.waits = [], 0
        plain = torch.Tensor.copy_

        def later(target, source, non_blocking=False):
            assert non_blocking
            self.pending.append((plain, target, source))

        monkeypatch.setattr(torch.Tensor, "copy_", later)

    def mark(self):
        return SimpleNamespace(synchronize=partial(self._finish, len(self.pending)))

    def _finish(self, number):
        self.waits += 1
        for plain, target, source in self.pending[:number]:
            plain(target, source)
        self.pending[:number] = [(lambda *_: None, None, None)] * min(number, len(self.pending))


def test_uploads_survive_the_reuse_of_the_ring(monkeypatch):
    stream, numbers = Stream(monkeypatch), np.random.default_rng(0)
    ring = UploadRing(torch.zeros(3, 256, dtype=torch.uint8), CPU, stream.mark)
    arrays, uploaded = [], []
    for size in (3, 40, 100, 1, 0, 33, 700, 64, 5, 5, 5, 300):  # int32: some are larger than a segment, or the ring
        array = numbers.integers(0, 1 << 30, size, dtype=np.int32)
        arrays.append(array.copy())
        uploaded.append(ring.upload(array))
        array[:] = -1  # at once: the ring has read it
    assert stream.waits > 3
    stream.mark().synchronize()
    for array, tensor in zip(arrays, uploaded, strict=True):
        assert tensor.dtype == torch.int32 and np.array_equal(tensor.numpy(), array)


def test_an_upload_waits_only_for_a_segment_that_is_taken_again(monkeypatch):
    stream = Stream(monkeypatch)
    ring = UploadRing(torch.zeros(4, 256, dtype=torch.uint8), CPU, stream.mark)
    for _ in range(4):
        ring.upload(np.zeros(256, dtype=np.uint8))
    assert stream.waits == 0
    ring.upload(np.zeros(1, dtype=np.uint8))
    assert stream.waits == 1


def test_any_shape_and_type_arrives(monkeypatch):
    ring = UploadRing(torch.zeros(2, 128, dtype=torch.uint8), CPU, lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr("lora_kernels.pinned.upload_ring", lambda _: ring)
    for array in (np.arange(6.0).reshape(2, 3), np.arange(12).reshape(3, 4).T, np.array([True, False]), np.int32([[]])):
        assert np.array_equal(upload(array, CPU).numpy(), array)
    table = torch.zeros(3, 2, 2)
    upload_into(table[1], np.array([[1, 2], [3, 4]], dtype=np.float32))
    assert table.sum() == 10 and table[1, 1, 0] == 3


def test_a_cpu_has_no_ring_and_shares_the_array():
    array = np.zeros(3)
    assert upload_ring(CPU) is None
    upload(array, CPU)[1] = 5
    assert array[1] == 5


def test_only_this_module_pins_memory():
    """A tensor pinned with torch while requests are served may stop the GPU, and takes up to twice its size."""
    for path in sorted([*(ROOT / "engine").rglob("*.py"), *(ROOT / "lora_kernels").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "arg", None))
            assert name != "pin_memory", f"{path.relative_to(ROOT)}:{node.lineno}"
