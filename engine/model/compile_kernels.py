"""Compiles the CPU's kernels into their cache: `python -m engine.model.compile_kernels --device auto --dtype auto`.

`engine.model.prepare` runs it in parallel with the conversion of a model, which uses one core, so that the engine finds
the kernels compiled. It exits when its standard input is closed. It does nothing where kernels are not compiled ahead.
"""

from __future__ import annotations

import argparse
import os
import threading

from engine.model.device import pick_device, pick_dtype
from engine.model.packing import has_recipes, load_kernels
from lora_kernels.select import select_backend


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.model.compile_kernels", description=__doc__)
    parser.add_argument("--device", default="auto", help="as engine.device (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="as engine.dtype (default: %(default)s)")
    arguments = parser.parse_args()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    device = pick_device(arguments.device)
    if device.type == "cpu":
        dtype = pick_dtype(arguments.dtype, device)
        select_backend(device, dtype)
        if has_recipes(dtype, fp8=False):
            load_kernels(dtype)


if __name__ == "__main__":
    main()
