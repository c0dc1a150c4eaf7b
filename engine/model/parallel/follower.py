"""The main module of ranks other than 0: `python -m engine.model.parallel.follower`, started by rank 0.

The process ends when rank 0 closes its connection or ends: in the middle of a step too, so that no rank outlives it.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.model.memory.allocation import pick_device
from engine.model.parallel.messages import Drop, Fetch, Joining, Message, Ready, Refused, Step
from engine.model.ranks.collectives import Ranks, join_ranks
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner


class Channel(Protocol):
    """Protocol of a follower's end of the connection to rank 0."""

    def send(self, obj: object, /) -> None: ...

    def recv(self) -> Message:
        """Wait for the next message of rank 0. Raises EOFError or OSError if the connection is closed."""


def follow(rank_zero: Channel, config: EngineConfig, ranks: Ranks) -> None:
    """Load this rank's part of the model, and do what rank 0 says until `rank_zero` is closed on either side. If the
    model cannot be served, tells rank 0 the reason and returns. Raises what a collective operation raises."""
    sending = threading.Lock()

    def reply(answer: object) -> None:
        with sending:
            rank_zero.send(answer)

    try:
        runner = ModelRunner(load(config, ranks=ranks))
    except ValueError as error:
        reply(Refused(str(error)))
        return
    runner.connect(reply)
    reply(Ready())
    try:
        while True:
            _obey(runner, rank_zero.recv())
    except (EOFError, OSError):
        runner.close()


def _obey(runner: ModelRunner, message: Message) -> None:
    match message:
        case Step(plan, tokens, collected):
            for _ in range(collected):
                runner.collect()
            runner.append(tokens)
            runner.submit(plan)
        case Fetch(fetch):
            runner.fetch(fetch)
        case Drop(adapter_hash):
            runner.drop(adapter_hash)


class _Inbox:
    """The follower's end of the connection to rank 0. A thread reads it all the time, and ends this process as soon as
    rank 0 has closed the connection or ended, even in the middle of a step."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.send = connection.send
        self.recv = self._messages.get
        threading.Thread(target=self._read, name="rank-0", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def main() -> None:
    from torch.distributed import FileStore

    for number in (signal.SIGINT, signal.SIGTERM):  # may be sent to all processes of a group: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    connection, rank, store = Connection(int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
    config: EngineConfig = EngineConfig.from_json(connection.recv())
    device = pick_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    connection.send(Joining())
    ranks = join_ranks(FileStore(store, config.ranks), rank, config, device)
    try:
        follow(_Inbox(connection), config, ranks)
    except Exception:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
