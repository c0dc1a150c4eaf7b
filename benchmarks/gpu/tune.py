"""Finds the fastest configuration of each kernel on this GPU, and stores it for engines on this machine.

    python -m benchmarks.gpu.tune                                  all kernels, a few minutes
    python -m benchmarks.gpu.tune --kernels "decode attention"     one of them
    python -m benchmarks.gpu.tune --data-dir DIR                   for engines with this data directory

Candidates are timed inside CUDA graphs, and a winner's result is compared with the default's before it is written.
Results for devices that the package ships settings for are copied from the data directory to lora_kernels/tuned and
committed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.lean import do_without
from engine.process.files import default_data_dir

ENGINE_FOLDER = "engine"
"""Folder in the data directory where an engine started by a gateway stores what it learns about the machine."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    do_without()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here: there is nothing to tune for", file=sys.stderr)
        return 2
    return _tune(options.kernels, options.data_dir / ENGINE_FOLDER, torch.device("cuda"))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", type=lambda text: text.split(","), metavar="A,B", help="by name; all without it")
    parser.add_argument("--data-dir", type=Path, default=default_data_dir(os.environ))
    return parser.parse_args(arguments)


def _tune(kernels: Sequence[str] | None, engine_dir: Path, device: torch.device) -> int:
    # Imported here because numba must be hidden before any kernel is imported.
    from benchmarks.gpu.timing import time_calls
    from benchmarks.gpu.tunables import VARIANTS, all_subjects
    from benchmarks.gpu.tuner import tune
    from lora_kernels.gpu.triton_tuned import DEFAULTS, device_key
    from lora_kernels.tuning import save_choices

    if unknown := [kernel for kernel in kernels or () if kernel not in VARIANTS]:
        print(f"no kernel {unknown[0]!r}; there are {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    for subject in all_subjects(kernels or list(VARIANTS), device):
        choice = tune(subject, lambda runs: time_calls(runs, device).us, lambda text: print(text, flush=True))
        path = save_choices(device_key(device), {subject.kernel: {subject.shape: choice}}, engine_dir, DEFAULTS)
        print(f"written to {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
