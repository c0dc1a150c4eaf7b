"""The `Mover` of an engine process: passes the engine's orders to the threads that fetch and send pages."""

from __future__ import annotations

from engine.core.kv_moves import CancelFetch, ExportOver, FetchPages, MoveOrder, PagesReady
from engine.engine import Engine
from engine.executor.base import PageMemory
from engine.kv.own_engine import OwnEngine
from engine.kv.receiver import Receiver
from engine.kv.sender import Sender
from engine.pb import engine_pb2 as pb
from engine.rpc.target import UNIX, EngineTarget, EngineTls, check_address, is_local


class KvMover:
    """Fetches pages for an engine and, with an address, gives pages to other engines.

    Args:
        engine: the engine, which gets the reports and whose clock counts.
        identity: see `EngineInfo.kv_identity`.
        memory: the engine's host pages.
        listen: where to give pages: `unix:PATH` or `HOST:PORT`. Empty means nowhere.
        tls: files for mutual TLS, without which only engines on this machine are reached.

    Raises ValueError if the address or the TLS files cannot be used, OSError if the address is not free.
    """

    def __init__(
        self, engine: Engine, identity: str, memory: PageMemory, listen: str = "", tls: EngineTls | None = None
    ) -> None:
        own = OwnEngine(identity, memory, engine.inbox.put, engine.clock)
        self._receiver = Receiver(own, tls)
        self._sender = Sender(own, listen, tls) if listen else None
        engine.connect(self)

    @property
    def address(self) -> str:
        """Where this engine gives pages (see `EngineInfo.kv_address`)."""
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
        """Accept no more connections."""
        if self._sender is not None:
            self._sender.close()


def listen_address(setting: str, target: EngineTarget) -> str:
    """Return where an engine gives KV pages, by `engine.kv_listen`; empty means nowhere. `auto` is beside `target`,
    where the engine itself listens: a socket whose name ends with `.kv`, or any free port of the same host. Raises
    ValueError for an address that other machines reach, if there are no TLS files."""
    if setting and setting != "auto":
        check_address(setting, any_port=True)
        if target.tls is None and not is_local(setting):
            raise ValueError(f"engine.kv_listen {setting} can be reached from other machines, so it needs tls")
    if setting != "auto":
        return setting
    host, _, _ = target.address.rpartition(":")
    return f"{target.address}.kv" if target.address.startswith(UNIX) else f"{host}:0"


def start_mover(
    engine: Engine, info: pb.EngineInfo, memory: PageMemory | None, setting: str, target: EngineTarget
) -> KvMover | None:
    """Let an engine fetch KV pages and, unless `setting` (`engine.kv_listen`) is empty, give them; fill in where in
    `info`. Returns None for an engine that has no host pages. Raises ValueError, which names the setting, if it cannot
    listen there."""
    if memory is None or not engine.state.host.num_pages:
        if setting:
            raise ValueError("engine.kv_listen needs host pages, for which too little memory is free")
        info.kv_identity = ""
        return None
    try:
        mover = KvMover(engine, info.kv_identity, memory, listen_address(setting, target), target.tls)
    except OSError as error:
        raise ValueError(f"engine.kv_listen: {error}") from error
    info.kv_address = mover.address
    return mover
