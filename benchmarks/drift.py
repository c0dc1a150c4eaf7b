"""Drift of 8-bit weights and activations beside that of compressed-tensors' W8A8: `make bench-drift`.

Scores the text of `loralane eval drift` with a model in fp32, and by several forms: the engine's bf16 and `int8`; a
checkpoint of W8A8, which the engine serves; and the same scheme computed by compressed-tensors and transformers, in a
process of the Python that `--compressed-tensors` names. Each form is compared with fp32 of its own library.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.runner import DATA_DIR, JSON, Run, benchmark, option
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


@benchmark(
    option("--compressed-tensors", Path, "a Python with it", metavar="PYTHON", required=True),
    option("--model", "embedded", "as for serve --model, in one file of weights"),
    DATA_DIR,
    JSON,
)
def bench(run: Run) -> None:
    options = run.options
    model = dense_folder(options.model, options.data_dir, run.console)
    found = measure(model, options.compressed_tensors, run.scratch)
    run.show(drift_table(found), found)


if __name__ == "__main__":
    bench.main()
