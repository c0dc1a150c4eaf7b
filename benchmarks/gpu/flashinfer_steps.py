"""Section C: attention of a step by FlashInfer, planned as an engine plans it, beside ours, and the host's time for a
plan, which each captured step pays at its upload."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from benchmarks.gpu.journal import Journal
from benchmarks.gpu.kernels_attention import DECODES, PREFILLS, TINY_DECODES, TINY_PREFILLS, Chunks, make_load
from benchmarks.gpu.shapes import AttentionLoad
from benchmarks.gpu.timing import time_calls, time_host
from benchmarks.gpu.tunables import LIBRARY_WORKS, library_runs, planned_batch
from lora_kernels.attention_choice import installed_flashinfer
from lora_kernels.gpu.flashinfer_attention import FlashInferAttention

LEAST_S = 4.0


def run(journal: Journal) -> None:
    if installed_flashinfer() is None:
        journal.note("left out: flashinfer is not installed")
        return
    names = [work for works, _ in LIBRARY_WORKS.values() for work in works]
    works: dict[str, Chunks] = {name: (DECODES | PREFILLS)[name] for name in names}
    for name, chunks in (TINY_DECODES | TINY_PREFILLS if journal.tiny else works).items():
        with journal.case(f"FlashInfer as a backend: {name}", LEAST_S):
            journal.row("FlashInfer as a backend", name, **compare(make_load(chunks, torch.device(journal.device))))


def compare(load: AttentionLoad) -> dict[str, float | str]:
    """Return the microseconds of a layer by either library, and of the host for the plan of a step."""
    device = load.query.device
    ours, theirs = (time_calls(library_runs([load], None, {"flashinfer": flag}), device) for flag in (0, 1))
    attend = FlashInferAttention()
    batch = planned_batch(attend, load)
    attend(load.query, load.kv[0], batch, load.scores)
    row: dict[str, float | str] = {"theirs us": theirs.us, "ours us": ours.us, "times faster": theirs.us / ours.us}
    if batch.plans is not None:
        numbers = np.array(batch.host_query_starts), np.array(batch.host_context_lens)
        row["plan us"] = time_host(partial(batch.plans.renew, *numbers, batch.block_tables.cpu().numpy()), device)
    return row | {"timed by": theirs.how if theirs.how == ours.how else f"{theirs.how}, {ours.how}"}
