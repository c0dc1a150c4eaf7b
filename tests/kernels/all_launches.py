"""Launches every kernel of the GPU backend, through the functions that the engine calls, on small CPU tensors."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from importlib import import_module
from unittest.mock import patch

import numpy as np
import torch
from dora_checks import ALL, SHAPE, dora_case
from expert_checks import FIRST, HIDDEN, arena_of_adapters, row_adapters
from kernel_cases import attention_case, lora_case
from triton.runtime import JITFunction

import lora_kernels.gpu
from lora_kernels.gpu import quantized_linear, triton_dora
from lora_kernels.gpu.coded_rows import code_rows
from lora_kernels.gpu.grouped_linear import DeviceExperts
from lora_kernels.gpu.quantized_linear import DeviceLinear
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_context import FP8
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_logprobs import logprobs
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_pointwise import TritonPointwise
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning
from lora_kernels.gpu.triton_sampling import SampledRows, SamplingTiles, sample
from lora_kernels.pointwise import QkNorms
from lora_kernels.quantized import Coding, quantize
from lora_kernels.sampling_words import SlotWords

BF16, VOCAB = torch.bfloat16, 9000
LORA = LoraTuning(tile_k=32, narrow_k=32, expand_block=32, long_from=16, long_rows=16, long_k=32, long_expand_block=32)
SAMPLING = SamplingTiles(512, 256)
DECODE = DecodeTuning(block_n=16, split_tokens=32, max_splits=4, programs=50)
PREFILL = PrefillTuning(block_m=16, block_n=16, split_tokens=32, max_splits=4)


def all_kernels() -> set[str]:
    """The names of all kernels that are launched from the host."""
    modules = (
        import_module(f"lora_kernels.gpu.{found.name}") for found in pkgutil.iter_modules(lora_kernels.gpu.__path__)
    )
    kernels = (value for module in modules for value in vars(module).values() if isinstance(value, JITFunction))
    return {kernel.__name__ for kernel in kernels if kernel.__name__.endswith("_kernel")}


def launch_all(*, fp8: bool, early: bool = True) -> None:
    """Launches all of them, in bf16 and with blocks that compile in little time; with `fp8`, adapters and KV are in
    e4m3, and with `early`, segments of experts' adapters may be long, and LoRA kernels begin before the kernel launched
    before them has ended, which devices may not know."""
    _launch_pointwise()
    _launch_lora(fp8=fp8, early=early)
    _launch_attention(fp8=fp8)
    _launch_sampling()
    _launch_quantized(fp8=fp8)
    _launch_experts(max_rows=200 if early else 1)


def _launch_pointwise() -> None:
    pointwise, x = TritonPointwise(), torch.zeros(3, 64, dtype=BF16)
    pointwise.add_norm(x, None, x[0], 1e-5)
    pointwise.swiglu(pointwise.add_norm(x, x.clone(), x[0], 1e-5))
    pointwise.geglu(x)


def _launch_lora(*, fp8: bool, early: bool) -> None:
    backend = TritonBackend(replace(LORA, early=int(early)))
    case = lora_case([16, 40], [0] * 17 + [1, 0, -1], dtype=BF16, fp8=fp8)
    prepared = backend.prepare_lora(case.arena, case.table, case.plan)
    group = case.shape.groups[0]
    backend.add_lora(*case.inputs(group), prepared, 1, group)
    scaled = dora_case([ALL], BF16)
    scaled.run(triton_dora.prepare, torch.zeros(2, 48, dtype=BF16), [0, 0], 1, SHAPE.groups[1])


def _launch_attention(*, fp8: bool) -> None:
    backend = TritonBackend(attention=PagedAttention(DECODE, PREFILL))
    case = attention_case([(1, 200), (1, 3), (20, 27), (3, 150)], dtype=BF16)
    kv = case.kv.to(FP8) if fp8 else case.kv
    query, kv_heads = case.query, kv.shape[3]
    angles, norms = torch.zeros(len(query), query.shape[-1]), QkNorms(query[0, 0], query[0, 0], 1e-5)
    backend.write_kv(kv, case.key, case.value, case.batch)
    qkv = torch.zeros(len(query), (query.shape[1] + 2 * kv_heads) * query.shape[2], dtype=BF16)
    backend.rotate_and_write(qkv, kv, case.batch, angles, angles, norms)
    backend.attention(query, kv, case.batch, case.scores, window=60)


def _launch_sampling() -> None:
    logits, slots = torch.zeros(2, VOCAB, dtype=BF16), torch.zeros(2, dtype=torch.int32)
    rows = SampledRows(slots, slots, torch.zeros(2, -(-VOCAB // 32), dtype=torch.int32))
    words, last = torch.zeros(4, len(SlotWords._fields), dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    host = torch.zeros(2, dtype=torch.int64)
    for any_filters in (False, True):
        ids = sample(logits, rows, words, last, host, any_filters, SAMPLING)
    logprobs(logits, slots, torch.zeros_like(ids), 5)


def _launch_quantized(*, fp8: bool) -> None:
    linear = DeviceLinear([quantize(torch.ones(200, 256), Coding(4, 64, 8))], None, BF16)
    with patch.object(quantized_linear, "LARGEST_TILED", 8):
        for rows in (3, 9):
            linear(torch.zeros(rows, 256, dtype=BF16))
    by_rows = replace(quantize(torch.ones(32, 64), Coding(8, 64, 128)), coding=Coding(8, 64, 128, by_rows=True))
    DeviceLinear([by_rows], None, BF16)(torch.zeros(3, 64, dtype=BF16))
    if fp8:
        code_rows(torch.zeros(3, 64, dtype=BF16), FP8)


def _launch_experts(*, max_rows: int) -> None:
    experts, linears = TritonBackend().experts, DeviceExperts(torch.zeros(4, 48, 64, dtype=BF16), 4)
    routing = experts.route(torch.zeros(5, 4, dtype=BF16), 2, normalised=True, order=torch.arange(5))
    routing.starts.copy_(torch.tensor([0, 5, 10, 10, 10]))
    arena, table = arena_of_adapters([(5, 5)], BF16)
    adapters = row_adapters(np.zeros(5, dtype=np.int32), 5)._replace(max_rows=max_rows)
    experts.prepare_lora(arena, table, adapters, routing, 0, FIRST, HIDDEN)
    experts.combine(linears(torch.zeros(10, 64, dtype=BF16), routing.starts), routing)
