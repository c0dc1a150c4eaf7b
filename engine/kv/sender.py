"""Gives KV pages to other engines: a listener, and a thread for each connection."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from zlib import crc32

import structlog

from engine.core.messages.moves import EndExport, ExportOver, ExportPages, FetchEnd, PagesReady, PagesSent
from engine.core.messages.requests import HostPageId
from engine.kv.line import Line, MoveFailed, OwnEngine, listen, server_context
from engine.kv.messages import FRAME, TAKEN, Answer, Kind, Reason, Want, hello, read_hello, read_keys
from engine.kv.transports import SharedTransport, StreamTransport, Transport, can_share, shared_memory
from engine.rpc.target import UNIX, EngineTls

log = structlog.get_logger("engine.kv.sender")

MOST_CONNECTIONS = 64
"""Maximum number of moves under way, each of which holds a thread. Further connections are closed at once."""
WINDOW_BYTES = 16 << 20
"""Maximum number of bytes of a move that are under way to the receiver."""
HELLO_S = 5.0
"""Seconds that a receiver has to say what it wants."""
MOST_S = 120.0
"""Maximum number of seconds of a move, and so of a lease, whatever the receiver asks for."""
GRACE_S = 1.0
"""Seconds that a move may take longer than its receiver waits, so that the receiver is the one to give up."""
POLL_S = 0.1
"""Seconds between two checks whether a receiver that waits for pages is still connected."""


class Sender:
    """Listens at `address` for other engines that fetch KV pages, and sends them those of `own`. `ready` and `over` are
    called by the step loop. Raises OSError as `line.listen` does."""

    def __init__(self, own: OwnEngine, address: str, tls: EngineTls | None) -> None:
        self._own = own
        self._is_local = address.startswith(UNIX)
        self._tls = None if self._is_local else tls
        self._numbers = count(1)
        self._queues: dict[int, queue.SimpleQueue[HostPageId | None]] = {}
        """Queue of each export under way, by its number: host pages that are ready to be sent, and None for the end."""
        self.lines: set[Line] = set()
        """Connections of the exports under way."""
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._server, self.address = listen(address)
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    def ready(self, order: PagesReady) -> None:
        if (pages := self._queues.get(order.id)) is not None:
            for page in order.host_pages:
                pages.put(page)

    def over(self, order: ExportOver) -> None:
        if (pages := self._queues.get(order.id)) is not None:
            pages.put(None)

    def close(self) -> None:
        """Accept no more connections. Those that are open end by themselves, or with the process."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        if self._is_local:
            Path(self.address.removeprefix(UNIX)).unlink(missing_ok=True)

    def _accept(self) -> None:
        """Serve each connection in a thread, until `close`: the main function of a thread."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                time.sleep(POLL_S)  # the process may have no file descriptor left, which would fail again at once
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), name="kv-send", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._send(connection)
        except MoveFailed as error:
            log.warning("kv_not_sent", end=error.end.value, reason=str(error))
        except Exception:  # a bug, or TLS files that cannot be used: the receiver computes the pages
            log.exception("kv_not_sent")
        finally:
            connection.close()
            self._places.release()

    def _send(self, connection: socket.socket) -> None:
        line = Line(connection, self._own.clock, self._own.clock() + HELLO_S)
        if self._tls is not None:
            line.secure(server_context(self._tls), server=True)
        try:
            want = read_hello(line, Want)
            keys = read_keys(line, want.keys)
            if want.identity != self._own.identity:
                line.send(hello(Answer("the KV of this engine is of another model or shape", 0, False)))
                raise MoveFailed(FetchEnd.REFUSED, "the other engine's KV is of another model or shape")
            line.extend(self._own.clock() + min(max(0.0, want.seconds), MOST_S) + GRACE_S)
            number, pages = next(self._numbers), queue.SimpleQueue[HostPageId | None]()
            self._queues[number] = pages
            self.lines.add(line)
            self._own.report(ExportPages(number, keys, want.computes))
            try:
                self._send_pages(line, number, pages, len(keys))
            finally:
                del self._queues[number]
                self.lines.discard(line)
                self._own.report(EndExport(number))
        finally:
            line.close()

    def _send_pages(self, line: Line, number: int, pages: queue.SimpleQueue[HostPageId | None], most: int) -> None:
        """Send the KV pages of export `number` to the other engine as they become ready, until the last one has been
        taken or no more come. `most` is how many it wants."""
        window = max(1, min(most, WINDOW_BYTES // self._own.memory.page_bytes))
        transport = self._open_transport(line, window)
        sent = taken = 0

        def note_taken(more: int) -> None:
            nonlocal taken
            if more:
                taken += more
                if taken > sent:
                    raise MoveFailed(FetchEnd.CORRUPT, "the receiver took more pages than were sent")
                self._own.report(PagesSent(number, more))

        try:
            while sent < most and (page := self._next(line, pages, note_taken)) is not None:
                while sent - taken >= window:
                    note_taken(len(line.receive(1)))
                self._own.memory.settle()
                content = self._own.memory.page(page)
                transport.send(sent, FRAME.pack(Kind.PAGE, sent, crc32(content)), content)
                sent += 1
            reason = Reason.DONE if sent == most else Reason.GONE
            line.send(FRAME.pack(Kind.END, reason, 0))
            while taken < sent:
                note_taken(len(line.receive(1)))
        finally:
            transport.close()
        log.info("kv_sent", pages=sent, wanted=most)

    def _next(
        self, line: Line, pages: queue.SimpleQueue[HostPageId | None], note_taken: Callable[[int], None]
    ) -> HostPageId | None:
        """Wait for the next page of an export, and return its host page, or None at the end. Calls `note_taken` with
        the number of pages that the receiver has taken. Raises MoveFailed if it is gone or late."""
        while True:
            note_taken(line.poll())
            try:
                return pages.get(timeout=min(POLL_S, line.left()))
            except queue.Empty:
                line.left()

    def _open_transport(self, line: Line, window: int) -> Transport:
        if not (self._is_local and can_share()):
            line.send(hello(Answer("", window, False)))
            return StreamTransport(line)
        file = shared_memory(window * self._own.memory.page_bytes)
        try:
            line.send_file(hello(Answer("", window, True)), file)
        except MoveFailed:
            os.close(file)
            raise
        return SharedTransport(line, file, window, self._own.memory.page_bytes)


assert len(TAKEN) == 1, "each byte from the receiver stands for a page"
