"""Places adapter weights in arena pages, in *blocks* A [rank, in_features] and B [rank, out_features] for each layer
and projection. They are cut into *tiles* of at most `RANK_TILE` rows; no tile straddles pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from lora_kernels.pinned import upload_into
from lora_kernels.segments import SegmentPlan
from lora_kernels.token_rows import TokenIds, TokenTable, make_token_table

# B is stored transposed, with the LoRA scale folded in. Tiles in FP8 (e4m3) have two numbers in each element of a
# 16-bit arena; one of B has a factor for each rank before its rows. A projection scaled by DoRA has one further tile
# before the others: see dora.py.

RANK_TILE = 16
"""Maximum rows of a tile. 16 is the smallest tensor-core tile, and one table entry then serves ranks 1 to 16."""
MAX_RANK = 256
MAX_TILES = MAX_RANK // RANK_TILE
ALIGN = 64
"""Tile offsets are multiples of 64 elements (128 bytes in bf16, a line of the L2) and are stored divided by 64, so that
an int32 can address `MAX_ELEMENTS`. With 8, the tables of an arena of more than 32 GiB were wrong: on an H200, reading
an adapter beyond it was an illegal memory access."""
MAX_ELEMENTS = 2**31 * ALIGN
"""Maximum number of elements of an arena with adapters: 256 GiB in bf16."""
SIDE_A, SIDE_B = 0, 1
FP8_SCALES = RANK_TILE
"""fp32 factors stored before the rows of an FP8 tile of B, one per rank: the product of the rank's rows of A and B is
multiplied by it."""
FP8_MAX = 448.0
"""The largest e4m3 number."""
TARGET_BYTES = 4 * (2 * MAX_TILES + 2)
"""Bytes of a `LoraTable` for each target of each layer of each slot."""
EXPERT_TARGETS = 3
"""Projections of an expert: gate, up and down."""
SCALE_ROWS = 2
"""Rows of a scale tile, each `out_features` wide: the factor of the base output minus one, and the number to add."""


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """Projections that read the same input and are served by one call. Their outputs lie side by side in one tensor."""

    name: str
    targets: tuple[int, ...]
    """Indices of the projections in the model's target list (the T axis of `LoraTable`)."""
    in_features: int
    out_features: tuple[int, ...]
    """Width of each projection's slice of the output, in order."""


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Positions of an adapter's tiles, relative to its own pages. They do not depend on the weights."""

    ranks: npt.NDArray[np.int32]
    """int32 [layers, targets]. 0 where the adapter does not touch the projection."""
    offsets: npt.NDArray[np.int64]
    """int64 [layers, targets, 2, MAX_TILES]. Element offset of each tile in the adapter's blob [num_pages *
    page_elems], on side A or B; 0 where there is no tile."""
    scales: npt.NDArray[np.int64]
    """int64 [layers, targets]. Element offset of the projection's scale tile; -1 where there is none."""
    num_pages: int
    """Number of pages of the blob."""
    fp8: bool = False
    """True means that A and B tiles hold e4m3 numbers."""
    tokens: TokenIds | None = None
    """Tokens whose rows the adapter replaces. None means that it replaces none."""
    token_offsets: tuple[int, ...] = ()
    """Element offset in the blob of each of these rows."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the layout itself, in host memory."""
        return self.ranks.nbytes + self.offsets.nbytes + self.scales.nbytes


def plan_layout(
    ranks: npt.NDArray[np.int32],
    widths: npt.NDArray[np.int32],
    page_elems: int,
    scaled: npt.NDArray[np.bool_] | None = None,
    fp8: bool = False,
    tokens: TokenIds | None = None,
) -> AdapterLayout:
    """Return an adapter's layout: first the rows of tokens, then the tiles by layer and target. A row or tile that does
    not fit the current page starts a new one.

    Args:
        ranks: int32 [layers, targets], each 0 to MAX_RANK.
        widths: int32 [targets, 2]. (in_features, out_features).
        page_elems: elements of one page.
        scaled: bool [layers, targets]. Projections that have a scale tile. None means none.
        tokens: tokens whose rows the adapter replaces, or None.

    Raises:
        ValueError: A row or tile is larger than a page, or a rank is out of range.
    """
    wrong = ranks[(ranks < 0) | (ranks > MAX_RANK)]
    if len(wrong):
        raise ValueError(f"ranks must be 0 to {MAX_RANK}, not {int(wrong[0])}")
    offsets = np.zeros((*ranks.shape, 2, MAX_TILES), dtype=np.int64)
    scales = np.full(ranks.shape, -1, dtype=np.int64)
    cursor = _Cursor(page_elems)
    token_offsets = tuple(cursor.place(tokens.width) for _ in range(tokens.num_rows)) if tokens else ()
    for layer, target in np.argwhere(ranks > 0):
        if scaled is not None and scaled[layer, target]:
            scales[layer, target] = cursor.place(SCALE_ROWS * int(widths[target, SIDE_B]))
        for side in (SIDE_A, SIDE_B):
            for tile in range(-(-int(ranks[layer, target]) // RANK_TILE)):
                rows = min(RANK_TILE, int(ranks[layer, target]) - tile * RANK_TILE)
                offsets[layer, target, side, tile] = cursor.place(
                    _tile_elems(rows * int(widths[target, side]), side, fp8)
                )
    return AdapterLayout(ranks, offsets, scales, -(-cursor.end // page_elems), fp8, tokens, token_offsets)


def _tile_elems(numbers: int, side: int, fp8: bool) -> int:
    """Return the arena elements of a tile of `numbers` weights; in FP8, side B includes factors for the rows."""
    if not fp8:
        return numbers
    return -(-numbers // 2) + (2 * FP8_SCALES if side == SIDE_B else 0)


class _Cursor:
    """Allocates tiles one after the other in an adapter's blob. `end` is the element offset after the last tile."""

    def __init__(self, page_elems: int) -> None:
        self._page_elems = page_elems
        self.end = 0

    def place(self, elements: int) -> int:
        """Allocate a tile of `elements`, rounded up to ALIGN, on the current page if it fits, or else on the next.

        Return its element offset in the blob. Raises ValueError if it is larger than a page.
        """
        size = -(-elements // ALIGN) * ALIGN
        if size > self._page_elems:
            raise ValueError(f"a LoRA tile of {size} elements does not fit a page of {self._page_elems}")
        if self.end % self._page_elems + size > self._page_elems:
            self.end = -(-self.end // self._page_elems) * self._page_elems
        self.end += size
        return self.end - size


def pack_adapter(
    layout: AdapterLayout,
    blocks: Mapping[tuple[int, int], tuple[torch.Tensor, torch.Tensor]],
    page_elems: int,
    dtype: torch.dtype,
    scales: Mapping[tuple[int, int], torch.Tensor] = MappingProxyType({}),
    token_rows: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Return an adapter's blocks as one blob in the layout of the kernels, [num_pages, page_elems], zero between tiles.

    Args:
        layout: of `plan_layout`. With `layout.fp8`, A and B are quantised.
        blocks: (layer, target) -> (A [rank, in_features], B [out_features, rank] with the scale folded in).
        scales: (layer, target) -> scale tile [SCALE_ROWS, out_features].
        token_rows: one row for each of `layout.token_offsets`.
    """
    blob = torch.zeros(layout.num_pages * page_elems, dtype=dtype)
    for place, (a, b) in blocks.items():
        if layout.fp8:
            _pack_fp8(blob, layout.offsets[place], a, b.T)
            continue
        for side, rows in ((SIDE_A, a), (SIDE_B, b.T)):
            for tile, part in enumerate(rows.split(RANK_TILE)):
                start = int(layout.offsets[*place, side, tile])
                blob[start : start + part.numel()] = part.reshape(-1).to(dtype)
    for (layer, target), rows in scales.items():
        start = int(layout.scales[layer, target])
        blob[start : start + rows.numel()] = rows.reshape(-1).to(dtype)
    for start, row in zip(layout.token_offsets, token_rows, strict=True):
        blob[start : start + len(row)] = row.to(dtype)
    return blob.view(layout.num_pages, page_elems)


def _pack_fp8(blob: torch.Tensor, offsets: npt.NDArray[np.int64], a: torch.Tensor, b: torch.Tensor) -> None:
    """Write A [rank, in_features] and B [rank, out_features] into `blob` in e4m3, each row divided by its own scale, at
    `offsets` [2, MAX_TILES]. The product of a rank's two scales is stored before the rows of B."""
    memory, (bits_a, scale_a), (bits_b, scale_b) = blob.view(torch.uint8), quantise_rows(a), quantise_rows(b)
    factors = (scale_a * scale_b).view(torch.uint8).view(-1, 4)
    for tile, rows in enumerate(torch.arange(len(a)).split(RANK_TILE)):
        start_a, start_b = (int(offset) * 2 for offset in offsets[:, tile])
        for start, part in ((start_a, bits_a), (start_b, factors), (start_b + 4 * FP8_SCALES, bits_b)):
            chosen = part[rows].reshape(-1)
            memory[start : start + len(chosen)] = chosen


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of [rank, width] to e4m3, its largest to 448. Return the bits, uint8 [rank, width], and the
    scales, fp32 [rank, 1], by which the e4m3 numbers must be multiplied to restore the rows."""
    largest = rows.float().abs().amax(dim=1, keepdim=True)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (rows.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale


class LoraTable:
    """Maps each adapter slot to its tiles in the arena. Device tensors keep their addresses, and have copies on the
    host (`host_ranks` and so on). Raises ValueError unless `page_elems` is a multiple of ALIGN."""

    def __init__(
        self,
        max_adapter_slots: int,
        layers: int,
        targets: int,
        page_elems: int,
        device: torch.device,
        fp8: bool = False,
    ) -> None:
        if page_elems % ALIGN:
            raise ValueError(f"page_elems must be a multiple of {ALIGN}, not {page_elems}")
        self.page_elems = page_elems
        self.fp8 = fp8
        """True means that all adapters are stored in e4m3; if False, none is."""
        self.max_ranks = np.zeros(max_adapter_slots, dtype=np.int32)
        """int32 [max_adapter_slots], host only. The largest rank of each slot."""
        self.has_scales = np.zeros(max_adapter_slots, dtype=np.bool_)
        """bool [max_adapter_slots], host only. Whether a slot's adapter scales any base output."""
        self.host_ranks = np.zeros((max_adapter_slots, layers, targets), dtype=np.int32)
        self.host_offsets = np.zeros((max_adapter_slots, layers, targets, 2, MAX_TILES), dtype=np.int32)
        self.host_scales = np.zeros((max_adapter_slots, layers, targets), dtype=np.int32)
        self.tokens: dict[int, TokenTable] = {}
        """Adapter slot -> the rows of tokens that its adapter replaces; host only, of slots that replace any."""
        self.versions = np.zeros(max_adapter_slots, dtype=np.int64)
        """int64 [max_adapter_slots], host only. Incremented with every change of a slot, so that data derived from the
        slot can be recognised as stale."""
        self.ranks = torch.from_numpy(self.host_ranks).to(device)
        """int32 [max_adapter_slots, layers, targets]."""
        self.offsets = torch.from_numpy(self.host_offsets).to(device)
        """int32 [max_adapter_slots, layers, targets, 2, MAX_TILES]. Element offset of each tile in the arena, divided
        by ALIGN."""
        self.scales = torch.from_numpy(self.host_scales).to(device)
        """int32 [max_adapter_slots, layers, targets]. Element offset of each scale tile, divided by ALIGN; 0, where the
        arena holds zeros, if there is none."""
        self._by_expert: LoraTable | None = None

    def set(self, adapter_slot: int, layout: AdapterLayout, pages: tuple[int, ...]) -> None:
        """Assign an adapter to a slot, on the host and (without waiting) on the device, and increment the slot's
        version. `pages[i]` is the arena page of the blob's page i. Raises ValueError if only one of them is in FP8."""
        if layout.fp8 != self.fp8:
            raise ValueError(f"this table's adapters are {'' if self.fp8 else 'not '}stored in FP8")
        present = layout.ranks[:, :, None, None] > RANK_TILE * np.arange(MAX_TILES)
        self.host_ranks[adapter_slot] = layout.ranks
        self.host_offsets[adapter_slot] = np.where(present, self._in_arena(layout.offsets, pages), 0)
        self.host_scales[adapter_slot] = np.where(layout.scales >= 0, self._in_arena(layout.scales, pages), 0)
        self.tokens.pop(adapter_slot, None)
        if layout.tokens is not None:
            starts = self._in_arena(np.asarray(layout.token_offsets, dtype=np.int64), pages) * ALIGN
            self.tokens[adapter_slot] = make_token_table(layout.tokens, starts, self.ranks.device)
        self._upload(adapter_slot)

    def by_expert(self) -> LoraTable:
        """Return the view of this table by virtual slot, with one layer and three targets (an expert's gate, up and
        down), in which later changes show. Raises ValueError unless the number of targets is a multiple of three."""
        # The targets t, t + 1 and t + 2 of a layer of a slot, where t is a multiple of 3, are those of the virtual slot
        # (slot * layers + layer) * targets / 3 + t / 3.
        if self._by_expert is None:
            if self.host_ranks.shape[2] % EXPERT_TARGETS:
                raise ValueError(f"{self.host_ranks.shape[2]} targets cannot be split into threes")
            part = self._by_expert = copy(self)
            part.ranks, part.scales = (table.view(-1, 1, EXPERT_TARGETS) for table in (self.ranks, self.scales))
            part.offsets = self.offsets.view(-1, 1, EXPERT_TARGETS, 2, MAX_TILES)
            part.host_ranks = self.host_ranks.reshape(-1, 1, EXPERT_TARGETS)
            part.host_scales = self.host_scales.reshape(-1, 1, EXPERT_TARGETS)
            part.host_offsets = self.host_offsets.reshape(-1, 1, EXPERT_TARGETS, 2, MAX_TILES)
            part.max_ranks = part.host_ranks.max(axis=(1, 2))
            part.has_scales = part.host_scales.max(axis=(1, 2)) > 0
            part.versions = np.repeat(self.versions, len(part.host_ranks) // len(self.host_ranks))
        return self._by_expert

    def _renew_experts(self, adapter_slot: int, part: LoraTable) -> None:
        """Update, for one slot, the fields of `part` (the view by expert) that do not share memory with this table:
        versions, largest ranks, and whether there are scales."""
        each = len(part.host_ranks) // len(self.host_ranks)
        own = slice(adapter_slot * each, (adapter_slot + 1) * each)
        part.versions[own] = self.versions[adapter_slot]
        part.max_ranks[own] = part.host_ranks[own].max(axis=(1, 2))
        part.has_scales[own] = part.host_scales[own].max(axis=(1, 2)) > 0

    def _in_arena(self, offsets: npt.NDArray[np.int64], pages: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """Convert element offsets in a blob to element offsets in the arena, divided by ALIGN."""
        page, within = np.divmod(offsets, self.page_elems)
        absolute = np.asarray(pages or (0,), dtype=np.int64)[page] * self.page_elems + within
        return np.asarray(absolute // ALIGN)

    def clear(self, adapter_slot: int) -> None:
        """Set a slot's ranks, offsets and scales to 0, so that it changes no output, and increment its version."""
        self.host_ranks[adapter_slot] = 0
        self.host_offsets[adapter_slot] = 0
        self.host_scales[adapter_slot] = 0
        self.tokens.pop(adapter_slot, None)
        self._upload(adapter_slot)

    def replaces_tokens(self, plan: SegmentPlan) -> bool:
        """Return whether any adapter of a step replaces the embedding or head rows of some tokens."""
        return bool(self.tokens) and any(slot in self.tokens for slot in plan.adapter_slots.tolist())

    def _upload(self, adapter_slot: int) -> None:
        self.versions[adapter_slot] += 1
        self.max_ranks[adapter_slot] = self.host_ranks[adapter_slot].max(initial=0)
        self.has_scales[adapter_slot] = self.host_scales[adapter_slot].any()
        if self._by_expert is not None:
            self._renew_experts(adapter_slot, self._by_expert)
        for table, host in (
            (self.ranks, self.host_ranks),
            (self.offsets, self.host_offsets),
            (self.scales, self.host_scales),
        ):
            upload_into(table[adapter_slot], host[adapter_slot])
