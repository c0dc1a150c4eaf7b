"""Fetches KV pages from other engines, each fetch in a thread of its own."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from zlib import crc32

import structlog

from engine.core.messages.moves import CancelFetch, FetchEnd, FetchEnded, FetchPages, PagesCame
from engine.kv.line import Line, MoveFailed, OwnEngine, connect
from engine.kv.messages import FRAME, HELLO, TAKEN, Answer, Kind, Reason, Want, hello, read_hello
from engine.kv.transports import SharedTransport, StreamTransport, Transport
from engine.rpc.target import UNIX, EngineTarget, EngineTls

log = structlog.get_logger("engine.kv.receiver")

MOST_WINDOW = 1 << 16
"""Maximum number of slots of shared memory that a sender may have."""


@dataclass(slots=True)
class _Fetch:
    """State of a fetch of KV pages from another engine that is under way."""

    order: FetchPages
    line: Line | None = None
    """None means that it is not connected yet."""
    is_cancelled: bool = False
    num_come: int = 0
    seconds: float = 0.0
    """Seconds that receiving the pages has taken so far: for each page, from the arrival of its frame until it was
    checked."""


class Receiver:
    """Fetches KV pages from other engines into the host pages of `own`, each fetch in a thread. `begin` and `cancel`
    are called by the step loop. Without `tls`, only engines on this machine are asked."""

    def __init__(self, own: OwnEngine, tls: EngineTls | None) -> None:
        self._own = own
        self._tls = tls
        self._lock = threading.Lock()
        self._fetches: dict[int, _Fetch] = {}

    def begin(self, order: FetchPages) -> None:
        self._fetches[order.id] = fetch = _Fetch(order)
        threading.Thread(target=self._run, args=(fetch,), name="kv-fetch", daemon=True).start()

    def cancel(self, order: CancelFetch) -> None:
        with self._lock:
            if (fetch := self._fetches.get(order.id)) is not None:
                fetch.is_cancelled = True
                if fetch.line is not None:
                    fetch.line.cut()

    def _run(self, fetch: _Fetch) -> None:
        """Fetch the KV pages of one order from another engine, and report how the fetch ended. This is the main
        function of a thread."""
        end, reason = FetchEnd.DONE, ""
        try:
            self._fetch(fetch)
        except MoveFailed as error:
            end, reason = error.end, str(error)
        except ValueError as error:  # the address, or the TLS files
            end, reason = FetchEnd.REFUSED, str(error)
        except Exception as error:  # a bug: the pages are computed
            log.exception("kv_fetch_failed")
            end, reason = FetchEnd.CUT, repr(error)
        with self._lock:
            if fetch.line is not None:
                with suppress(OSError):
                    fetch.line.close()
            del self._fetches[fetch.order.id]
        if fetch.is_cancelled and end is not FetchEnd.DONE:
            end = FetchEnd.CANCELLED
        note = log.info if end in (FetchEnd.DONE, FetchEnd.CANCELLED) else log.warning
        peer, wanted = fetch.order.source.address, len(fetch.order.host_pages)
        note("kv_fetched", end=end.value, reason=reason, peer=peer, pages=fetch.num_come, of=wanted)
        self._own.report(FetchEnded(fetch.order.id, end, fetch.seconds))

    def _fetch(self, fetch: _Fetch) -> None:
        order = fetch.order
        target = EngineTarget(order.source.address, self._tls)
        line = connect(target, self._own.clock, order.deadline)
        with self._lock:
            fetch.line = line
            if fetch.is_cancelled:
                raise MoveFailed(FetchEnd.CANCELLED, "")
        seconds = order.deadline - self._own.clock()
        want = Want(self._own.identity, len(order.keys), order.source.computes, seconds)
        line.send(hello(want) + b"".join(order.keys))
        transport = self._open_transport(line, target.address.startswith(UNIX))
        self._own.memory.settle()
        try:
            for number in range(len(order.keys)):
                self._receive(line, transport, number, fetch)
            line.receive(FRAME.size)  # the end, or else the sender would not hear that the last page was taken
        finally:
            transport.close()

    def _receive(self, line: Line, transport: Transport, number: int, fetch: _Fetch) -> None:
        """Receive KV page `number` of a fetch into its host page, report it to this engine, and acknowledge it to the
        sender. Raises MoveFailed if the next frame or its checksum is wrong."""
        kind, value, checksum = FRAME.unpack(line.receive(FRAME.size))
        began = self._own.clock()
        if kind == Kind.END and value == Reason.GONE:
            raise MoveFailed(FetchEnd.GONE, "the other engine does not have the pages")
        if kind != Kind.PAGE or value != number:
            raise MoveFailed(FetchEnd.CORRUPT, f"a frame of kind {kind} and number {value}")
        page = self._own.memory.page(fetch.order.host_pages[number])
        transport.receive(number, page)
        if crc32(page) != checksum:
            raise MoveFailed(FetchEnd.CORRUPT, f"the checksum of page {number} is wrong")
        fetch.num_come += 1
        fetch.seconds += self._own.clock() - began
        self._own.report(PagesCame(fetch.order.id, 1))
        line.send(TAKEN)

    def _open_transport(self, line: Line, is_local: bool) -> Transport:
        """Read the sender's answer and return the transport that it announces: shared memory or the connection itself.
        Raises MoveFailed if the sender refuses."""
        head, file = line.receive_file(HELLO.size) if is_local else (b"", None)
        with ExitStack() as unused:
            if file is not None:
                unused.callback(os.close, file)
            answer = read_hello(line, Answer, head)
            if answer.refusal:
                raise MoveFailed(FetchEnd.REFUSED, answer.refusal[:200])
            if not answer.shared:
                return StreamTransport(line)
            if file is None or not 0 < answer.window <= MOST_WINDOW:
                raise MoveFailed(FetchEnd.CORRUPT, "shared memory is announced, and did not come")
            unused.pop_all()
        return SharedTransport(line, file, answer.window, self._own.memory.page_bytes)
