"""Section C: paged attention by vLLM's Triton kernel, from its wheel, compared with ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.exact import exact_attention, relative_error
from benchmarks.gpu.journal import Journal, Value
from benchmarks.gpu.kernels_attention import DECODES, PREFILLS, TINY_DECODES, Chunks, make_load, our_calls
from benchmarks.gpu.ours import our_backend
from benchmarks.gpu.peer_modules import VLLM, PeerAbsent, load_kernel_module
from benchmarks.gpu.shapes import AttentionLoad
from benchmarks.gpu.timing import Call, time_calls

LEAST_S = 4.0
SEGMENTS = 16
"""Number of segments into which vLLM's decode kernel splits a context if its grid would be small."""
LEAST_GRID = 128
"""Number of programs below which vLLM's decode kernel splits each context into `SEGMENTS` segments."""
CHOSEN = ("64 x 2,048", "64 of 128 to 8,192", "1 x 32,768", "16 x 1,024", "prompt of 2,048", "chunk of 512 at 16,384")

Attend = Callable[[Tensor], Tensor]
"""Computes attention for a load's queries over one layer's KV, [num_pages, 2, BLOCK_SIZE, kv_heads, head_dim], and
returns the output, [num_rows, heads, head_dim]."""


def vllm_attention(load: AttentionLoad) -> Attend:
    """Return vLLM's kernel, set up for a batch. Raises PeerAbsent if vLLM's wheel does not have it."""
    attend = load_kernel_module("vllm.v1.attention.ops.triton_unified_attention", VLLM).unified_attention
    batch, (_, heads, head_dim), kv_heads = load.batch, load.query.shape, load.kv[0].shape[3]
    most = LEAST_GRID // kv_heads

    def scratch(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=load.query.device)

    fixed: dict[str, Any] = {
        "q": load.query,
        "cu_seqlens_q": batch.query_starts,
        "max_seqlen_q": batch.max_query,
        "seqused_k": batch.context_lens,
        "max_seqlen_k": batch.max_context,
        "softmax_scale": load.scores.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": batch.block_tables,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "seq_threshold_3D": most,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": scratch(most, heads, SEGMENTS, head_dim),
        "softmax_segm_max": scratch(most, heads, SEGMENTS),
        "softmax_segm_expsum": scratch(most, heads, SEGMENTS),
    }
    out = torch.empty_like(load.query)

    def run_one(kv: Tensor) -> Tensor:
        attend(k=kv[:, 0], v=kv[:, 1], out=out, **fixed)
        return out

    return run_one


PEERS: dict[str, Callable[[AttentionLoad], Attend]] = {"vLLM": vllm_attention}


def run(journal: Journal) -> None:
    device = torch.device(journal.device)
    works: dict[str, Chunks] = TINY_DECODES if journal.tiny else {name: (DECODES | PREFILLS)[name] for name in CHOSEN}
    for peer, make in PEERS.items():
        for name, chunks in works.items():
            with journal.case(f"{peer}: {name}", LEAST_S):
                try:
                    row = compare(make, make_load(chunks, device))
                except PeerAbsent as absent:
                    journal.note(f"left out, attention: {absent}")
                    break
                journal.row("attention beside peers", f"{name}, {peer}", **row)


def compare(make: Callable[[AttentionLoad], Attend], load: AttentionLoad) -> dict[str, Value]:
    """Time the peer's kernel and ours over the same KV. Returns both times in microseconds a layer, their ratio (above
    1 if ours is faster), and how they were timed. Raises AssertionError if the peer's result is not that of fp32."""
    attend, device = make(load), load.query.device
    relative_error(attend(load.kv[0]), exact_attention(load, None), load.query.dtype)
    calls: list[Call] = [partial(attend, kv) for kv in load.kv]
    theirs, ours = time_calls(calls, device), time_calls(our_calls(load, our_backend(device)), device)
    return {
        "theirs us": theirs.us,
        "ours us": ours.us,
        "times faster": theirs.us / ours.us,
        "timed by": theirs.how if theirs.how == ours.how else f"{theirs.how}, {ours.how}",
    }
