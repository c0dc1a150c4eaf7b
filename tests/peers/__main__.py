"""`make test-peers`: runs the public tests of another server against a demo, from a folder of that server's sources.

    python -m tests.peers --suite vllm|sglang|llama.cpp --path FOLDER [--url URL --tokenizer FOLDER] [--seconds 900]
        [PYTEST OPTIONS]

Nothing of these suites is part of loralane. Prints how many tests ran and passed, and the class of each failure
(`classes.py`). A suite's options, keys and models differ from the demo's, so that failures are expected; the exit
status is 1 if one is of no known class. Without --url, a demo is started. Tests that ask no server are left out. The
suites import libraries (`requests`, `regex`, `pytest-asyncio`): what is missing is a class of its own.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.server import Command, free_port, running
from tests.peers.classes import UNKNOWN
from tests.peers.running import report, run
from tests.peers.suites import SUITES


@contextmanager
def demo() -> Iterator[tuple[str, str]]:
    """Run a demo until the block ends; yields its URL and the folder of its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        words = [sys.executable, "-m", "gateway", "serve", "--data-dir", folder]
        words += ["--http-port", str(port), "--grpc-port", str(free_port())]
        with running(Command(words, f"http://127.0.0.1:{port}", "/ready"), Path(folder) / "demo.log") as url:
            yield url, next((str(file.parent) for file in Path(folder).glob("models/*/tokenizer.json")), "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--path", type=Path, required=True, help="folder of the other server's sources")
    parser.add_argument("--url", help="a running demo; default: one is started")
    parser.add_argument("--tokenizer", default="", help="folder of the tokenizer of the demo at --url")
    parser.add_argument("--seconds", type=float, help="time after which the rest of the tests is left out")
    args, options = parser.parse_known_args()
    with nullcontext((args.url.rstrip("/"), args.tokenizer)) if args.url else demo() as (url, tokenizer):
        results = run(SUITES[args.suite], args.path.resolve(), url, tokenizer, options, seconds=args.seconds)
    print(report(results))
    return int(any(result.class_of_failure is UNKNOWN for result in results))


if __name__ == "__main__":
    sys.exit(main())
