"""How the bytes of pages cross: on the connection itself or, between processes of one machine, in shared memory whose
file descriptor the sender passes. Another transport, such as RDMA, would be one more implementation of `Transport`."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol

from engine.core.messages.moves import FetchEnd
from engine.kv.line import Line, MoveFailed


class Transport(Protocol):
    """Interface of what carries the bytes of KV pages between two engines, in one direction: the connection or shared
    memory. `number` counts pages from 0 on."""

    def send(self, number: int, frame: bytes, page: memoryview) -> None:
        """Send a KV page's frame (its header) and bytes. The caller makes sure that the receiver has taken the page
        `window` pages before this one. Raises MoveFailed."""

    def receive(self, number: int, page: memoryview) -> None:
        """Receive a KV page's bytes into `page`. Its frame (the header) must have been received before. Raises
        MoveFailed."""

    def close(self) -> None:
        """Free what the transport holds, but not the connection."""


class StreamTransport:
    """A `Transport` that carries the bytes of KV pages on the connection itself, each after its frame (the header)."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def send(self, number: int, frame: bytes, page: memoryview) -> None:
        self._line.send(frame)
        self._line.send(page)

    def receive(self, number: int, page: memoryview) -> None:
        self._line.receive_into(page)

    def close(self) -> None:
        """Do nothing: this transport holds nothing but the connection, which its caller closes."""


class SharedTransport:
    """A `Transport` between engines of one machine, which carries KV pages in memory that both processes map: `window`
    slots, used in turn. Each side copies once, and nothing passes through the socket but frames."""

    def __init__(self, line: Line, file: int, window: int, page_bytes: int) -> None:
        """`file` is a descriptor of the shared memory, which this call closes. Raises MoveFailed if the memory has not
        the size of `window` pages or could be shrunk, so that reading it would end the process."""
        self._line = line
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(file).st_size != window * page_bytes:
                raise MoveFailed(FetchEnd.CORRUPT, "the shared memory is not as it should be")
            self._memory = mmap.mmap(file, window * page_bytes)
        except (OSError, ValueError) as error:
            raise MoveFailed(FetchEnd.CORRUPT, f"the shared memory cannot be used: {error}") from error
        finally:
            os.close(file)
        self._window, self._page_bytes = window, page_bytes

    def send(self, number: int, frame: bytes, page: memoryview) -> None:
        with self._slot(number) as slot:
            _copy(page, slot)
        self._line.send(frame)

    def receive(self, number: int, page: memoryview) -> None:
        with self._slot(number) as slot:
            _copy(slot, page)

    def close(self) -> None:
        self._memory.close()

    def _slot(self, number: int) -> memoryview:
        start = number % self._window * self._page_bytes
        with memoryview(self._memory) as whole:
            return whole[start : start + self._page_bytes]


def _copy(source: memoryview, target: memoryview) -> None:
    """Copy the bytes of a KV page. NumPy releases the interpreter's lock meanwhile, which a step may need."""
    import numpy as np  # Imported here: an engine without a model starts in half a second, and this is a fifth of it.

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def can_share() -> bool:
    """Return whether this system can share KV pages between processes: it has anonymous memory whose descriptor can be
    passed on (memfd)."""
    return hasattr(os, "memfd_create")


def shared_memory(size: int) -> int:
    """Return a file descriptor of `size` bytes of new anonymous memory (memfd) that another process can map, to carry
    KV pages. Its size can no longer be changed."""
    file = os.memfd_create("kv-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return file
