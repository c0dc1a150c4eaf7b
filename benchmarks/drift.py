"""Drift of 8-bit weights and activations beside that of compressed-tensors' W8A8: `make bench-drift`.

Scores the text of `loralane eval drift` with a model in fp32, and by several forms: the engine's bf16 and `int8`; a
checkpoint of W8A8, which the engine serves; and the same scheme computed by compressed-tensors and transformers, in a
process of the Python that `--compressed-tensors` names. Each form is compared with fp32 of its own library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec import to_builtins
from rich.console import Console

from engine.process.files import default_data_dir
from gateway.terminal.output import print_wide
from lab.demo.dense import dense_folder
from lab.evaluation.drift import EXACT, Drift, bundled_text, compare, drift_table, score, split

OURS = {"bf16": "auto", "int8": "int8"}


def measure(model: Path, python: Path, scratch: Path) -> list[Drift]:
    pieces = split(bundled_text())
    peer = _peer(python, {"model": str(model), "pieces": pieces, "out": str(scratch)})
    ours = {name: score(str(model), form, {}, pieces)[""] for name, form in {EXACT: EXACT, **OURS}.items()}
    ours["W8A8 checkpoint"] = score(str(scratch), "auto", {}, pieces)[""]
    found = [compare(name, "loralane", own, ours[EXACT]) for name, own in ours.items()]
    return found + [compare(name, "compressed-tensors", own, peer[EXACT]) for name, own in peer.items()]


def _peer(python: Path, job: dict[str, Any]) -> dict[str, list[float]]:
    worker = Path(__file__).with_name("compressed_worker.py")
    done = subprocess.run([python, worker], input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit("the worker has failed: does the Python have compressed-tensors and transformers?")
    scores: dict[str, list[float]] = json.loads(done.stdout)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compressed-tensors", type=Path, metavar="PYTHON", required=True, help="a Python with it")
    parser.add_argument("--model", default="embedded", help="as for serve --model, in one file of weights")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ), help="of prepared models")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with TemporaryDirectory(prefix="loralane-drift-") as scratch:
        found = measure(dense_folder(args.model, args.data_dir, Console()), args.compressed_tensors, Path(scratch))
    print_wide(drift_table(found))
    if args.json:
        args.json.write_text(json.dumps(to_builtins(found), indent=1))


if __name__ == "__main__":
    main()
