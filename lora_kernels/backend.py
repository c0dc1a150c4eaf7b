"""The interface to the kernels. All tensors of a call live on one device. KV of a layer is a view of the arena,
[num_pages, 2, block_size, kv_heads, head_dim] with 0 = K and 1 = V; adapter rows lie in the arena as a flat tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lora_kernels.layout import LoraTable, ProjectionGroup
from lora_kernels.pointwise import Pointwise, QkNorms
from lora_kernels.routing import ExpertKernels
from lora_kernels.segments import SegmentPlan


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A ragged batch of chunks against paged KV. Chunks with one query row come first."""

    # In a captured step with prompts only the device knows how many rows each sequence has; on the host every sequence
    # counts as a decode then, and `max_query` is the number of all rows. Padding sequences, which come last, have no
    # rows.
    query_starts: Tensor
    """int32 [num_seqs + 1]. Rows of sequence i are `query_starts[i]:query_starts[i + 1]`."""
    context_lens: Tensor
    """int32 [num_seqs]. Tokens in the KV cache once this step's are written; the last query row of a sequence sees all
    of them, the one before it one fewer."""
    block_tables: Tensor
    """int32 [num_seqs, max_blocks]. Page of each block; padded with page 0."""
    kv_slots: Tensor
    """int64 [num_rows]. `page * block_size + offset` where each row's K and V are written. In a captured step, padding
    rows have a negative slot and context 0: nothing is written or read for them."""
    num_decodes: int
    """Number of leading sequences with exactly one query row."""
    max_query: int
    max_context: int
    """`max_query` and `max_context`: the largest number of query rows and the largest context length, on the host."""
    host_query_starts: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    """`host_query_starts` and `host_context_lens`: `query_starts` and `context_lens` on the host, for loops and launch
    sizes."""

    @property
    def has_any_lengths(self) -> bool:
        """Return whether only the device knows how many rows each sequence has."""
        return self.max_query > 1 and self.num_decodes == len(self.host_context_lens)


@dataclass(frozen=True, slots=True)
class KvCoding:
    """How a layer's K and V are stored in fewer bits: as (K - key_shift) / scale and V / scale. Kernels that read
    ignore the shift, which adds the same to the scores of a row with all keys."""

    scales: Tensor
    """fp32 [2, kv_heads], of K and of V."""
    key_shift: Tensor
    """fp32 [kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer's attention turns products of queries and keys into the weights of values."""

    scale: float
    """Factor of the products."""
    cap: float | None = None
    """Bound of the scaled products s, which become cap * tanh(s / cap) before any is masked (Gemma 2, 2024). None means
    that they are not bounded."""
    sinks: Tensor | None = None
    """fp32 [heads]. Each query head's further score, which takes part in every softmax and has no value (Efficient
    Streaming Language Models with Attention Sinks, Xiao et al. 2023). None means that there is none."""

    @property
    def are_relative(self) -> bool:
        """Return whether adding the same number to all scores of a row changes no weight."""
        return self.cap is None and self.sinks is None


class Backend(Protocol):
    """The kernel calls that every backend implements: rotary embedding and KV writes, attention, LoRA, and those of
    `pointwise` and `experts`; sampling is not among them. Implementations hold no state except caches."""

    name: str

    @property
    def pointwise(self) -> Pointwise:
        """The row-wise operations between a decoder's matrix products."""

    @property
    def experts(self) -> ExpertKernels:
        """The operations of a mixture of experts."""

    def rotate_and_write(
        self,
        qkv: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        cos: Tensor,
        sin: Tensor,
        norms: QkNorms | None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Apply norms and rotary embedding to the fused projection, and write K and V. Return the query, [num_rows,
        heads, head_dim].

        Args:
            qkv: [num_rows, (heads + 2 * kv_heads) * head_dim], may be modified.
            cos, sin: see `Pointwise.rotate`.
            kv_coding: None means as they are. CPU backends accept only None.
        """

    def write_kv(self, kv: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> None:
        """Store this step's K and V ([num_rows, kv_heads, head_dim]) at `batch.kv_slots` of one layer's KV."""

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        batch: AttentionBatch,
        scores: Scores,
        window: int | None = None,
        kv_coding: KvCoding | None = None,
    ) -> Tensor:
        """Return causal attention of `query` [num_rows, heads, head_dim] over a layer's paged KV, in the same shape.
        Query head h reads KV head `h // (heads // kv_heads)`. With `window`, a row sees only the last `window`
        positions up to its own."""

    def prepare_lora(self, arena: Tensor, table: LoraTable, plan: SegmentPlan) -> Any:
        """Return the data that `add_lora` needs in all layers of a step. None means that there is nothing to add."""

    def add_lora(self, out: Tensor, x: Tensor, prepared: Any, layer: int, group: ProjectionGroup) -> None:
        """Compute `out[row, slice_t] += B_t A_t x[row]` for every target of the group, each row with its own adapter.

        Args:
            out: [num_rows, sum(group.out_features)], the base projections' result, modified in place.
            x: [num_rows, group.in_features].
            prepared: the result of `prepare_lora`, which must not be None.
        """


def require_plain(kv_coding: KvCoding | None) -> None:
    """Raises ValueError if K and V have scales. Backends for a CPU keep them in the model's dtype, which needs none."""
    if kv_coding is not None:
        raise ValueError("K and V have scales only where they are stored in FP8, on a GPU")
