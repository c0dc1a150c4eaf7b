"""Another process that the fuzzer may attack: a whole gateway whose real engine serves a model full of oddities."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import structlog

from gateway.serve.process import run_loop
from tests.fuzz.demo_target import serve
from tests.fuzz.odd_model import save_odd_model


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        save_odd_model(Path(folder) / "odd")
        run_loop(serve(Path(folder) / "data", str(Path(folder) / "odd"), adapters=False))


if __name__ == "__main__":
    main()
