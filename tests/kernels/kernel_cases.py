"""Builders of kernel inputs: arenas in which everything without an owner is NaN, adapters, ragged attention batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lora_kernels.backend import AttentionBatch, Scores
from lora_kernels.layout import LoraTable, ProjectionGroup, pack_adapter, plan_layout
from lora_kernels.segments import SegmentPlan, plan_segments

LAYERS = 2


@dataclass(frozen=True)
class Shape:
    """Widths of a small Llama-like model: seven projections in four groups."""

    hidden: int = 48
    kv: int = 16
    inter: int = 80

    @property
    def widths(self) -> np.ndarray:
        h, kv, inter = self.hidden, self.kv, self.inter
        return np.array([(h, h), (h, kv), (h, kv), (h, h), (h, inter), (h, inter), (inter, h)], dtype=np.int32)

    @property
    def groups(self) -> tuple[ProjectionGroup, ...]:
        h, kv, inter = self.hidden, self.kv, self.inter
        return (
            ProjectionGroup("qkv", (0, 1, 2), h, (h, kv, kv)),
            ProjectionGroup("o", (3,), h, (h,)),
            ProjectionGroup("gate_up", (4, 5), h, (inter, inter)),
            ProjectionGroup("down", (6,), inter, (h,)),
        )


@dataclass(frozen=True)
class LoraCase:
    """Adapters in an arena, rows that use them, and the plain weights they were made of."""

    shape: Shape
    arena: Tensor
    table: LoraTable
    row_adapter_slots: list[int]
    plan: SegmentPlan
    blocks: list[dict[tuple[int, int], tuple[Tensor, Tensor]]]
    pages: list[tuple[int, ...]]

    def inputs(self, group: ProjectionGroup, seed: int = 1) -> tuple[Tensor, Tensor]:
        """(base output, x) for a group."""
        generator = torch.Generator().manual_seed(seed)
        rows, dtype = len(self.row_adapter_slots), self.arena.dtype
        out = torch.randn(rows, sum(group.out_features), generator=generator).to(dtype)
        return out, torch.randn(rows, group.in_features, generator=generator).to(dtype)


def make_blocks(shape: Shape, ranks: np.ndarray, generator: torch.Generator) -> dict:
    """(layer, target) -> (A, B) for the ranks of one adapter, [layers, targets]."""
    blocks = {}
    for layer, target in np.argwhere(ranks > 0):
        rank, (width_in, width_out) = int(ranks[layer, target]), shape.widths[target]
        a = torch.randn(rank, int(width_in), generator=generator) / int(width_in) ** 0.5
        b = torch.randn(int(width_out), rank, generator=generator) / rank**0.5
        blocks[int(layer), int(target)] = (a, b)
    return blocks


def lora_case(
    adapters: Sequence[int | np.ndarray],
    row_adapter_slots: Sequence[int],
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float32,
    page_elems: int = 2048,
    zero_b: bool = False,
    seed: int = 0,
    fp8: bool = False,
) -> LoraCase:
    """An arena with `adapters[i]` (a rank, or ranks [layers, targets]) at slot i, over scattered pages."""
    shape = shape or Shape()
    generator = torch.Generator().manual_seed(seed)
    per_slot = [np.broadcast_to(np.asarray(ranks, dtype=np.int32), (LAYERS, 7)).copy() for ranks in adapters]
    layouts = [plan_layout(ranks, shape.widths, page_elems, fp8=fp8) for ranks in per_slot]
    num_pages = 2 * sum(layout.num_pages for layout in layouts) + 2
    arena = torch.full((num_pages, page_elems), float("nan"), dtype=dtype)
    arena[0] = 0
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    table = LoraTable(len(adapters) + 1, LAYERS, 7, page_elems, torch.device("cpu"), fp8)
    all_blocks, all_pages = [], []
    for adapter_slot, (ranks, layout) in enumerate(zip(per_slot, layouts, strict=True)):
        blocks = make_blocks(shape, ranks, generator)
        if zero_b:
            blocks = {key: (a, torch.zeros_like(b)) for key, (a, b) in blocks.items()}
        pages = tuple(free.pop() for _ in range(layout.num_pages))
        if pages:
            arena[list(pages)] = pack_adapter(layout, blocks, page_elems, dtype)
        table.set(adapter_slot, layout, pages)
        all_blocks.append(blocks)
        all_pages.append(pages)
    plan = plan_segments(np.array(row_adapter_slots, dtype=np.int32))
    return LoraCase(shape, arena.view(-1), table, list(row_adapter_slots), plan, all_blocks, all_pages)


@dataclass(frozen=True)
class AttentionCase:
    query: Tensor
    key: Tensor
    value: Tensor
    kv: Tensor
    batch: AttentionBatch
    scores: Scores


def attention_case(
    chunks: Sequence[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    cap: float | None = None,
    sinks: bool = False,
) -> AttentionCase:
    """Chunks of (query rows, context). KV holds everything but this step's rows; all that is not owned is NaN."""
    generator = torch.Generator().manual_seed(seed)
    chunks = sorted(chunks, key=lambda chunk: chunk[0] != 1)
    starts = [0, *np.cumsum([rows for rows, _ in chunks]).tolist()]
    blocks = [-(-context // block_size) for _, context in chunks]
    num_pages = 2 * sum(blocks) + 1
    arena = torch.full((num_pages, 3, 2, block_size, kv_heads, head_dim), float("nan"), dtype=dtype)
    arena[0] = 0
    free = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    tables = torch.zeros(len(chunks), max(blocks), dtype=torch.int32)
    kv, slots = arena[:, 1], []
    for index, (rows, context) in enumerate(chunks):
        tables[index, : blocks[index]] = torch.tensor([free.pop() for _ in range(blocks[index])])
        for position in range(context):
            page, offset = int(tables[index, position // block_size]), position % block_size
            if position < context - rows:
                kv[page, :, offset] = torch.randn(2, kv_heads, head_dim, generator=generator).to(dtype)
            else:
                slots.append(page * block_size + offset)
    contexts = [context for _, context in chunks]
    batch = AttentionBatch(
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        kv_slots=torch.tensor(slots, dtype=torch.int64),
        num_decodes=sum(rows == 1 for rows, _ in chunks),
        max_query=max(rows for rows, _ in chunks),
        max_context=max(contexts),
        host_query_starts=tuple(starts),
        host_context_lens=tuple(contexts),
    )
    query = torch.randn(starts[-1], heads, head_dim, generator=generator).to(dtype)
    key, value = torch.randn(2, starts[-1], kv_heads, head_dim, generator=generator).to(dtype)
    scores = Scores(head_dim**-0.5, cap, torch.randn(heads, generator=generator) if sinks else None)
    return AttentionCase(query, key, value, kv, batch, scores)


MANY = [0, 1, 3, 16, 17, 64, 256, 8]
PARTIAL = np.zeros((LAYERS, 7), dtype=np.int32)
PARTIAL[:, [0, 2]] = 8
ONE_LAYER = np.zeros((LAYERS, 7), dtype=np.int32)
ONE_LAYER[1] = 5
RAGGED = np.arange(LAYERS * 7, dtype=np.int32).reshape(LAYERS, 7) * 3

LORA_CASES = {
    "one adapter, one row": lambda **kw: lora_case([8], [0], **kw),
    "no row has an adapter": lambda **kw: lora_case([8], [-1, -1], **kw),
    "single-row segments": lambda **kw: lora_case([8] * 9, [3, 0, 8, -1, 1, 2, 5, 4, 7, 6], **kw),
    "two-row segments": lambda **kw: lora_case([8, 4, 2], [0, 1, 2, 2, 1, 0], **kw),
    "three rows each, tiles shared": lambda **kw: lora_case([8, 4, 2, 6], [0, 1, 2, 3] * 3, **kw),
    "all ranks in one batch": lambda **kw: lora_case(
        MANY, [7, 6, 5, 4, 3, 2, 1, 0, -1, 7, 1, 5], page_elems=4096, **kw
    ),
    "long segments of all ranks": lambda **kw: lora_case(
        MANY,
        [adapter_slot for adapter_slot, rows in enumerate([3, 1, 5, 17, 20, 6, 2, 16]) for _ in range(rows)] + [-1, 4],
        **kw,
    ),
    "one long segment": lambda **kw: lora_case([16, 8], [1] * 70, **kw),
    "some projections absent": lambda **kw: lora_case([PARTIAL, 8, PARTIAL], [0, 1, 2, -1, 0], **kw),
    "projections no adapter touches": lambda **kw: lora_case([PARTIAL], [0, -1, 0], **kw),
    "one layer only": lambda **kw: lora_case([ONE_LAYER, 2], [0, 0, 1, -1], **kw),
    "a rank of its own everywhere": lambda **kw: lora_case([RAGGED, 4], [0, 1, 0, 1, 0, 0, 0], **kw),
    "odd widths": lambda **kw: lora_case([7, 33, 1], [0, 1, 2, 0, -1, 1], shape=Shape(49, 7, 81), **kw),
    "pages with odd ends": lambda **kw: lora_case([16, 13, 40], [0, 1, 2, 2, 2], page_elems=1344, **kw),
}

ATTENTION_CASES = {
    "one token": (lambda **kw: attention_case([(1, 1)], **kw), None),
    "decodes": (lambda **kw: attention_case([(1, 5), (1, 8), (1, 9), (1, 40), (1, 1)], **kw), None),
    "fresh prompt": (lambda **kw: attention_case([(13, 13)], **kw), None),
    "chunked prefill": (lambda **kw: attention_case([(7, 30), (9, 9), (2, 17)], **kw), None),
    "mixed": (lambda **kw: attention_case([(1, 33), (20, 27), (1, 2), (3, 3), (1, 16)], **kw), None),
    "multi-head": (lambda **kw: attention_case([(1, 12), (5, 9)], heads=3, kv_heads=3, **kw), None),
    "multi-query, eight to one": (lambda **kw: attention_case([(1, 12), (5, 9)], heads=8, kv_heads=1, **kw), None),
    "three to one": (lambda **kw: attention_case([(1, 12), (5, 9)], heads=9, kv_heads=3, **kw), None),
    "big head, block of 32": (lambda **kw: attention_case([(1, 70), (4, 40)], head_dim=128, block_size=32, **kw), None),
    "odd head": (lambda **kw: attention_case([(1, 12), (5, 9)], head_dim=80, **kw), None),
    "window": (lambda **kw: attention_case([(1, 33), (20, 27), (1, 2), (3, 3), (1, 16)], **kw), 5),
    "window of a block": (lambda **kw: attention_case([(1, 33), (20, 47), (30, 30)], **kw), 8),
    "window beyond the context": (lambda **kw: attention_case([(1, 33), (12, 12)], **kw), 100),
    "capped": (lambda **kw: attention_case([(1, 200), (20, 27), (1, 2)], cap=0.5, **kw), None),
    "sinks": (lambda **kw: attention_case([(1, 200), (20, 27), (1, 2)], sinks=True, **kw), None),
    "gpt-oss: eight to one, a window and sinks": (
        lambda **kw: attention_case([(1, 70), (5, 40)], heads=8, kv_heads=1, head_dim=64, sinks=True, **kw),
        33,
    ),
    "capped, with a window and sinks": (
        lambda **kw: attention_case([(1, 90), (7, 30), (1, 1)], heads=9, kv_heads=3, cap=1.0, sinks=True, **kw),
        8,
    ),
}
