"""The connections over which pages move, with the test in the place of the engines: every transport, and peers that do
not follow the protocol."""

import os
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from engine.core.messages.moves import (
    CancelFetch,
    EndExport,
    ExportOver,
    ExportPages,
    FetchEnd,
    FetchEnded,
    FetchPages,
    PagesCame,
    PagesReady,
    PagesSent,
)
from engine.core.messages.requests import KvSource
from engine.executor.fake import FakePages
from engine.kv import receiver as receiving
from engine.kv import sender as sending
from engine.kv.line import OwnEngine
from engine.kv.messages import HELLO, MAGIC, MOST_HELLO, VERSION
from engine.kv.mover import listen_address
from engine.kv.receiver import Receiver
from engine.kv.sender import Sender
from engine.kv.transports import shared_memory
from engine.rpc.target import EngineTarget, EngineTls, kv_address
from tests.gateway.certificates import Authority

KEYS = tuple(bytes([number]) * 16 for number in range(6))
KINDS = ["shared", "unix", "tcp", "tls"]


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    authority = Authority.at(tmp_path_factory.mktemp("tls"))
    issued = authority.issue("engine", "a-name-of-its-own")
    return EngineTls(authority.file, issued.cert, issued.key)


class Ends:
    """A sender and a receiver, and what they report."""

    def __init__(self, address, tls=None, identity="same"):
        self.sent, self.come = SimpleQueue(), SimpleQueue()
        self.source, self.target = FakePages(), FakePages()
        for number in range(len(KEYS)):
            self.source.page(number)[:] = bytes([number + 1]) * self.source.page_bytes
        self.sender = Sender(OwnEngine(identity, self.source, self.sent.put, time.monotonic), address, tls)
        self.receiver = Receiver(OwnEngine("same", self.target, self.come.put, time.monotonic), tls)

    def fetch(self, seconds=20.0, address=""):
        source = KvSource(address or self.sender.address, seconds, True)
        pages = tuple(range(100, 100 + len(KEYS)))
        self.receiver.begin(FetchPages(1, source, time.monotonic() + seconds, KEYS, pages))

    def export(self):
        """Return the number of the export that the sender begins next."""
        report = self.sent.get(timeout=20)
        assert isinstance(report, ExportPages) and report.keys == KEYS and report.waits
        return report.id

    def end(self):
        """Return how the fetch ends, and the number of pages that came before."""
        come = 0
        while True:
            report = self.come.get(timeout=20)
            if isinstance(report, FetchEnded):
                return report.end, come
            assert report == PagesCame(1, 1)
            come += 1

    def freed(self):
        """Wait for the end of the export; return the number of pages that were sent."""
        sent = 0
        while not isinstance(report := self.sent.get(timeout=20), EndExport):
            sent += report.count if isinstance(report, PagesSent) else 0
        return sent


@pytest.fixture
def ends(tmp_path):
    ends = Ends(f"unix:{tmp_path}/kv")
    yield ends
    ends.sender.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_transport_carries_the_pages(tmp_path, tls, monkeypatch, kind):
    monkeypatch.setattr(sending, "can_share", lambda: kind == "shared")
    monkeypatch.setattr(sending, "WINDOW_BYTES", 2 * FakePages.page_bytes)
    address = f"unix:{tmp_path}/kv" if kind in ("shared", "unix") else "127.0.0.1:0"
    ends = Ends(address, tls if kind == "tls" else None)
    ends.fetch()
    number = ends.export()
    for pages in ((0,), (1, 2, 3), (4, 5)):
        ends.sender.ready(PagesReady(number, pages))
    ends.sender.over(ExportOver(number))
    assert ends.end() == (FetchEnd.DONE, 6) and ends.freed() == 6
    assert all(ends.target.page(100 + number) == ends.source.page(number) for number in range(6))
    ends.sender.close()


def test_what_is_gone_is_said(ends):
    ends.fetch()
    number = ends.export()
    ends.sender.ready(PagesReady(number, (0, 1)))
    ends.sender.over(ExportOver(number))
    assert ends.end() == (FetchEnd.GONE, 2) and ends.freed() == 2


def test_the_deadline_and_a_cancellation_end_both_sides(ends):
    ends.fetch(seconds=0.05)
    ends.export()
    assert ends.end() == (FetchEnd.LATE, 0) and ends.freed() == 0
    ends.fetch()
    ends.export()
    ends.receiver.cancel(CancelFetch(1))
    assert ends.end() == (FetchEnd.CANCELLED, 0) and ends.freed() == 0


def test_another_identity_a_wrong_checksum_and_no_peer(ends, tmp_path, monkeypatch):
    other = Ends(f"unix:{tmp_path}/other", identity="another")
    ends.fetch(address=other.sender.address)
    assert ends.end() == (FetchEnd.REFUSED, 0)
    ends.fetch(address=f"unix:{tmp_path}/nothing")
    assert ends.end() == (FetchEnd.CUT, 0)
    ends.fetch(address="10.0.0.1:7000")
    assert ends.end() == (FetchEnd.REFUSED, 0), "another machine, without TLS"
    monkeypatch.setattr(receiving, "crc32", lambda page: 1)
    ends.fetch()
    ends.sender.ready(PagesReady(ends.export(), (0,)))
    assert ends.end() == (FetchEnd.CORRUPT, 0) and ends.freed() == 0


ANSWERS = {
    "garbage": (os.urandom(200), FetchEnd.CORRUPT),
    "another version": (HELLO.pack(MAGIC, VERSION + 1, 2) + b"{}", FetchEnd.REFUSED),
    "too long": (HELLO.pack(MAGIC, VERSION, MOST_HELLO + 1), FetchEnd.CORRUPT),
    "no json": (HELLO.pack(MAGIC, VERSION, 4) + b"[[[[", FetchEnd.CORRUPT),
    "no memory": (HELLO.pack(MAGIC, VERSION, 41) + b'{"refusal": "","window": 1,"shared":true}', FetchEnd.CORRUPT),
    "wrong frame": (
        HELLO.pack(MAGIC, VERSION, 42) + b'{"refusal": "","window": 1,"shared":false}' + b"\x09" * 9,
        FetchEnd.CORRUPT,
    ),
    "nothing": (b"", FetchEnd.CUT),
}


@contextmanager
def asked_by(ends, tmp_path):
    """Yield a connection over which the receiver fetches pages from the test, in the place of a sender."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{tmp_path}/odd")
        server.listen()
        ends.fetch(address=f"unix:{tmp_path}/odd")
        with server.accept()[0] as connection:
            yield connection


@pytest.mark.parametrize("what", ANSWERS)
def test_a_sender_that_speaks_otherwise_does_no_harm(ends, tmp_path, what):
    said, expected = ANSWERS[what]
    with asked_by(ends, tmp_path) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        assert ends.end() == (expected, 0)


@pytest.mark.parametrize("sealed", [True, False])
def test_memory_of_the_wrong_size_or_that_may_shrink_is_not_read(ends, tmp_path, sealed):
    file = shared_memory(3) if sealed else os.memfd_create("x")
    os.truncate(file, 3 if sealed else FakePages.page_bytes)
    said = HELLO.pack(MAGIC, VERSION, 41) + b'{"refusal": "","window": 1,"shared":true}'
    with asked_by(ends, tmp_path) as connection:
        socket.send_fds(connection, [said], [file])
        assert ends.end() == (FetchEnd.CORRUPT, 0)
    os.close(file)


def test_memory_that_comes_with_a_refusal_is_closed(ends, tmp_path):
    file = shared_memory(3)
    with asked_by(ends, tmp_path) as connection:
        socket.send_fds(connection, [HELLO.pack(MAGIC, VERSION + 1, 2) + b"{}"], [file])
        assert ends.end() == (FetchEnd.REFUSED, 0)
    inode = os.fstat(file).st_ino
    assert sum(path.exists() and path.stat().st_ino == inode for path in Path("/proc/self/fd").iterdir()) == 1
    os.close(file)


@pytest.mark.parametrize("said", [b"", os.urandom(500), HELLO.pack(MAGIC, VERSION, 3) + b"abc", b"\x00" * 100_000])
def test_a_receiver_that_speaks_otherwise_does_no_harm(ends, said):
    with socket.socket(socket.AF_UNIX) as odd:
        odd.connect(ends.sender.address.removeprefix("unix:"))
        with suppress(OSError):
            odd.sendall(said)
            odd.shutdown(socket.SHUT_WR)
            odd.recv(1000)
    assert ends.sent.empty()
    ends.fetch()
    ends.sender.over(ExportOver(ends.export()))
    assert ends.end() == (FetchEnd.GONE, 0)


def test_more_pages_taken_than_were_sent_ends_the_move(ends, monkeypatch):
    monkeypatch.setattr(receiving, "TAKEN", b"\x01" * 3)
    ends.fetch()
    number = ends.export()
    ends.sender.ready(PagesReady(number, (0,)))
    assert ends.end()[0] is FetchEnd.CUT and ends.freed() == 0


def test_a_place_is_refused_while_all_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(sending, "MOST_CONNECTIONS", 1)
    ends = Ends(f"unix:{tmp_path}/kv")
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(f"{tmp_path}/kv")
        ends.fetch()
        assert ends.end() == (FetchEnd.CUT, 0)
    ends.sender.close()


def test_a_socket_that_a_dead_process_left_is_replaced_and_a_live_one_is_not(ends, tmp_path):
    with pytest.raises(OSError, match="another process listens"):
        Ends(ends.sender.address)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/dead")
    Ends(f"unix:{tmp_path}/dead").sender.close()


def test_where_an_engine_gives_pages(tls):
    here, there = EngineTarget("unix:/run/e0"), EngineTarget("host:7001", tls)
    assert [listen_address(setting, here) for setting in ("", "auto", "unix:/x")] == ["", "unix:/run/e0.kv", "unix:/x"]
    assert listen_address("auto", there) == "host:0" and listen_address("0.0.0.0:7100", there) == "0.0.0.0:7100"
    with pytest.raises(ValueError, match="needs tls"):
        listen_address("0.0.0.0:7100", here)
    with pytest.raises(ValueError, match="address"):
        listen_address("nowhere", here)
    assert kv_address(":7100", "host:7001") == "host:7100" and kv_address("unix:/x", "host:7001") == "unix:/x"
