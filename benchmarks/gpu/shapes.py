"""The model shapes that the suite uses, and random adapters and attention batches of these shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.layers.lora import TARGETS, ProjectionGroups, projection_groups, target_widths
from engine.model.memory.arena import page_shape
from engine.model.spec.config import ModelSpec, parse_spec
from lora_kernels.backend import AttentionBatch, KvCoding, Scores
from lora_kernels.layout import RANK_TILE, AdapterLayout, LoraTable, ProjectionGroup, plan_layout

BLOCK_SIZE = 16
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
"""Llama 3 8B's config.json without end-of-sequence tokens, which a model of random weights would generate."""
TOY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def model_config(tiny: bool) -> dict[str, Any]:
    return TOY if tiny else LLAMA_8B


def model_spec(tiny: bool) -> ModelSpec:
    return parse_spec(model_config(tiny), {})


def model_dtype(tiny: bool) -> torch.dtype:
    """Return bf16; in toy size fp32, because Triton's interpreter truncates bf16 where a GPU rounds."""
    return torch.float32 if tiny else torch.bfloat16


def groups_of(spec: ModelSpec) -> tuple[ProjectionGroup, ...]:
    groups: ProjectionGroups = projection_groups(spec)
    return groups.qkv, groups.o, groups.gate_up, groups.down


def adapter_elements(spec: ModelSpec, rank: int) -> int:
    """Return the number of elements in A and B of an adapter of this rank, in all projections of one layer."""
    return rank * int(target_widths(spec).sum())


def full_layout(spec: ModelSpec, rank: int) -> AdapterLayout:
    """Return the layout of an adapter with the same rank on all seven projections of all layers."""
    ranks = np.full((spec.layers, len(TARGETS)), rank, dtype=np.int32)
    return plan_layout(ranks, target_widths(spec), page_elements(spec))


def page_elements(spec: ModelSpec) -> int:
    """Return the elements of one of the engine's pages, but at least those of a LoRA tile of the widest projection."""
    return max(page_shape(spec, BLOCK_SIZE).elements, RANK_TILE * int(target_widths(spec).max()))


@dataclass(frozen=True)
class AdapterBank:
    """Random adapters on a device, in adapter slots 0, 1, ... of `table`.

    Attributes:
        ranks: Rank of each adapter.
        arena: Flat tensor of all pages. Page 0 is zero.
    """

    spec: ModelSpec
    ranks: tuple[int, ...]
    arena: Tensor
    table: LoraTable

    @cached_property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        return groups_of(self.spec)


def make_bank(spec: ModelSpec, ranks: Sequence[int], dtype: torch.dtype, device: torch.device) -> AdapterBank:
    """Create one random adapter for each rank, with this rank on all projections, in consecutive pages on `device`."""
    page_elems = page_elements(spec)
    layouts = {rank: full_layout(spec, rank) for rank in set(ranks)}
    table = LoraTable(len(ranks), spec.layers, len(TARGETS), page_elems, device)
    next_page = 1
    for adapter_slot, rank in enumerate(ranks):
        pages = tuple(range(next_page, next_page + layouts[rank].num_pages))
        table.set(adapter_slot, layouts[rank], pages)
        next_page += len(pages)
    arena = torch.empty(next_page * page_elems, dtype=dtype, device=device).normal_(0, 0.02)
    arena[:page_elems] = 0
    return AdapterBank(spec, tuple(ranks), arena, table)


def lora_bytes(bank: AdapterBank, adapter_slots: Sequence[int], rows: int) -> int:
    """Return the bytes that one layer must move for `rows` rows: A and B of the adapters in `adapter_slots` once, the
    inputs once, and the outputs read and written."""
    weights = sum(adapter_elements(bank.spec, bank.ranks[adapter_slot]) for adapter_slot in adapter_slots)
    io = sum(rows * (group.in_features + 2 * sum(group.out_features)) for group in bank.groups)
    return (weights + io) * bank.arena.itemsize


def spread(ranks: Sequence[int], count: int) -> tuple[int, ...]:
    """Return `count` ranks, taken from `ranks` in turn."""
    return tuple(ranks[index % len(ranks)] for index in range(count))


def row_adapter_slots(lengths: Sequence[int], first: int = 0) -> npt.NDArray[np.int32]:
    """Return the adapter slot of each row, int32 [num_rows]: `lengths[i]` rows use slot `first + i`."""
    return np.repeat(np.arange(first, first + len(lengths), dtype=np.int32), lengths)


@dataclass(frozen=True)
class AttentionLoad:
    """Queries of sequences of different lengths, and the paged KV of some layers.

    Attributes:
        query: [num_rows, heads, head_dim].
        kv: [num_pages, 2, BLOCK_SIZE, kv_heads, head_dim] for each layer.
        chunks: (query rows, context length) of each sequence.
        kv_coding: how K and V are stored in FP8. None means that they are stored as they are, in the query's dtype.
    """

    query: Tensor
    kv: tuple[Tensor, ...]
    batch: AttentionBatch
    chunks: tuple[tuple[int, int], ...]
    scores: Scores
    kv_coding: KvCoding | None = None

    @property
    def kv_bytes(self) -> int:
        """Number of bytes of K and V of all context tokens in one layer."""
        _, _, _, kv_heads, head_dim = self.kv[0].shape
        return sum(context for _, context in self.chunks) * 2 * kv_heads * head_dim * self.kv[0].itemsize

    @property
    def io_bytes(self) -> int:
        """Number of bytes that attention in one layer must move: `kv_bytes` plus query and output."""
        return self.kv_bytes + 2 * self.query.nbytes

    @property
    def flops(self) -> int:
        """Floating point operations of both products in a layer, for the query-key pairs that the mask allows."""
        seen = sum(rows * context - rows * (rows - 1) // 2 for rows, context in self.chunks)
        return 4 * seen * self.query.shape[1] * self.query.shape[2]


def attention_load(
    spec: ModelSpec,
    chunks: Sequence[tuple[int, int]],
    layers: int,
    dtype: torch.dtype,
    device: torch.device,
    fp8_kv: bool = False,
) -> AttentionLoad:
    """Return a load of random queries and KV for `chunks`, (query rows, context length) of each sequence, those with
    one query row first. Pages are in random order; memory that no sequence owns is NaN, and page 0 is zero. With
    `fp8_kv`, K and V are stored in FP8, with a scale for each head as in an engine."""
    ordered = tuple(sorted(chunks, key=lambda chunk: chunk[0] != 1))
    blocks = [-(-context // BLOCK_SIZE) for _, context in ordered]
    num_pages = sum(blocks) + 2
    pages = torch.randperm(num_pages - 2, generator=torch.Generator().manual_seed(0)).numpy() + 1
    arena = torch.empty(
        num_pages, layers, 2, BLOCK_SIZE, spec.kv_heads, spec.head_dim, dtype=dtype, device=device
    ).normal_()
    arena[0], arena[-1] = 0, float("nan")
    batch = attention_batch(ordered, np.split(pages, np.cumsum(blocks)[:-1]), device)
    for sequence, (_, context) in enumerate(ordered):
        if rest := context % BLOCK_SIZE:
            arena[int(batch.block_tables[sequence, blocks[sequence] - 1]), :, :, rest:] = float("nan")
    rows = sum(rows for rows, _ in ordered)
    query = torch.empty(rows, spec.heads, spec.head_dim, dtype=dtype, device=device).normal_()
    stored = arena.to(torch.float8_e4m3fn) if fp8_kv else arena
    kv = tuple(stored[:, layer] for layer in range(layers))
    coding = plain_coding(spec, device) if fp8_kv else None
    return AttentionLoad(query, kv, batch, ordered, Scores(spec.head_dim**-0.5), coding)


def plain_coding(spec: ModelSpec, device: torch.device) -> KvCoding:
    """Return the coding of K and V in FP8 whose scales are 1, and which subtracts nothing."""
    scales = torch.ones(2, spec.kv_heads, device=device)
    return KvCoding(scales, torch.zeros(spec.kv_heads, spec.head_dim, device=device))


def attention_batch(
    chunks: Sequence[tuple[int, int]], pages: Sequence[npt.NDArray[np.int64]], device: torch.device
) -> AttentionBatch:
    """Return index tensors, on `device`, of sequences with `chunks` (query rows, context) and `pages`, padded by 0."""
    lengths, contexts = (np.array(column) for column in zip(*chunks, strict=True))
    starts = np.append(0, np.cumsum(lengths))
    tables = np.zeros((len(chunks), max(len(own) for own in pages)), dtype=np.int32)
    slots = []
    for sequence, own in enumerate(pages):
        tables[sequence, : len(own)] = own
        positions = np.arange(contexts[sequence] - lengths[sequence], contexts[sequence])
        slots.append(own[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)

    def put(array: npt.NDArray[Any], kind: type[np.integer[Any]]) -> Tensor:
        return torch.from_numpy(array.astype(kind)).to(device)

    return AttentionBatch(
        query_starts=put(starts, np.int32),
        context_lens=put(contexts, np.int32),
        block_tables=put(tables, np.int32),
        kv_slots=put(np.concatenate(slots), np.int64),
        num_decodes=int(np.count_nonzero(lengths == 1)),
        max_query=int(lengths.max()),
        max_context=int(contexts.max()),
        host_query_starts=tuple(starts.tolist()),
        host_context_lens=tuple(contexts.tolist()),
    )


def with_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    return replace(spec, layers=layers, windows=spec.windows[:1] * layers)
