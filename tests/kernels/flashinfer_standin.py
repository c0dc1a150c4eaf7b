"""Stands in for the module `flashinfer` on a CPU: the two wrappers that are used, in torch, with FlashInfer's rules.

A plan writes what its kernels need into buffers, and kernels read these alone, as on a GPU: a replay that runs after
another plan than its own, or with lists that were overwritten, fails. Sizes of workspaces, and what is refused, follow
the source of the version in `flashinfer_facts.py`. fp32 is served, which FlashInfer does not: only so
are results exact enough to compare texts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import ModuleType

import torch
from torch import Tensor

PROCESSORS = 2
"""Multiprocessors of the device that plans are made for, as of what our kernels assume under the interpreter."""
DEFAULT_INT_BYTES = 8 << 20
PLANS = count(1)


class Log:
    """What the wrappers did, for tests.

    Attributes:
        plans: kind of wrapper, "decode" or "prefill", of each plan.
        runs: the same of each run.
        captured: number of wrappers that were made for CUDA graphs.
        replaying: True while recorded work is replayed: no code of the host checks anything then.
    """

    def __init__(self) -> None:
        self.plans: list[str] = []
        self.runs: list[str] = []
        self.captured = 0
        self.replaying = False


LOG = Log()


@contextmanager
def installed() -> Iterator[Log]:
    """Makes this the module `flashinfer` while the block runs, and yields a new log."""
    global LOG
    LOG, module = Log(), ModuleType("flashinfer")
    vars(module).update(
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    )
    before = sys.modules.get("flashinfer")
    sys.modules["flashinfer"] = module
    try:
        yield LOG
    finally:
        del sys.modules["flashinfer"]
        if before is not None:
            sys.modules["flashinfer"] = before


def determine_tile(packed_rows: int) -> int:
    return 128 if packed_rows > 64 else 64 if packed_rows > 16 else 16


def float_need(rows: int, seqs: int, heads: int, kv_heads: int, head_dim: int, processors: int, captured: bool) -> int:
    """Bytes that the planner of FA2 takes for parts of rows."""
    group, split = heads // kv_heads, 2 * processors // kv_heads
    if captured:
        tile = determine_tile((rows - seqs + 1) * group)
        padded = max(split, -(-rows * group // tile) + seqs - 1)
    else:
        tile, padded = determine_tile(rows * group // seqs), split
    return -(-padded * tile // group) * heads * (head_dim + 1) * 4


def int_need(rows: int, seqs: int, heads: int) -> int:
    """Bytes that the planner of FA3 takes for its lists, which are longer than FA2's, in a captured step."""
    return (-(-rows // 128) + seqs - 1) * heads * 28


class _Wrapper:
    """What both wrappers share: buffers, the rules of CUDA graphs, planning and computing."""

    kind = ""

    def __init__(
        self, floats: Tensor, kv_layout: str, use_cuda_graph: bool, buffers: tuple[Tensor | None, ...]
    ) -> None:
        if kv_layout != "NHD":
            raise KeyError(f"this stands in for NHD alone, not for {kv_layout}")
        if floats.data_ptr() % 16 or floats.any():
            raise ValueError("the float workspace must be aligned to 16 bytes, and zero for its first use")
        self._floats, self._use_cuda_graph = floats, use_cuda_graph
        self._ints = torch.empty(DEFAULT_INT_BYTES, dtype=torch.uint8)
        self._rows, self._starts, self._pages, self._last = buffers
        self._max_rows: int | None = None
        self._shape: tuple[object, ...] | None = None
        self._plan_id = 0
        if use_cuda_graph:
            LOG.captured += 1
            if any(not torch.is_tensor(buffer) for buffer in (self._starts, self._pages, self._last)):
                raise ValueError("CUDA graphs need buffers for indptr, indices and last_page_len")
            self._seqs = len(self._last)
            if len(self._starts) != self._seqs + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        self._floats, self._ints = float_workspace_buffer, int_workspace_buffer

    def _plan(
        self, rows, starts, pages, last, heads, kv_heads, head_dim, page_size, window_left, dtypes, sm_scale, soft_cap
    ):
        if LOG.replaying:
            raise RuntimeError("the host plans nothing while a CUDA graph is replayed")
        lists = (rows, starts, last)
        assert all(part.dtype == torch.int32 and part.device.type == "cpu" for part in (*lists, pages))
        assert rows[0] == starts[0] == 0 and (rows.diff() >= 0).all() and len(pages) == starts[-1]
        assert len(rows) == len(starts) == len(last) + 1
        lengths = (starts.diff() - 1) * page_size + last
        if ((last < 1) | (last > page_size)).any() or (starts.diff() < 1).any() or (lengths < rows.diff()).any():
            raise ValueError("last pages have 1 to page_size tokens, and a row needs its own token in the cache")
        if heads % kv_heads or dtypes[0] != dtypes[1] or dtypes[0].itemsize not in (2, 4):
            raise ValueError("num_qo_heads must be a multiple of num_kv_heads, and K and V in the query's dtype")
        LOG.plans.append(self.kind)
        if self._use_cuda_graph:
            self._check_captured(int(rows[-1]), len(last), pages)
            for buffer, part in ((self._rows, rows), (self._starts, starts), (self._last, last)):
                buffer.copy_(part)
            self._pages[: len(pages)].copy_(pages)
        else:
            self._rows, self._starts, self._pages, self._last = (part.clone() for part in (rows, starts, pages, last))
        shape = heads, kv_heads, head_dim, page_size, window_left, dtypes, sm_scale, soft_cap or 0.0
        if self._use_cuda_graph and self._shape not in (None, shape):
            raise ValueError("a captured graph launches what it was captured with")
        self._shape, self._planned_rows = shape, int(rows[-1])
        self._check_workspaces(rows, heads, kv_heads, head_dim)
        self._plan_id = next(PLANS)
        self._ints[:8].view(torch.int64)[0] = self._plan_id

    def _check_captured(self, rows: int, seqs: int, pages: Tensor) -> None:
        if self._max_rows is None:
            self._max_rows = rows
        if rows > self._max_rows:
            raise ValueError(f"The total number of rows {rows} cannot exceed the number in the first plan")
        if seqs != self._seqs:
            raise ValueError(f"The batch size should be fixed in cudagraph mode: {seqs}, not {self._seqs}")
        if len(pages) > len(self._pages):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")

    def _check_workspaces(self, rows: Tensor, heads: int, kv_heads: int, head_dim: int) -> None:
        """Allocates what FlashInfer's planners allocate: FA2's parts, which all captured steps have, and the lists of
        the planner with the longest ones (FA3's)."""
        total, seqs, captured = self._max_rows or int(rows[-1]), len(rows) - 1, self._use_cuda_graph
        if float_need(total, seqs, heads, kv_heads, head_dim, PROCESSORS, captured) > self._floats.nbytes:
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
        if int_need(total, seqs, heads) > self._ints.nbytes:
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_sm90_qo_tile_indices")

    def _run(self, q: Tensor, paged_kv_cache: Tensor, out: Tensor | None) -> Tensor:
        LOG.runs.append(self.kind)
        if self._shape is None:
            raise AttributeError("plan() must be called before run()")
        heads, kv_heads, head_dim, page_size, window_left, dtypes, *scores = self._shape
        if (q.dtype, paged_kv_cache.dtype) != dtypes:
            raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type {dtypes[0]}")
        if not LOG.replaying and len(q) != self._planned_rows:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._planned_rows})")
        if q.shape[1:] != (heads, head_dim) or q.stride(2) != 1 or paged_kv_cache.stride(4) != 1:
            raise ValueError("q must be [rows, heads, head_dim], and heads contiguous")
        if paged_kv_cache.shape[1:] != (2, page_size, kv_heads, head_dim):
            raise ValueError(f"pages must be [pages, 2, {page_size}, {kv_heads}, {head_dim}]")
        if out is None or out.shape != q.shape or out.dtype != q.dtype:
            raise ValueError("out must have the shape and dtype of q")
        assert int(self._ints[:8].view(torch.int64)[0]) == self._plan_id, "the kernels found another wrapper's plan"
        lists = (part.tolist() for part in (self._rows, self._starts, self._last))
        _attend(q, paged_kv_cache, out, *lists, self._pages, window_left, *scores)
        return out


def _attend(q, kv, out, rows, starts, last, pages, window_left, sm_scale, soft_cap):
    """Writes the rows of every sequence, as the kernels do, and no others."""
    group = q.shape[1] // kv.shape[3]
    for i in range(len(last)):
        if rows[i] == rows[i + 1]:
            continue
        context = (starts[i + 1] - starts[i] - 1) * kv.shape[2] + last[i]
        found = kv[pages[starts[i] : starts[i + 1]].long()]
        key, value = found.transpose(0, 1).flatten(1, 2)[:, :context].float().repeat_interleave(group, dim=2)
        own = q[rows[i] : rows[i + 1]].float()
        position = torch.arange(context - len(own), context)[:, None]
        token = torch.arange(context)
        seen = token <= position
        if window_left >= 0:
            seen &= token >= position - window_left
        scores = torch.einsum("qhd,khd->hqk", own, key) * sm_scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        out[rows[i] : rows[i + 1]] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(out.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    kind = "decode"

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        assert use_tensor_cores and backend == "fa2" and jit_args is None
        rows = torch.zeros(len(paged_kv_indptr_buffer), dtype=torch.int32) if use_cuda_graph else None
        buffers = rows, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        pages = rows, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size
        dtypes = q_data_type, kv_data_type or q_data_type
        self._plan(*pages, window_left, dtypes, sm_scale or head_dim**-0.5, logits_soft_cap)

    def run(self, q, paged_kv_cache, *, out=None):
        return self._run(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    kind = "prefill"

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        assert (custom_mask_buf, mask_indptr_buf, backend, jit_args) == (None, None, "auto", None)
        if use_cuda_graph and len(qo_indptr_buf) != len(paged_kv_indptr_buf):
            raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")
        buffers = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert causal, "rows would see the tokens after them"
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads
        dtypes = q_data_type, kv_data_type or q_data_type
        scale = sm_scale or head_dim_qk**-0.5
        self._plan(qo_indptr, *pages, head_dim_qk, page_size, window_left, dtypes, scale, logits_soft_cap)

    def run(self, q, paged_kv_cache, *, out=None):
        return self._run(q, paged_kv_cache, out)
