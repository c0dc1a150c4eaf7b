"""What `compile_worker` compiles of the rest of a step: pointwise kernels and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

from lora_kernels.gpu.triton_logprobs import CHUNK, logprob_kernel, rank_kernel
from lora_kernels.gpu.triton_pointwise import (
    GLU_BLOCK,
    HEAD_TILE,
    bound_constants,
    glu_kernel,
    heads_kernel,
    norm_kernel,
    norm_tuning,
)
from lora_kernels.gpu.triton_sampling import SamplingTiles, choose_kernel, score_kernel
from lora_kernels.pointwise import BoundedSwiglu

POINTERS = {
    **dict.fromkeys(("delta_ptr", "weight_ptr", "gate_up_ptr", "query_norm_ptr", "key_norm_ptr", "logits_ptr"), "bf16"),
    **dict.fromkeys(("cos_ptr", "sin_ptr", "shift_ptr", "peaks_ptr", "scores_ptr", "sums_ptr", "tops_ptr"), "fp32"),
    **dict.fromkeys(("words_ptr", "last_ptr", "host_ptr", "ids_ptr", "masses_ptr", "bins_ptr"), "i64"),
}


def cases(capability: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    for width in (576, 4096, 8192, 16384):
        tuning = dict(norm_tuning(width))
        warps = {"num_warps": tuning.pop("num_warps")}
        yield f"norm {width}", norm_kernel, {**tuning, "WIDTH": width, "HAS_DELTA": True, "EPS": 1e-5}, warps
    for name, bounds in (("geglu", None), ("swiglu", None), ("bounded swiglu", BoundedSwiglu(7.0, 1.702))):
        constants = {"GELU": name == "geglu", **bound_constants(bounds), "WIDTH": 14336, "BLOCK": GLU_BLOCK}
        yield name, glu_kernel, constants, {"num_warps": 4}
    for head_dim, norms, fp8 in ((64, False, False), (128, True, False), (128, True, True), (256, True, False)):
        shape = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": head_dim, "ROTARY": head_dim, "HALF": head_dim // 2}
        constants = {
            **shape,
            "BLOCK_SIZE": 16,
            "HAS_NORMS": norms,
            "FP8": fp8,
            "HAS_CODING": fp8,
            "EPS": 1e-5,
            "TILE": HEAD_TILE,
        }
        if capability >= 89 or not fp8:
            yield f"heads {head_dim}{' fp8' if fp8 else ''}", heads_kernel, constants, {"num_warps": 2}
    yield from sampling_cases(128256)


def sampling_cases(vocab: int) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int]]]:
    tiles = SamplingTiles()
    chunks = triton.next_power_of_2(triton.cdiv(vocab, tiles.chunk))
    yield "score", score_kernel, {"CHUNK": tiles.chunk}, {"num_warps": 8}
    for filters in (False, True):
        constants = {"CHUNK": tiles.chunk, "TILE": tiles.tile, "CHUNKS": chunks, "HAS_FILTERS": filters}
        yield f"choose {'filtered' if filters else 'drawn'}", choose_kernel, constants, {"num_warps": 8}
    yield "rank", rank_kernel, {"CHUNK": CHUNK}, {"num_warps": 8}
    yield "logprob", logprob_kernel, {"CHUNKS": chunks, "WIDTH": 32}, {"num_warps": 4}
