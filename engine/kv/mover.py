"""The `Mover` of an engine process: passes the engine's orders to the threads that fetch and send pages."""

from __future__ import annotations

from engine.core.messages.moves import CancelFetch, ExportOver, FetchPages, MoveOrder, PagesReady
from engine.kv.line import OwnEngine
from engine.kv.receiver import Receiver
from engine.kv.sender import Sender
from engine.rpc.target import UNIX, EngineTarget, EngineTls, check_address, is_local


class KvMover:
    """Fetches KV pages for an engine from other engines and, with an address, sends KV pages to other engines.

    Args:
        own: the engine of this process.
        listen: where to give pages: `unix:PATH` or `HOST:PORT`. Empty means nowhere.
        tls: files for mutual TLS, without which only engines on this machine are reached.

    Raises ValueError if the address or the TLS files cannot be used, OSError if the address is not free.
    """

    def __init__(self, own: OwnEngine, listen: str = "", tls: EngineTls | None = None) -> None:
        self._receiver = Receiver(own, tls)
        self._sender = Sender(own, listen, tls) if listen else None

    @property
    def address(self) -> str:
        """Address at which other engines can fetch KV pages from this one, as published in `EngineInfo.kv_address`. An
        empty string means that this engine gives none."""
        return self._sender.address if self._sender else ""

    def take(self, order: MoveOrder) -> None:
        match order:
            case FetchPages():
                self._receiver.begin(order)
            case CancelFetch():
                self._receiver.cancel(order)
            case PagesReady() if self._sender:
                self._sender.ready(order)
            case ExportOver() if self._sender:
                self._sender.over(order)

    def close(self) -> None:
        """Accept no more connections from engines that fetch KV pages. Moves under way go on."""
        if self._sender is not None:
            self._sender.close()


def listen_address(setting: str, target: EngineTarget) -> str:
    """Return the address at which an engine gives KV pages to others, by its setting `engine.kv_listen`; empty means
    that it gives none. `auto` means an address beside `target`, the engine's own: a socket whose name ends with `.kv`,
    or any free port of the same host. Raises ValueError for an address that other machines reach, if there are no TLS
    files."""
    if setting and setting != "auto":
        check_address(setting, any_port=True)
        if target.tls is None and not is_local(setting):
            raise ValueError(f"engine.kv_listen {setting} can be reached from other machines, so it needs tls")
    if setting != "auto":
        return setting
    host, _, _ = target.address.rpartition(":")
    return f"{target.address}.kv" if target.address.startswith(UNIX) else f"{host}:0"
