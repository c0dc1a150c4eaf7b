"""The one door to the kernels: a protocol of five calls, and three more for what lies between (pointwise.py).

All tensors of one call live on one device. KV of a layer is a view of the arena, [num_pages, 2, block_size, kv_heads,
head_dim] with 0 = K and 1 = V, strided across pages. Adapter rows are read from the same arena, flat: [num_elements].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import HeadNorms, Pointwise
from lora_kernels.segments import SegmentPlan


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A ragged batch of chunks against paged KV. Chunks with one query row come first.

    Attributes:
        query_starts: int32 [num_seqs + 1]. Rows of sequence i are `query_starts[i]:query_starts[i + 1]`.
        context_lens: int32 [num_seqs]. Tokens in the KV cache once this step's are written; the last query row of
            a sequence sees all of them, the one before it one fewer.
        block_tables: int32 [num_seqs, max_blocks]. Page of each block; padded with page 0.
        kv_slots: int64 [num_rows]. `page * block_size + offset` where each row's K and V are written.
            In a captured step, rows that pad it have a negative one, and context 0: they write and read nothing.
        num_decodes: leading sequences with exactly one query row.
        max_query, max_context: host integers, the largest of the batch.
        host_query_starts, host_context_lens: the same numbers on the host, for loops and launch sizes.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    kv_slots: Tensor
    num_decodes: int
    max_query: int
    max_context: int
    host_query_starts: tuple[int, ...]
    host_context_lens: tuple[int, ...]


class Backend(Protocol):
    """What every backend can do. Implementations are stateless but for caches."""

    name: str

    @property
    def pointwise(self) -> Pointwise:
        """What a decoder does between its products."""

    def rotate_and_write(
        self, qkv: Tensor, kv: Tensor, batch: AttentionBatch, cos: Tensor, sin: Tensor, norms: HeadNorms | None
    ) -> Tensor:
        """From the fused projection to attention: head norms, the rotary embedding, and `write_kv`.

        Args:
            qkv: [num_rows, (heads + 2 * kv_heads) * head_dim], query, key and value side by side; may be changed.
            cos, sin: as in `Pointwise.rotate`.

        Returns:
            The query, [num_rows, heads, head_dim].
        """

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Stores this step's K and V ([num_rows, kv_heads, head_dim]) at `batch.kv_slots` of one layer's KV."""

    def attention(
        self, query: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention of query rows [num_rows, heads, head_dim] over paged KV; the same shape back.

        GQA: query head h reads KV head `h // (heads // kv_heads)`. With `window`, a row sees only the last
        `window` positions up to itself.
        """

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> Any:
        """Once a step: whatever `add_lora` needs in every layer, on the device. None when there are no segments."""

    def add_lora(self, out: Tensor, x: Tensor, prepared: Any, layer: int, group: ProjectionGroup) -> None:
        """`out[row, slice_t] += B_t A_t x[row]` for every target of the group, each row with its own adapter.

        Args:
            out: [num_rows, sum(group.out_features)], the base projections' result, changed in place.
            x: [num_rows, group.in_features].
            prepared: what `prepare_lora` returned; never None.
        """
