"""An engine that computes nothing, for measuring a gateway: its answers repeat a few fixed tokens.

    python -m benchmarks.instant_engine --config JSON --address unix:PATH --until-stdin-closes [--cores 1]

It accepts the arguments of `engine.serve.server`, so that a gateway's own supervisor can start it, and answers through
the same gRPC service: one message per step, with one token for every request. `--cores` names its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import grpc

from benchmarks.runner import core_set
from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.messages.commands import Abort, Submit
from engine.core.messages.requests import FinishReason, TokenEvent
from engine.core.state.engine_state import EngineState
from engine.pb import engine_pb2 as pb
from engine.pb import engine_pb2_grpc as pb_grpc
from engine.process.stopping import stop_with_stdin
from engine.rpc.service import EngineService
from engine.rpc.wire import PROTOCOL
from engine.sizing import CPU_SEQS

T = TypeVar("T")

TOKENS = range(1000, 1016)
"""Token ids that answers cycle through; each is a word of the vocabulary."""
MAX_MODEL_LEN = 65_536
THREADS = 16


class InstantEngine:
    """Implements the part of `Engine` that `EngineService` uses."""

    clock = staticmethod(time.monotonic)
    step_seconds = 0.0

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Submit | Abort | None] = queue.SimpleQueue()
        self._left: dict[str, int] = {}
        """Number of tokens still to generate, by request id."""
        self._state = EngineState.create(CoreConfig(num_pages=2))

    def look(self, question: Callable[[EngineState], T]) -> T:
        return question(self._state)

    inspect = look

    def stop(self) -> None:
        self.inbox.put(None)

    def run(self, deliver: Callable[[list[TokenEvent]], None]) -> None:
        """Process commands and deliver tokens until `stop` is called."""
        while True:
            begun: list[TokenEvent] = []
            while not self._left or not self.inbox.empty():
                command = self.inbox.get()
                if command is None:
                    return
                begun += self._take(command)
            deliver(begun + self._step())

    def _take(self, command: Submit | Abort) -> list[TokenEvent]:
        if isinstance(command, Abort):
            self._left.pop(command.request_id, None)
            return []
        self._left[command.request.id] = command.request.params.max_tokens
        return [TokenEvent(command.request.id)]

    def _step(self) -> list[TokenEvent]:
        events = []
        for request_id, left in tuple(self._left.items()):
            self._left[request_id] = left - 1
            finish = None if left > 1 else FinishReason.LENGTH
            events.append(TokenEvent(request_id, (TOKENS[left % len(TOKENS)],), (), finish))
            if left == 1:
                del self._left[request_id]
        return events


def serve(config: EngineConfig, address: str, until_stdin_closes: bool) -> None:
    vocab_size = json.loads((Path(config.model) / "config.json").read_text())["vocab_size"]
    info = pb.EngineInfo(
        model=config.model, model_hash="instant", device="none", dtype="none", backend="instant", vocab_size=vocab_size
    )
    info.protocol = PROTOCOL
    info.max_model_len, info.max_seqs = MAX_MODEL_LEN, config.max_seqs or CPU_SEQS
    engine = InstantEngine()
    service = EngineService(engine, info)  # type: ignore[arg-type]
    server = grpc.server(ThreadPoolExecutor(THREADS))
    pb_grpc.add_EngineServicer_to_server(service, server)
    server.add_insecure_port(address)
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    if until_stdin_closes:
        stop_with_stdin(engine.stop)
    engine.run(service.deliver)
    server.stop(grace=0).wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instant_engine", description=__doc__)
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--address", required=True)
    parser.add_argument("--until-stdin-closes", action="store_true")
    parser.add_argument("--cores", type=core_set, default=frozenset(), help="to run on; none: all")
    arguments, _ = parser.parse_known_args()  # ignores --pulse and --previous: this engine does not hang or crash
    if arguments.cores:
        os.sched_setaffinity(0, arguments.cores)
    serve(EngineConfig.from_json(arguments.config), arguments.address, arguments.until_stdin_closes)


if __name__ == "__main__":
    main()
