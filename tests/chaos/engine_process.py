"""The engine's own server with hooks for what no signal can do: `engine.server`'s arguments, and `--hooks FOLDER`.

It listens in that folder; where a gateway looks for it lies a link to the proxy. Every step takes a while, so that
faults find requests under way. A file `out_of_memory` there makes the next step fail as an allocation would.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine import server
from engine.config import EngineConfig
from engine.core.types import StepResult
from engine.executor.base import Executor

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


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--hooks", type=Path, required=True)
    parser.add_argument("--address", required=True)
    own, rest = parser.parse_known_args()
    (own.hooks / "engine.sock").unlink(missing_ok=True)
    os.symlink(own.hooks / "engine-front.sock", own.address.removeprefix("unix:"))
    server.build_fake, server.build_real = hooked(server.build_fake, own.hooks), hooked(server.build_real, own.hooks)
    sys.argv[1:] = [*rest, "--address", f"unix:{own.hooks / 'engine.sock'}"]
    server.main()


if __name__ == "__main__":
    main()
