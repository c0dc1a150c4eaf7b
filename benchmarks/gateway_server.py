"""Runs `loralane serve` with an engine that computes nothing (`benchmarks.instant_engine`), for other benchmarks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from gateway.config.whole import load_config
from gateway.serve.launch import Launch
from gateway.serve.process import configure_logging, run_loop
from gateway.serve.single import serve
from gateway.terminal.console import Console


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_server", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="prepared model folder, for its tokenizer")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--engine-cores", default="", help="such as 2,3; empty: the gateway's own")
    arguments = parser.parse_args()
    engine = ["benchmarks.instant_engine"]
    engine += ["--cores", arguments.engine_cores] if arguments.engine_cores else []
    configure_logging()
    launch = Launch(load_config(arguments.config, os.environ), arguments.model, arguments.data_dir, tuple(engine))
    run_loop(serve(launch, Console(stderr=True)))


if __name__ == "__main__":
    main()
