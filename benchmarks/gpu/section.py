"""Runs sections of the suite in one process: `python -m benchmarks.gpu.section B --out FOLDER --budget-s 60`."""

from __future__ import annotations

import argparse
import datetime
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu.journal import DeviceLost, Journal, OutOfTime, Value
from benchmarks.gpu.lean import do_without
from benchmarks.gpu.report import share

PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "A": (
        ("correct_kernels",),
        ("correct_sampler",),
        ("correct_quantized",),
        ("correct_engine",),
        *((f"kernel_tests {part}/4",) for part in range(4)),
    ),
    "B": (("kernels_lora", "kernels_attention", "kernels_rest", "kernels_quantized", "kernels_experts"),),
    "C": (("peers_lora", "peers_attention"),),
    "D": (("decoding",),),
    "E": (("device_lanes",),),
    "F": (("host_gaps",),),
    "G": (("prompt_steps",),),
}
"""Section -> the modules of each of its processes, with the arguments of their `run`. Section A times nothing, so that
its processes run side by side: most of its time is compilation, which uses one core a process. Its modules are in
TESTS, and the others' here."""
TESTS = Path(__file__).parents[2] / "tests" / "kernels"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.section", description=__doc__)
    parser.add_argument("sections", choices=PARTS, nargs="+")
    parser.add_argument("--part", type=int, help="index of one of a section's processes (all, one after the other)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the journals, B.jsonl for section B")
    parser.add_argument("--budget-s", type=float, required=True, help="of all these sections together")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_s
    do_without()
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print("torch sees no CUDA device here; --tiny proves the suite on the CPU", file=sys.stderr)
        return 2
    if options.tiny:
        from lab.without_gpu.interpreter_speed import spare_repeated_work

        spare_repeated_work()
    for place, name in enumerate(options.sections):
        until = time.monotonic() + share(options.sections[place:]) * (deadline - time.monotonic())
        journal = Journal(options.out / f"{name}.jsonl", until, options.tiny, "cpu" if options.tiny else "cuda")
        journal.environment(describe(options.tiny))
        parts = PARTS[name] if options.part is None else PARTS[name][options.part : options.part + 1]
        if code := _run(journal, [module for part in parts for module in part]):
            return code
    return 0


def _run(journal: Journal, modules: Sequence[str]) -> int:
    sys.path.insert(0, str(TESTS))
    for entry in modules:
        name, *words = entry.split()
        package = "" if (TESTS / f"{name}.py").exists() else "benchmarks.gpu."
        try:
            with journal.case(entry):
                import_module(f"{package}{name}").run(journal, *words)
        except OutOfTime as late:
            journal.note(f"out of time before: {late}")
            return 0
        except DeviceLost as lost:
            journal.note(f"the device was lost: {lost}")
            return 1
    journal.finish()
    return 0


def describe(tiny: bool) -> dict[str, Value]:
    """Return the day, the versions of the software that computes, and the GPU's properties; `tiny` means that there is
    no GPU."""
    import torch

    versions: dict[str, Value] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in ("triton", "transformers", "numpy", "safetensors")},
    }
    if tiny:
        return {"device": "cpu", "driver": None, **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "driver": _driver(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
        "cuda": torch.version.cuda,
        **versions,
    }


def _driver() -> str | None:
    """Return the GPU driver's version from nvidia-smi. None means that nvidia-smi is absent or reports none."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
