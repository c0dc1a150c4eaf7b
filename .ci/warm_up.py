#!/usr/bin/env python3
"""Prepare what most test processes need, once, while pip uses the other core: `python .ci/warm_up.py`.

Compiles torch, transformers and other modules to bytecode, converts the model that tests use into the folder of test
data (see `data_dir` in tests/conftest.py), and compiles the CPU's kernels. Otherwise all test processes would begin at
once by doing this, each for itself.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from loralane import LLM, SamplingParams
from rich.console import Console

from engine.demo import DEMO_ADAPTERS
from engine.model.adapters.packing import load_kernels
from lab.demo.dense import dense_folder


def main() -> None:
    data_dir = Path(os.environ.get("LORALANE_TEST_DATA", Path.home() / ".cache" / "loralane-test"))
    folder = dense_folder("embedded", data_dir, Console(stderr=True))
    options = {"num_pages": 200, "swap_gb": 0.0, "threads": 1}
    adapters = {"pirate": DEMO_ADAPTERS["pirate"]}
    with LLM(folder, adapters=adapters, dtype="float32", device="cpu", engine=options) as llm:
        llm.generate("The sea", SamplingParams(max_tokens=2), adapter="pirate")
    load_kernels(torch.float32)  # the engine compiles them in a thread, which would end with this process before it has


if __name__ == "__main__":
    main()
