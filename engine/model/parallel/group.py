"""Starts the processes of an engine's other ranks, and connects them to rank 0, which is this process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from engine.config import EngineConfig
from engine.executor.base import RankDied
from engine.model.memory.allocation import Progress, pick_device
from engine.model.parallel.leader import Leader
from engine.model.parallel.messages import Message, Refused, Reply
from engine.model.ranks.collectives import join_ranks
from engine.model.runner.loading import Loaded, load
from engine.model.runner.model_runner import ModelRunner

ROOT = Path(__file__).resolve().parents[3]
END_S = 5.0
"""Seconds that a rank may take to end once its connection is closed, before it is killed."""


class RankProcess:
    """A process that runs one rank other than 0: see `Follower`. It ends when this process does."""

    def __init__(self, rank: int, store: Path, config: EngineConfig) -> None:
        ours, theirs = socket.socketpair()
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.model.parallel.follower", str(theirs.fileno()), str(rank), str(store)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            )
        self.rank = rank
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._connection.send(config.to_json())

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        with self._sending:
            self._connection.send(message)

    def receive(self) -> Reply:
        reply: Reply = self._connection.recv()
        return reply

    def has_reply(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; return whether there is a reply, or the rank is gone."""
        return self._connection.poll(timeout)

    def death(self) -> tuple[str, int]:
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}", -status
        return f"ended with exit status {status}", 0

    def close(self) -> None:
        hang_up(self._connection)
        self.death()


def hang_up(connection: Connection) -> None:
    """End a connection over a socket: threads at both ends that wait for messages get EOFError."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


def start_ranks(config: EngineConfig, on_progress: Progress) -> tuple[Loaded, Leader]:
    """Start the other ranks of an engine, load the model on all of them, and return rank 0's part and the executor over
    all ranks. Raises what `load` raises, and ValueError if another rank cannot serve its part."""
    from torch.distributed import FileStore

    folder = Path(tempfile.mkdtemp(prefix="loralane-ranks-"))
    others = [RankProcess(rank, folder / "store", config) for rank in range(1, config.ranks)]
    try:
        device = pick_device(config.device)
        _await(others)  # one that never joins would keep the others waiting
        ranks = join_ranks(FileStore(str(folder / "store"), config.ranks), 0, config, device)
        loaded = load(config, on_progress, ranks=ranks)
        leader = Leader(ModelRunner(loaded), others)
        _await(others)
    except BaseException as error:
        # A RuntimeError is perhaps that of an operation that another rank has not joined.
        cause = _failure(others) if isinstance(error, RuntimeError) else None
        for other in others:
            other.close()
        if cause is not None:
            raise cause from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    leader.start()
    return loaded, leader


def _await(ranks: list[RankProcess]) -> None:
    """Wait for the next reply of each other rank while they start. Raises ValueError if one refuses the model, and
    RankDied if one ends."""
    for rank in ranks:
        if error := _next_failure(rank):
            raise error


def _failure(ranks: list[RankProcess]) -> Exception | None:
    """Return why a rank that has not started will not start; None means that no rank has told it within a second."""
    for rank in ranks:
        while rank.has_reply(1.0):
            if error := _next_failure(rank):
                return error
    return None


def _next_failure(rank: RankProcess) -> Exception | None:
    """Wait for a rank's next reply. Return RankDied if the rank ended instead, ValueError if it refuses the model, and
    None for any other reply."""
    try:
        reply = rank.receive()
    except (EOFError, OSError):
        how, number = rank.death()
        return RankDied(f"rank {rank.rank} {how} while it started", number)
    return ValueError(f"rank {rank.rank}: {reply.reason}") if isinstance(reply, Refused) else None
