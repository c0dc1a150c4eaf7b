"""The `Mover` of an engine process: passes the engine's orders to the threads that fetch and send pages."""

from __future__ import annotations

from engine.core.messages.moves import CancelFetch, ExportOver, FetchPages, MoveOrder, PagesReady
from engine.kv.line import OwnEngine
from engine.kv.receiver import Receiver
from engine.kv.sender import Sender
from engine.rpc.target import UNIX, EngineTarget, EngineTls, check_address, is_local


class KvMover:
    """Fetches KV pages from other engines for `own` and, if `listen` (`unix:PATH` or `HOST:PORT`) is not empty, sends
    its own. `tls` has files for mutual TLS with other machines. Raises ValueError or OSError for an address or
    files."""

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
    """Return the address at which an engine gives KV pages, by its setting `engine.kv_listen`; `auto` means one beside
    `target`, its own, and empty none. Raises ValueError for one that other machines reach without TLS."""
    if setting and setting != "auto":
        check_address(setting, any_port=True)
        if target.tls is None and not is_local(setting):
            raise ValueError(f"engine.kv_listen {setting} can be reached from other machines, so it needs tls")
    if setting != "auto":
        return setting
    host, _, _ = target.address.rpartition(":")
    return f"{target.address}.kv" if target.address.startswith(UNIX) else f"{host}:0"
