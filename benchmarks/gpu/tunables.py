"""The parameters that the tuner may vary for each kernel, and the work at the 8B shape that it times them on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernels_attention import (
    DECODES,
    PREFILLS,
    TINY_DECODES,
    TINY_PREFILLS,
    Chunks,
    kv_dtypes,
    make_load,
)
from benchmarks.gpu.kernels_lora import MIXED, LoraWork, cold_bank, decode_work
from benchmarks.gpu.shapes import AdapterBank, AttentionLoad, model_spec, row_adapter_slots
from benchmarks.gpu.tuner import Run, Subject
from lora_kernels.backend import Backend
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning
from lora_kernels.gpu.triton_tuned import (
    DECODE,
    DEFAULTS,
    LORA_LONG,
    LORA_SHORT,
    PREFILL,
    attention_shape,
    lora_shape,
)
from lora_kernels.layout import ProjectionGroup
from lora_kernels.segments import plan_segments
from lora_kernels.tuning import Config

Variants = Mapping[str, Sequence[int]]

VARIANTS: Mapping[str, Variants] = {
    LORA_SHORT: {
        "narrow_k": (64, 128, 256),
        "tile_k": (32, 64, 128),
        "shrink_warps": (1, 2, 4),
        "shrink_stages": (2, 3, 4, 5),
        "expand_block": (64, 128, 256),
        "expand_warps": (1, 2),
        "expand_ranks": (16, 32),
        "tile_rows": (16, 32),
    },
    LORA_LONG: {
        "long_rows": (32, 64, 128),
        "long_k": (32, 64, 128),
        "long_shrink_warps": (4, 8),
        "long_shrink_stages": (2, 3, 4),
        "long_expand_rows": (16, 32, 64),
        "long_expand_block": (64, 128),
        "long_expand_warps": (1, 2),
    },
    DECODE: {
        "block_n": (32, 64, 128),
        "num_stages": (2, 3, 4, 5),
        "split_tokens": (128, 256, 512, 1024),
        "max_splits": (16, 32, 64),
        "num_warps": (2, 4, 8),
        "programs": (132, 264, 396, 528),
    },
    PREFILL: {
        "block_m": (64, 128),
        "block_n": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
        "split_tokens": (1024, 2048, 4096),
    },
}
"""Values to try, by kernel and parameter, the most important parameter first. Parameters that split LoRA's sums are not
varied, because they determine the bits of the result."""
LORA_WORKS: Mapping[str, tuple[LoraWork, LoraWork]] = {
    LORA_SHORT: (decode_work(64, 64, MIXED), LoraWork("tiny", (2, 1), (5, 3))),
    LORA_LONG: (decode_work(4096, 4, MIXED), LoraWork("tiny", (20, 4), (5, 3))),
}
"""LoRA kernel -> the rows that it is tuned on, in full size and in toy size."""
ATTENTION_WORKS: Mapping[str, tuple[Chunks, Chunks]] = {
    DECODE: (DECODES["64 of 128 to 8,192"], TINY_DECODES["2 of 20"]),
    PREFILL: (PREFILLS["4 chunks of 512 at 4,096"], TINY_PREFILLS["chunk of 4 at 12"]),
}


def make_subjects(kernel: str, device: torch.device) -> Iterator[Subject]:
    """Yield what is tuned under a kernel's name, with inputs allocated on `device`; in toy size if that is a CPU."""
    if kernel in LORA_WORKS:
        yield lora_subject(kernel, device)
    else:
        for fp8_kv in kv_dtypes(device).values():
            yield attention_subject(kernel, device, fp8_kv)


def lora_subject(kernel: str, device: torch.device) -> Subject:
    tiny = device.type == "cpu"
    work = LORA_WORKS[kernel][tiny]
    bank = cold_bank(work, model_spec(tiny), device)
    shape, runs = lora_shape(bank.arena.dtype), partial(lora_runs, bank, work)
    return Subject(kernel, shape, DEFAULTS[kernel], VARIANTS[kernel], runs)


def lora_runs(bank: AdapterBank, work: LoraWork, config: Config) -> list[Run]:
    """Return the launches to time with a configuration: one for each group and layer, over the first `len(work.ranks)`
    adapters of the bank, whose layers together exceed any cache."""
    backend: Backend = TritonBackend(replace(LoraTuning(), **config))
    prepared = backend.prepare_lora(bank.arena, bank.table, plan_segments(row_adapter_slots(work.lengths)))
    generator = torch.Generator(bank.arena.device).manual_seed(0)
    like: dict[str, Any] = {"dtype": bank.arena.dtype, "device": bank.arena.device}
    runs: list[Run] = []
    for group in bank.groups:
        x = torch.empty(work.rows, group.in_features, **like).normal_(generator=generator)
        out = torch.zeros(work.rows, sum(group.out_features), **like)
        runs += [partial(add, backend, out, x, prepared, layer, group) for layer in range(bank.spec.layers)]
    return runs


def add(backend: Backend, out: Tensor, x: Tensor, prepared: Any, layer: int, group: ProjectionGroup) -> Tensor:
    backend.add_lora(out, x, prepared, layer, group)
    return out


def attention_subject(kernel: str, device: torch.device, fp8_kv: bool) -> Subject:
    """Return the tuning of an attention kernel over K and V that are stored in FP8, or in the model's dtype."""
    tiny = device.type == "cpu"
    load = make_load(ATTENTION_WORKS[kernel][tiny], device, fp8_kv)
    own, kv = PagedAttention(), load.kv[0]
    default = own.decode_tuning(kv) if kernel == DECODE else own.prefill_tuning(kv)
    shape = attention_shape(model_spec(tiny).head_dim, kv.dtype)
    runs = partial(attention_runs, load, decoding if kernel == DECODE else prefilling)
    return Subject(kernel, shape, asdict(default), VARIANTS[kernel], runs)


def decoding(config: Config) -> PagedAttention:
    return PagedAttention(decode=DecodeTuning(**config))


def prefilling(config: Config) -> PagedAttention:
    return PagedAttention(prefill=PrefillTuning(**config))


def attention_runs(load: AttentionLoad, make: Callable[[Config], PagedAttention], config: Config) -> list[Run]:
    """Return the launches to time for a configuration: one of `make(config)` for each layer of the load."""
    attend, scales = make(config), None if load.kv_coding is None else load.kv_coding.scales
    return [partial(attend, load.query, kv, load.batch, load.scores, kv_scales=scales) for kv in load.kv]


def all_subjects(kernels: Sequence[str], device: torch.device) -> Iterator[Subject]:
    """Yield each kernel's subjects when they are asked for, so that only one's inputs are in memory at a time."""
    for kernel in kernels:
        yield from make_subjects(kernel, device)
