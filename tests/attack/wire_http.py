"""Attacks on the HTTP port by bytes: what a peer sends without an end, sends ahead, hides, or does not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from tests.attack.attacker import Attack, Attacker

BODY_BYTES = 8 * 2**20
HIDDEN = b"GET /version HTTP/1.1\r\nhost: here\r\n\r\n"
PATIENCE_SECONDS = 20.0


class Peer:
    """One raw connection to the gateway."""

    def __init__(self, attacker: Attacker, *, reads: bool = True) -> None:
        """A peer that `reads` nothing also lets the kernel take little for it."""
        self._address = (attacker.http.base_url.host, attacker.http.base_url.port or 80)
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if not reads:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    async def send(self, data: bytes) -> bool:
        """Connect if need be, and send bytes; returns whether the gateway took them all."""
        loop = asyncio.get_running_loop()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                if self._address is not None:
                    address, self._address = self._address, None
                    await loop.sock_connect(self._socket, address)
                await loop.sock_sendall(self._socket, data)
                return True
        return False

    async def status(self) -> str:
        """Return the status of the next answer, `closed` if there is none, and `none` if none comes in time."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                head = await asyncio.get_running_loop().sock_recv(self._socket, 4096)
        except TimeoutError:
            return "none"
        except OSError:
            return "closed"
        return head[9:12].decode("latin-1") or "closed"

    async def text(self) -> bytes:
        """Return all that is answered until the gateway hangs up."""
        text = b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while piece := await asyncio.get_running_loop().sock_recv(self._socket, 65536):
                    text += piece
        return text

    def leave(self) -> None:
        self._socket.close()


def head(attacker: Attacker, path: str, *headers: str, method: str = "POST", key: bool = True) -> bytes:
    shown = [f"authorization: Bearer {attacker.key}"] if key else []
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: here", *shown, *headers, "", ""]).encode()


def chat(attacker: Attacker, max_tokens: int = 2000) -> bytes:
    body = json.dumps(attacker.body(max_tokens=max_tokens, stream=True, ignore_eos=True)).encode()
    return head(attacker, "/v1/chat/completions", f"content-length: {len(body)}") + body


async def endless_trailers(attacker: Attacker, count: int = 8, mebibytes: int = 30) -> Counter[str]:
    """Send trailers without end behind the last chunk of a body, without a key and with one."""

    async def send(number: int) -> str:
        peer = Peer(attacker)
        start = head(attacker, "/v1/chat/completions", "transfer-encoding: chunked", key=bool(number % 2)) + b"0\r\n"
        await peer.send(start)
        piece = (b"a:b\r\n" if number % 4 < 2 else b"a") * 13_000
        taken = True
        for _ in range(mebibytes * 2**20 // len(piece)):
            taken = taken and await peer.send(piece)
        status = await peer.status()
        peer.leave()
        return f"{'taken whole' if taken else 'cut off'} {status}"

    return Counter(await asyncio.gather(*(send(number) for number in range(count))))


async def key_in_trailers(attacker: Attacker) -> Counter[str]:
    """Show the key only behind the body, where a proxy does not look for it."""
    body = json.dumps(attacker.body(max_tokens=1)).encode()
    start = head(attacker, "/v1/chat/completions", "transfer-encoding: chunked", key=False)
    peer = Peer(attacker)
    trailer = f"authorization: Bearer {attacker.key}\r\n".encode()
    await peer.send(start + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailer))
    status = await peer.status()
    peer.leave()
    return Counter([status])


async def long_heads(attacker: Attacker, count: int = 600, seconds: float = 3.0) -> Counter[str]:
    """Leave heads of 60 kB unfinished, without a key, and ask for another page meanwhile."""
    peers = [Peer(attacker) for _ in range(count)]
    start = head(attacker, "/health", method="GET", key=False)[:-2] + b"x-a: " + b"a" * 60_000
    taken = await asyncio.gather(*(peer.send(start) for peer in peers))
    health = await attacker.http.get("/health")
    await asyncio.sleep(seconds)
    for peer in peers:
        peer.leave()
    return Counter([f"taken {one}" for one in taken] + [f"beside them {health.status_code}"])


async def requests_sent_ahead(attacker: Attacker, count: int = 10, ahead: int = 300) -> Counter[str]:
    """Send long chats ahead of each other on each connection, read the first status, and leave."""

    async def send() -> str:
        peer = Peer(attacker)
        await peer.send(chat(attacker) * ahead)
        status = await peer.status()
        peer.leave()
        return status

    return Counter(await asyncio.gather(*(send() for _ in range(count))))


async def unread_documents(attacker: Attacker, count: int = 300, seconds: float = 3.0) -> Counter[str]:
    """Ask for the OpenAPI document without a key, many times on each connection, and read nothing."""
    peers = [Peer(attacker, reads=False) for _ in range(count)]
    asked = head(attacker, "/openapi.json", method="GET", key=False) * 50
    taken = await asyncio.gather(*(peer.send(asked) for peer in peers))
    await asyncio.sleep(seconds)
    for peer in peers:
        peer.leave()
    return Counter(f"taken {one}" for one in taken)


async def unfinished_bodies(attacker: Attacker, count: int = 150, seconds: float = 5.0) -> Counter[str]:
    """Send `count` bodies of 8 MiB that lack their last KiB, and leave them so."""
    piece = b"a" * (BODY_BYTES - 1024)
    start = head(attacker, "/v1/chat/completions", f"content-length: {BODY_BYTES}")

    async def send() -> str:
        peer = Peer(attacker)
        taken = await peer.send(start + piece)
        try:
            async with asyncio.timeout(seconds):
                return await peer.status()
        except TimeoutError:
            return f"held, taken {taken}"
        finally:
            peer.leave()

    return Counter(await asyncio.gather(*(send() for _ in range(count))))


async def unread_answers(
    attacker: Attacker, count: int = 30, seconds: float = 5.0, kilobytes: int = 500
) -> Counter[str]:
    """Have long texts tokenized, whose answers are several times as long, and do not read the answers."""
    fields = {"model": attacker.model, "prompt": "\U0001f9ff" * (kilobytes * 256), "return_token_strs": True}
    body = json.dumps(fields, ensure_ascii=False).encode()
    peers = [Peer(attacker, reads=False) for _ in range(count)]
    start = head(attacker, "/tokenize", f"content-length: {len(body)}")
    await asyncio.gather(*(peer.send(start + body) for peer in peers))
    await asyncio.sleep(seconds)
    statuses = await asyncio.gather(*(peer.status() for peer in peers))
    for peer in peers:
        peer.leave()
    return Counter(statuses)


async def requests_behind_an_upgrade(attacker: Attacker) -> Counter[str]:
    """Hide a request in a body behind an Upgrade header; count whether it was answered."""
    found: Counter[str] = Counter()
    for protocol in ("h2c", "websocket", "foo"):
        peer = Peer(attacker)
        headers = ("connection: Upgrade", f"upgrade: {protocol}", f"content-length: {len(HIDDEN)}")
        second = head(attacker, "/nothing", "connection: close", method="GET")
        await peer.send(head(attacker, "/health", *headers, method="GET"))
        await asyncio.sleep(0.1)
        await peer.send(HIDDEN + second)
        text = await peer.text()
        peer.leave()
        found[f"{text.count(b'HTTP/1.1 ')} answers"] += 1
        found["the hidden request was answered"] += b'"version"' in text
    return +found


ATTACKS: Mapping[str, Attack] = {
    "trailers without end": endless_trailers,
    "a key in trailers": key_in_trailers,
    "long heads": long_heads,
    "requests sent ahead": requests_sent_ahead,
    "unread documents": unread_documents,
    "unfinished bodies": unfinished_bodies,
    "unread answers": unread_answers,
    "requests behind an Upgrade": requests_behind_an_upgrade,
}
