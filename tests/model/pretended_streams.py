"""Pretended CUDA streams, which find accesses to memory that a GPU could make in the wrong order.

Work runs on the CPU at once, in the order of the calls, so that results are right. What a GPU guarantees is kept beside
it in vector clocks: streams run their own work in order, and wait for each other's only by events; the host knows what
it has waited for. Two accesses to the same piece of memory, of which one is a write, are a race unless one of them
happens before the other by these rules (Flanagan and Freund 2009, FastTrack).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lora_kernels.backend import AttentionBatch, Backend
from lora_kernels.layout import ALIGN, LoraTable, ProjectionGroup
from lora_kernels.segments import SegmentPlan

Piece = tuple[str, int]
"""A piece of memory: the name of the memory, and the number of the row."""
VIEWS = ("slice", "view", "select", "unflatten", "detach", "alias", "split", "as_strided", "_unsafe_view", "unsqueeze")


class Clock(dict[int, int]):
    """Stream -> number of its operations that have happened before."""

    def merge(self, other: Clock) -> None:
        for stream, count in other.items():
            self[stream] = max(count, self.get(stream, 0))


class Stream:
    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline, self.name, self.number = timeline, name, len(timeline.streams)
        self.clock = Clock({self.number: 0})
        timeline.streams.append(self)

    def wait_stream(self, other: Stream) -> None:
        self.clock.merge(other.clock)

    def wait_event(self, event: Event) -> None:
        self.clock.merge(event.clock)


class Event:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self.clock = timeline, Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Clock((stream or self._timeline.current).clock)

    def synchronize(self) -> None:
        self._timeline.host.merge(self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Access(NamedTuple):
    """An access by operation `number` of `stream`, which is called `name`."""

    stream: Stream
    number: int
    name: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream.number, 0) >= self.number


@dataclass
class Memory:
    """Memory whose accesses are noted by rows of `row_bytes`."""

    name: str
    start: int
    end: int
    row_bytes: int


@dataclass
class Timeline:
    """All streams of a pretended GPU. `races` are described in words. Memory that nothing has named is not watched."""

    streams: list[Stream] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    host: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.kernels = self.current = Stream(self, "kernels")
        self._memories: list[Memory] = []
        self._writes: dict[Piece, Access] = {}
        self._reads: dict[Piece, dict[int, Access]] = {}

    def watch(self, name: str, memory: Tensor) -> None:
        """Watches the accesses to [rows, ...], a contiguous tensor."""
        start, row_bytes = memory.data_ptr(), memory.stride(0) * memory.itemsize
        self._memories.append(Memory(name, start, start + memory.nbytes, row_bytes))

    def pieces(self, tensor: Tensor, rows: Iterable[int] | None = None) -> list[Piece]:
        """The pieces that a tensor covers, or of its rows of one piece each; none if its memory is not watched."""
        if tensor.layout is not torch.strided:
            return []
        first, extent = tensor.data_ptr(), sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        for memory in self._memories:
            if memory.start <= first < memory.end and tensor.numel():
                start, last = (first - memory.start) // memory.row_bytes, first + extent * tensor.itemsize
                covered = range(start, (last - memory.start) // memory.row_bytes + 1)
                return [(memory.name, row) for row in (covered if rows is None else (start + row for row in rows))]
        return []

    def access(self, name: str, reads: Sequence[Piece] = (), writes: Sequence[Piece] = ()) -> None:
        """Notes an operation on the current stream."""
        stream = self.current
        stream.clock.merge(self.host)
        stream.clock[stream.number] += 1
        mine = Access(stream, stream.clock[stream.number], name)
        for piece in reads:
            self._check(mine, piece, self._writes.get(piece))
            self._reads.setdefault(piece, {})[stream.number] = mine
        for piece in writes:
            for other in (self._writes.get(piece), *self._reads.pop(piece, {}).values()):
                self._check(mine, piece, other)
            self._writes[piece] = mine

    def _check(self, mine: Access, piece: Piece, other: Access | None) -> None:
        if other is not None and not other.is_before(mine.stream.clock):
            self.races.append(f"{piece}: {mine.name} on {mine.stream.name} during {other.name} on {other.stream.name}")

    def is_busy(self, piece: Piece) -> bool:
        """Return whether an access may still be under way, as far as the host knows."""
        accesses = [*self._reads.get(piece, {}).values(), *filter(None, [self._writes.get(piece)])]
        return not all(access.is_before(self.host) for access in accesses)

    @property
    def are_kernels_busy(self) -> bool:
        return self.kernels.clock[self.kernels.number] > self.host.get(self.kernels.number, 0)

    def waits_for_kernels(self, stream: Stream) -> bool:
        """Return whether work that is launched on a stream now waits for every kernel launched before."""
        return stream.clock.get(self.kernels.number, 0) >= self.kernels.clock[self.kernels.number]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def pretend(self) -> Iterator[None]:
        """Makes torch's streams and events those of this timeline, and notes the accesses of torch's operations."""
        fakes = {
            "Stream": lambda *_: Stream(self, f"stream {len(self.streams)}"),
            "Event": lambda **_: Event(self),
            "stream": self.on,
            "current_stream": lambda *_: self.current,
        }
        with ExitStack() as stack:
            for name, fake in fakes.items():
                stack.enter_context(patch.object(torch.cuda, name, fake))
            stack.enter_context(Accesses(self))
            yield


class Accesses(TorchDispatchMode):
    """Notes which watched memory torch's operations read and write. An operation that is not known here must not touch
    any."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(func._schema.name.removeprefix("aten::"), args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any, options: Any) -> None:
        pieces, access = self._timeline.pieces, self._timeline.access
        if name == "copy_":
            access(name, pieces(args[1]), pieces(args[0]))
        elif name == "index_select":
            access(name, pieces(args[0], args[2].tolist()), pieces(options["out"]) if "out" in options else ())
        elif name == "index_copy_":
            access(name, pieces(args[3]), pieces(args[0], args[2].tolist()))
        elif name not in VIEWS:
            touched = [pieces(arg) for arg in (*args, *options.values()) if isinstance(arg, Tensor)]
            assert not any(touched), f"the accesses of {name} are not known"


class WatchedBackend:
    """A `Backend` that notes which pages of the arena each call reads and writes, as a GPU's kernels do."""

    name = "watched"

    def __init__(self, inner: Backend, timeline: Timeline, page_elems: int) -> None:
        self._inner, self._timeline, self._page_elems = inner, timeline, page_elems
        self.pointwise = inner.pointwise

    def rotate_and_write(self, qkv: Tensor, kv: Tensor, batch: AttentionBatch, *more: Any) -> Tensor:
        pages = {slot // kv.shape[2] for slot in batch.kv_slots.tolist() if slot >= 0}
        self._timeline.access("write_kv", (), _pages(pages))
        with _disable_current_modes():
            return self._inner.rotate_and_write(qkv, kv, batch, *more)

    def attention(self, query: Tensor, kv: Tensor, batch: AttentionBatch, *more: Any) -> Tensor:
        sizes = [-(-context // kv.shape[2]) for context in batch.host_context_lens]
        tables = zip(batch.block_tables.tolist(), sizes, strict=True)
        self._timeline.access("attention", _pages({page for table, size in tables for page in table[:size]}))
        with _disable_current_modes():
            return self._inner.attention(query, kv, batch, *more)

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> Any:
        with _disable_current_modes():
            prepared = self._inner.prepare_lora(arena, table, plan)
        return None if prepared is None else (prepared, table, plan.adapter_slots)

    def add_lora(self, out: Tensor, x: Tensor, prepared: Any, layer: int, group: ProjectionGroup) -> None:
        own, table, slots = prepared
        starts = table.host_offsets[slots, layer][:, list(group.targets)].ravel().tolist()
        self._timeline.access("lora", _pages({start * ALIGN // self._page_elems for start in starts if start}))
        with _disable_current_modes():
            self._inner.add_lora(out, x, own, layer, group)


def _pages(numbers: Iterable[int]) -> list[Piece]:
    return [("page", number) for number in numbers]
