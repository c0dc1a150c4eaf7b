"""What the shipped kernels take of a GPU that need not be there: `python -m benchmarks.gpu.compiling 80 90 100`.

Compiles every kernel in every shipped configuration with the installed Triton, for GPUs of these compute capabilities,
and prints registers, stack and shared memory. The exit status is 1 if a kernel needs more shared memory than a program
may have, spills registers, multiplies LoRA tiles by another instruction than the others, or, for decodes, takes so much
that fewer programs run at once than are launched. Attention in fp32 may spill: threads add up its products, whose sums
lie on the stack. CI compiles some configurations of each kernel for sm_90 (tests/kernels/test_triton_compile.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kernels"))
from compile_worker import cases, compile_and_measure, complaints


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compiling", description=__doc__)
    parser.add_argument("capabilities", type=int, nargs="*", default=[80, 90, 100], help="90 for 9.0")
    bad = [f"sm_{capability}: {line}" for capability in parser.parse_args().capabilities for line in report(capability)]
    print("\n".join(bad) or "Every kernel fits, and none spills.")
    return bool(bad)


def report(capability: int) -> list[str]:
    """Print what each kernel takes on a GPU of this capability. Returns a line for each that is not as it should be."""
    found = {}
    print(f"sm_{capability}, Triton {triton.__version__}", flush=True)
    for case in cases(capability):
        used = found[case[0]] = compile_and_measure(case, capability)
        text = ", ".join(f"{used[key]} {key.lower()}" for key in ("REG", "STACK", "SHARED"))
        print(f"  {case[0]}: {text}", flush=True)
    return complaints(found, capability)


if __name__ == "__main__":
    sys.exit(main())
