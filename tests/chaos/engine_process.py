"""`engine.serve.server` with hooks for what no signal can do: it takes the same arguments, and `--hooks FOLDER`.

It listens in that folder; where a gateway looks for it lies a link to the proxy. A file `kv_ports` there says where the
engine listens for others that fetch KV, and where those find the proxy; with files in `kv_tls`, engines use mutual TLS
there. Every step takes a while, so that faults find requests under way. A file `out_of_memory` makes the next step fail
as an allocation would, and while `corrupt_kv` is there, a byte of each page that is sent in shared memory is wrong.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.core.messages.moves import PageMemory
from engine.core.messages.step import StepResult
from engine.executor.base import Executor
from engine.kv.mover import KvMover
from engine.kv.transports import SharedTransport
from engine.rpc.target import EngineTarget, EngineTls
from engine.serve import build as engine_build
from engine.serve import server
from tests.chaos.paged_executor import PagedExecutor

STEP_SECONDS = 0.004
Builder = Callable[[EngineConfig, Callable], tuple]


def hooked(build: Builder, folder: Path) -> Builder:
    def built(config: EngineConfig, on_progress: Callable) -> tuple:
        core, executor, info = build(config, on_progress)
        executor.collect = failing(executor, folder / "out_of_memory")
        return core, executor, info

    return built


def failing(executor: Executor, switch: Path) -> Callable[[], StepResult]:
    """The executor's own `collect`, slower, and once without memory whenever there is a switch."""
    collect = executor.collect

    def collected() -> StepResult:
        time.sleep(STEP_SECONDS)
        if switch.exists():
            switch.unlink()
            raise MemoryError("simulated: no page could be allocated")
        return collect()

    return collected


def behind_proxy(
    start: Callable[..., KvMover | None], tls: EngineTls | None, listen: int, front: int
) -> Callable[..., KvMover | None]:
    """Return a `start_mover` that gives KV at the port `listen`, and says that it is the port `front`."""

    def started(engine, info, memory: PageMemory | None, setting: str, target: EngineTarget) -> KvMover | None:
        mover = start(engine, info, memory, f"127.0.0.1:{listen}", replace(target, tls=tls))
        info.kv_address = f"127.0.0.1:{front}"
        return mover

    return started


def tls_files(folder: Path) -> EngineTls | None:
    """Return the files that an `Authority` left in a folder for engines. None means that there is no such folder."""
    if not folder.exists():
        return None
    return EngineTls(folder / "ca.pem", folder / "engine.pem", folder / "engine.key")


def corrupting(send: Callable[..., None], switch: Path) -> Callable[..., None]:
    """Return a `SharedTransport.send` that changes a byte of each page while there is a switch."""

    def sent(transport: SharedTransport, number: int, frame: bytes, page: memoryview) -> None:
        if switch.exists():
            content = bytearray(page)
            content[number % len(content)] ^= 1
            page = memoryview(content)
        send(transport, number, frame, page)

    return sent


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--hooks", type=Path, required=True)
    parser.add_argument("--address", required=True)
    own, rest = parser.parse_known_args()
    number = Path(own.address).parent.name
    listen = own.hooks / f"engine-{number}.sock"
    listen.unlink(missing_ok=True)
    os.symlink(own.hooks / f"engine-front-{number}.sock", own.address.removeprefix("unix:"))
    engine_build.FakeExecutor = PagedExecutor
    server.build_fake, server.build_real = hooked(server.build_fake, own.hooks), hooked(server.build_real, own.hooks)
    if (ports := own.hooks / "kv_ports").exists():
        tls = tls_files(own.hooks / "kv_tls")
        server.start_mover = behind_proxy(server.start_mover, tls, *json.loads(ports.read_text())[int(number)])
    SharedTransport.send = corrupting(SharedTransport.send, own.hooks / "corrupt_kv")
    sys.argv[1:] = [*rest, "--address", f"unix:{listen}"]
    server.main()


if __name__ == "__main__":
    main()
