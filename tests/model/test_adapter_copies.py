"""Copies of adapters: what they write, and what waits for what. A GPU's stream is played by a list."""

from itertools import combinations

import numpy as np
import pytest
import torch

from engine.model.memory.adapter_copies import PlainCopies, QueuedCopies
from engine.model.memory.host import Blob, PagedMemory
from lora_kernels.layout import plan_layout

PAGE = 64
WIDTHS = np.full((2, 2), 16, dtype=np.int32)


class Tape:
    """A queue whose copies are made only when a caller waits for them, so that waiting too little shows."""

    def __init__(self):
        self.pending = []
        self.waits_for_kernels = 0
        self.pending_at_kernels = 0
        """Number of copies that do not wait for the kernels."""

    def after_kernels(self):
        self.waits_for_kernels += 1
        self.pending_at_kernels = len(self.pending)

    def copy(self, target, source):
        self.pending.append((target, source))

    def mark(self):
        return len(self.pending)

    def before_kernels(self, mark):
        for target, source in self.pending[:mark]:
            target.copy_(source)

    def finish(self, mark):
        self.before_kernels(mark)

    def seconds(self, first, last):
        return float(last - first)


def adapter(ranks, seed):
    """An adapter of so many layers; its layout and a blob of random numbers."""
    table = np.zeros((len(ranks), 2), dtype=np.int32)
    table[:, 0] = ranks
    layout = plan_layout(table, WIDTHS, PAGE)
    generator = torch.Generator().manual_seed(seed)
    return layout, torch.rand(layout.num_pages, PAGE, generator=generator) + 1


def layer_tiles(layout, layer):
    """(page of the blob, element in it) of each tile of a layer."""
    offsets = layout.offsets[layer][layout.ranks[layer][:, None, None] > 16 * np.arange(16) + np.zeros((2, 1))]
    return [divmod(int(offset), PAGE) for offset in offsets]


@pytest.mark.parametrize("ranks", [(2, 2, 2, 2), (4, 0, 0, 1), (0, 3, 3, 0), (0, 0, 0, 1), (1, 1, 1, 1)])
def test_a_layer_that_was_waited_for_is_there(ranks):
    tape, arena = Tape(), torch.zeros(40, PAGE)
    copies = QueuedCopies(arena, tape)
    loaded = [adapter(ranks, seed) for seed in range(2)]
    places = [tuple(range(3, 3 + len(loaded[0][1]))), tuple(range(39, 39 - len(loaded[1][1]), -1))]
    for (layout, blob), pages in zip(loaded, places, strict=True):
        copies.begin(Blob.of(blob), pages, layout)
    assert not arena.any() and tape.waits_for_kernels == 2
    for layer in range(len(ranks)):
        copies.wait(layer)
        for (layout, blob), pages in zip(loaded, places, strict=True):
            for page, element in layer_tiles(layout, layer):
                assert arena[pages[page], element] == blob[page, element]
    assert len(copies.finish()) == 2
    for (_, blob), pages in zip(loaded, places, strict=True):
        assert torch.equal(arena[list(pages)], blob)


def test_a_layer_does_not_wait_for_those_behind_it():
    tape, arena = Tape(), torch.zeros(40, PAGE)
    copies = QueuedCopies(arena, tape)
    layout, blob = adapter((4, 4, 4), 0)
    copies.begin(Blob.of(blob), tuple(range(1, 1 + len(blob))), layout)
    copies.wait(0)
    assert arena[1].any() and not arena[len(blob)].any()


def test_pages_that_kernels_use_are_copied_after_them_and_the_others_before():
    layout, blob = adapter((4, 4, 4), 0)
    places = tuple(range(1, 1 + len(blob)))
    for busy in (set(chosen) for count in range(len(blob) + 1) for chosen in combinations(range(len(blob)), count)):
        tape, arena = Tape(), torch.zeros(40, PAGE)
        copies = QueuedCopies(arena, tape)
        copies.begin(Blob.of(blob), places, layout, np.array([page in busy for page in range(len(blob))]))
        tape.finish(tape.pending_at_kernels if busy else len(tape.pending))
        assert {page for page in range(len(blob)) if arena[places[page]].any()} == set(range(len(blob))) - busy
        for layer in range(3):
            copies.wait(layer)
            for page, element in layer_tiles(layout, layer):
                assert arena[places[page], element] == blob[page, element]
        assert len(copies.finish()) == 1 and torch.equal(arena[list(places)], blob)


def test_a_step_without_layers_still_waits_in_the_end():
    tape, arena = Tape(), torch.zeros(40, PAGE)
    copies = QueuedCopies(arena, tape)
    layout, blob = adapter((4, 4, 4), 0)
    copies.begin(Blob.of(blob), tuple(range(1, 1 + len(blob))), layout)
    assert copies.finish() == (float(len(tape.pending)),)
    assert torch.equal(arena[1 : 1 + len(blob)], blob)
    assert copies.finish() == ()


def test_copies_of_a_step_are_told_apart_from_those_of_the_next():
    tape, arena = Tape(), torch.zeros(40, PAGE)
    copies = QueuedCopies(arena, tape)
    (layout, blob), (_, other) = adapter((4, 4, 4), 0), adapter((4, 4, 4), 1)
    copies.begin(Blob.of(blob), tuple(range(1, 1 + len(blob))), layout)
    copies.close()
    assert torch.equal(arena[1 : 1 + len(blob)], blob)
    first = len(tape.pending)
    for start in (11, 21):
        copies.begin(Blob.of(other), tuple(range(start, start + len(other))), layout)
    copies.close()
    assert copies.finish() == (float(first),)
    assert len(copies.finish()) == 2


def test_host_pages_of_an_adapter_may_lie_anywhere():
    """And what is one run in the blob, in host memory or in the arena need not be one in the others."""
    layout, contents = adapter((4, 4, 4), 0)
    memory = PagedMemory(torch.zeros(20, PAGE, dtype=torch.float32))
    held = [memory.take(1) for _ in range(20)]
    for number in (3, 4, 5, 9, 12, 13, 17)[: len(contents)]:
        memory.give(held[number])
    blob = memory.take(len(contents))
    blob.fill(contents)
    pages = (7, 8, 2, 3, 9, 10, 1)[: len(contents)]
    tape, there, later = Tape(), torch.zeros(20, PAGE), torch.zeros(20, PAGE)
    PlainCopies(there).begin(blob, pages, layout)
    queued = QueuedCopies(later, tape)
    queued.begin(blob, pages, layout)
    assert queued.finish() and len(tape.pending) > 2
    for arena in (there, later):
        assert torch.equal(arena[list(pages)], contents)
        assert arena.any(1).sum() == len(contents)


def test_a_plain_copy_is_there_at_once():
    arena = torch.zeros(10, PAGE)
    copies = PlainCopies(arena)
    layout, blob = adapter((4, 4), 0)
    pages = (7, 2, 3, 9, 8, 1)[: len(blob)]
    copies.begin(Blob.of(blob), pages, layout)
    assert torch.equal(arena[list(pages)], blob)
    copies.wait(0)
    assert len(copies.finish()) == 1
    assert copies.finish() == ()


def test_a_fence_is_reached_when_the_copies_begun_before_it_are_done():
    tape, arena = Tape(), torch.zeros(9, PAGE)
    copies = QueuedCopies(arena, tape)
    (layout, contents), (_, later) = adapter((2, 2), 0), adapter((2, 2), 1)
    copies.begin(Blob.of(contents), tuple(range(1, 1 + len(contents))), layout)
    wait = copies.fence()
    copies.begin(Blob.of(later), tuple(range(5, 5 + len(later))), layout)
    assert not arena.any()
    wait()
    assert torch.equal(arena[1 : 1 + len(contents)], contents) and not arena[5:].any()
