"""Pages are KV and adapter memory at once; slots come and go."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.core.messages.step import PageCopy
from engine.model.layers.lora import TARGETS
from engine.model.memory.arena import Arena, PageShape
from engine.model.memory.host import Blob
from engine.model.memory.host_pages import HostPages
from lora_kernels.layout import ALIGN, pack_adapter, plan_layout

CPU = torch.device("cpu")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")))
SHAPE = PageShape(layers=2, block_size=4, kv_heads=2, head_dim=8)
WIDTHS = np.full((len(TARGETS), 2), 16, dtype=np.int32)


@pytest.fixture
def arena():
    return Arena(SHAPE, num_pages=8, max_adapters=2, dtype=torch.float32, device=CPU)


def small_adapter(rank=3):
    ranks = np.zeros((2, len(TARGETS)), dtype=np.int32)
    ranks[1, 4] = ranks[0, 0] = rank
    layout = plan_layout(ranks, WIDTHS, SHAPE.elements)
    blocks = {place: (torch.randn(rank, 16), torch.randn(16, rank)) for place in ((0, 0), (1, 4))}
    return layout, pack_adapter(layout, blocks, SHAPE.elements, torch.float32), blocks


def test_layers_share_a_page_without_overlap(arena):
    assert SHAPE.elements == 2 * 2 * 4 * 2 * 8
    for layer in range(2):
        assert arena.kv(layer).shape == (8, 2, 4, 2, 8)
        arena.kv(layer)[3] += layer + 1
    assert arena.pages[3].sum() == SHAPE.elements / 2 * (1 + 2)
    assert arena.pages.sum() == arena.pages[3].sum()
    assert arena.flat.data_ptr() == arena.pages.data_ptr()


def test_eight_bit_kv_takes_half_a_page():
    shape = replace(SHAPE, fp8_kv=True)
    arena = Arena(shape, num_pages=4, max_adapters=2, dtype=torch.bfloat16, device=CPU)
    assert shape.elements == SHAPE.elements // 2
    for layer in range(2):
        assert arena.kv(layer).shape == (4, 2, 4, 2, 8)
        arena.kv(layer)[3] = torch.full((2, 4, 2, 8), layer + 1).to(torch.float8_e4m3fn)
    assert arena.pages[3].view(torch.float8_e4m3fn).float().sum() == SHAPE.elements / 2 * (1 + 2)
    assert not arena.pages[:3].any()


def test_a_loaded_adapter_is_found_through_the_table(arena):
    layout, blob, blocks = small_adapter()
    arena.load_adapter("a", layout, Blob.of(blob), pages=(5,))
    start = int(arena.table.host_offsets[arena.adapter_slot("a"), 1, 4, 0, 0]) * ALIGN
    assert start // SHAPE.elements == 5
    assert torch.equal(arena.flat[start : start + 3 * 16].view(3, 16), blocks[1, 4][0])
    assert not arena.pages[:5].any()
    assert arena.adapter_slot(None) == -1


def test_slots_are_taken_back(arena):
    layout, blob, _ = small_adapter()
    arena.load_adapter("a", layout, Blob.of(blob), pages=(1,))
    arena.load_adapter("b", layout, Blob.of(blob), pages=(2,))
    with pytest.raises(ValueError, match="all 2 slots"):
        arena.load_adapter("c", layout, Blob.of(blob), pages=(3,))
    slot = arena.adapter_slot("a")
    arena.evict_adapter("a")
    assert not arena.table.host_ranks[slot].any()
    arena.load_adapter("c", layout, Blob.of(blob), pages=(1,))
    assert arena.adapter_slot("c") == slot
    with pytest.raises(KeyError):
        arena.adapter_slot("a")


def test_impossible_loads_are_refused(arena):
    layout, blob, _ = small_adapter()
    with pytest.raises(ValueError, match="1 pages, not 2"):
        arena.load_adapter("a", layout, Blob.of(blob), pages=(1, 2))
    arena.load_adapter("a", layout, Blob.of(blob), pages=(1,))
    with pytest.raises(ValueError, match="resident already"):
        arena.load_adapter("a", layout, Blob.of(blob), pages=(2,))


def test_a_load_that_the_table_refuses_takes_no_slot(arena):
    layout, blob, _ = small_adapter()
    for _ in range(3):
        with pytest.raises(ValueError, match=r"fp8|FP8"):
            arena.load_adapter("a", replace(layout, fp8=True), Blob.of(blob), pages=(1,))
    for name, page in (("a", 1), ("b", 2)):
        arena.load_adapter(name, layout, Blob.of(blob), pages=(page,))


def random_bits(*shape, dtype):
    """Any bits, NaNs among them, as a page that holds an adapter or half a prefix may."""
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return raw.view(dtype).squeeze(-1)


def bits(pages):
    return pages.cpu().view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("staged", [1, 2, 100])
def test_saved_pages_come_back_in_other_pages_bit_for_bit(device, dtype, staged, monkeypatch):
    monkeypatch.setattr("engine.model.memory.host_pages.STAGING_BYTES", staged * 48 * dtype.itemsize)
    pinned = torch.zeros(8, 48, dtype=dtype, pin_memory=device == "cuda")
    host = HostPages(pinned, torch.device(device))
    before = random_bits(12, 48, dtype=dtype)
    before[0] = 0
    pages = before.to(device, copy=True)
    places = {9: 3, 2: 0, 7: 5, 4: 4, 5: 1, 11: 7}  # page -> host page: runs of one and of two
    host.move(pages, tuple(PageCopy(*place) for place in places.items()), ())
    pages[1:] = 1.0  # at once: a save has read what it copies before anything else writes there
    after = {1: 3, 9: 0, 3: 5, 10: 4, 4: 1, 8: 4}  # host page 4 twice, as two sequences may share a prefix
    host.move(pages, (), tuple(PageCopy(*place) for place in after.items()))
    saved = {host_page: before[page] for page, host_page in places.items()}
    for page in range(12):
        expected = saved[after[page]] if page in after else torch.full((48,), float(page > 0), dtype=dtype)
        assert torch.equal(bits(pages[page]), bits(expected))
    for host_page in range(8):
        assert torch.equal(bits(host.pages[host_page]), bits(saved.get(host_page, torch.zeros(48, dtype=dtype))))


def test_no_copies_and_no_host_memory_are_nothing_to_do():
    host, pages = HostPages(torch.empty(0, 48), CPU), torch.ones(2, 48)
    host.move(pages, (), ())
    assert host.pages.shape == (0, 48)
    assert bool(pages.all())
