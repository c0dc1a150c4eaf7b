"""Section C: LoRA kernels of vLLM and SGLang (Triton), from their wheels, compared with ours on the same work.

Each peer gets its own input format: vLLM gets adapters padded to the largest rank and its count of active adapters,
SGLang gets real ranks and segments of 16 rows. Peers' environment variables have an effect as in their servers: without
any, vLLM's kernels run without programmatic dependent launch, which VLLM_LORA_ENABLE_DUAL_STREAM=1 would add.

Everything runs inside CUDA graphs over memory that no cache holds. The preparation once per step is timed separately
and counted for steps of 32 layers. A peer's sums are checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu.exact import relative_error
from benchmarks.gpu.journal import Journal, Value
from benchmarks.gpu.kernels_lora import COLD_BYTES, MIXED, LoraWork, cold_bank, decode_work, our_calls, prepare_anew
from benchmarks.gpu.ours import our_backend
from benchmarks.gpu.peer_modules import SGLANG, VLLM, PeerAbsent, find_module, load_kernel_module
from benchmarks.gpu.shapes import adapter_elements, groups_of, model_spec, row_adapter_slots, with_layers
from benchmarks.gpu.timing import Call, time_calls, time_host
from engine.model.spec.config import ModelSpec
from lora_kernels.layout import ProjectionGroup

LEAST_S = 6.0
SEGMENT = 16
"""Maximum number of rows in each of SGLang's segments."""
WORKS = (
    decode_work(64, 64, MIXED),
    decode_work(64, 64, (16,)),
    decode_work(64, 8, MIXED),
    decode_work(64, 1, (16,)),
    decode_work(2048, 8, MIXED),
)
TINY_WORKS = (LoraWork("3 rows", (2, 1), (16, 3)),)


@dataclass(frozen=True)
class PaddedWeights:
    """Adapter weights of one layer's projection group in the peers' layout; zero beyond an adapter's rank.

    Attributes:
        a: For each target, [num_adapters, max_rank, in_features].
        b: For each target, [num_adapters, out_features, max_rank].
    """

    group: ProjectionGroup
    ranks: tuple[int, ...]
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]


def padded_weights(
    group: ProjectionGroup, ranks: Sequence[int], dtype: torch.dtype, device: torch.device
) -> PaddedWeights:
    most, beyond = max(ranks), torch.arange(max(ranks)) >= torch.tensor(ranks)[:, None]

    def draw(rows: int, columns: int) -> Tensor:
        return torch.empty(len(ranks), rows, columns, dtype=dtype, device=device).normal_(0, 0.1)

    a = tuple(draw(most, group.in_features).masked_fill_(beyond.to(device)[:, :, None], 0) for _ in group.targets)
    b = tuple(draw(width, most).masked_fill_(beyond.to(device)[:, None, :], 0) for width in group.out_features)
    return PaddedWeights(group, tuple(ranks), a, b)


class Peer(Protocol):
    def prepare(self) -> object:
        """Prepare and upload a step's metadata, as the peer does once per step."""

    def call(self, weights: PaddedWeights, x: Tensor, out: Tensor) -> Call:
        """Return a call that adds a group's LoRA deltas for `x` to `out` [num_rows, sum of out_features]."""


class Vllm:
    """The `Peer` of vLLM's kernels in vllm.lora.ops.triton_ops. Raises PeerAbsent without its wheel."""

    def __init__(self, work: LoraWork, device: torch.device) -> None:
        folder = "vllm.lora.ops.triton_ops"
        self._shrink = load_kernel_module(f"{folder}.lora_shrink_op", VLLM)._lora_shrink
        self._expand = load_kernel_module(f"{folder}.lora_expand_op", VLLM)._lora_expand
        tables = load_kernel_module(f"{folder}.utils", VLLM)
        for cache in (tables._LORA_A_PTR_DICT, tables._LORA_B_PTR_DICT):
            cache.clear()  # keyed by address, which may have belonged to another case's weights
        metadata = load_kernel_module(f"{folder}.lora_kernel_metadata", VLLM).LoRAKernelMeta
        self._slots = torch.from_numpy(row_adapter_slots(work.lengths)).to(device)
        self._meta = metadata.make(len(work.ranks), work.rows, device)
        self.prepare()

    def prepare(self) -> None:
        """Update vLLM's metadata on the device from the adapter slots of the step's rows."""
        self._meta.prepare_tensors(self._slots)

    def call(self, weights: PaddedWeights, x: Tensor, out: Tensor) -> Call:
        """Return a call that adds a group's deltas for the rows `x` to `out` by vLLM's shrink and expand kernels."""
        rows, most = len(x), max(weights.ranks)
        shrunk = torch.empty(len(weights.a), rows, most, dtype=torch.float32, device=x.device)
        meta = self._meta.meta_args(rows, True)

        def add() -> None:
            self._shrink(x, list(weights.a), shrunk, *meta, 1.0)
            self._expand(shrunk, list(weights.b), out, *meta, offset_start=0, add_inputs=True)

        return add


class Sglang:
    """The `Peer` of SGLang's chunked SGMV kernels. Raises PeerAbsent without its wheel."""

    def __init__(self, work: LoraWork, device: torch.device) -> None:
        names = [find_module("sglang", f"chunked_sgmv_{side}.py") for side in ("shrink", "expand")]
        self._shrink = load_kernel_module(names[0], SGLANG).chunked_sgmv_lora_shrink_forward
        self._expand = load_kernel_module(names[1], SGLANG).chunked_sgmv_lora_expand_forward
        self._work, self._device = work, device
        self._info: Any = self.prepare()

    def prepare(self) -> object:
        """Build the step's segment metadata on the host, a tensor each as in SGLang's backend, and return it on the
        device."""
        starts, owners = [0], []
        for adapter_slot, rows in enumerate(self._work.lengths):
            for first in range(0, rows, SEGMENT):
                owners.append(adapter_slot)
                starts.append(starts[-1] + min(SEGMENT, rows - first))

        def put(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

        return SimpleNamespace(
            use_cuda_graph=False,
            bs=len(owners),
            num_segments=len(owners),
            seg_indptr=put(starts, torch.int32),
            weight_indices=put(owners, torch.int32),
            lora_ranks=put(self._work.ranks, torch.int32),
            scalings=put([1.0] * len(self._work.ranks), torch.float32),
            max_len=SEGMENT,
            seg_lens=None,
            permutation=put(range(self._work.rows), torch.int32),
        )

    def call(self, weights: PaddedWeights, x: Tensor, out: Tensor) -> Call:
        """Return a call that adds a group's deltas for the rows `x` to `out` by SGLang's shrink and expand kernels. The
        expand kernel gets the targets' offsets from the host, too, as from SGLang's layers: no program is idle then."""
        a, b = self._stack_a(weights), torch.cat(weights.b, dim=1).contiguous()
        widths, slices = weights.group.out_features, len(weights.a)
        host_offsets = torch.tensor([0, *widths]).cumsum(0, dtype=torch.int32)
        offsets = host_offsets.to(x.device)

        def add() -> None:
            shrunk = self._shrink(x, a, self._info, slices)
            self._expand(shrunk, b, self._info, offsets, max(widths), out, host_offsets)

        return add

    def _stack_a(self, weights: PaddedWeights) -> Tensor:
        """Return A as [num_adapters, targets * max_rank, in_features]: `rank` rows for each target, then zeros."""
        most, slices = max(weights.ranks), len(weights.a)
        stacked = torch.zeros_like(weights.a[0]).repeat(1, slices, 1)
        for adapter_slot, rank in enumerate(weights.ranks):
            for index, part in enumerate(weights.a):
                stacked[adapter_slot, index * rank : (index + 1) * rank] = part[adapter_slot, :rank]
        assert stacked.shape[1] == slices * most
        return stacked.contiguous()


PEERS: dict[str, Callable[[LoraWork, torch.device], Peer]] = {"vLLM": Vllm, "SGLang": Sglang}


def run(journal: Journal) -> None:
    device, spec = torch.device(journal.device), model_spec(journal.tiny)
    for name, kind in PEERS.items():
        try:
            kind(TINY_WORKS[0], device)
        except PeerAbsent as absent:
            journal.note(f"left out, LoRA: {absent}")
            continue
        for work in TINY_WORKS if journal.tiny else WORKS:
            with journal.case(f"{name}: {work.name}", LEAST_S):
                journal.row("LoRA beside peers", f"{work.name}, {name}", **compare(kind, work, spec, device))


def compare(
    kind: Callable[[LoraWork, torch.device], Peer], work: LoraWork, spec: ModelSpec, device: torch.device
) -> dict[str, Value]:
    """Check a peer, then time it and ours. Returns the microseconds per layer and of the preparation, theirs and ours,
    how many times faster ours is per layer and per step, and how it was timed."""
    check_peer(kind(work, device), work, spec, device)
    theirs = time_calls(peer_calls(kind(work, device), work, spec, device), device)
    their_prepare = time_host(kind(work, device).prepare, device)
    bank = cold_bank(work, spec, device)
    ours = time_calls(our_calls(our_backend(device), bank, work), device)
    our_prepare = time_host(partial(prepare_anew, our_backend(device), bank, work), device)
    groups = len(groups_of(spec))
    steps = [
        prepare + spec.layers * groups * us for prepare, us in ((their_prepare, theirs.us), (our_prepare, ours.us))
    ]
    return {
        "theirs us a layer": theirs.us * groups,
        "ours us a layer": ours.us * groups,
        "theirs prepare us": their_prepare,
        "ours prepare us": our_prepare,
        "times faster": theirs.us / ours.us,
        "times faster, step": steps[0] / steps[1],
        "timed by": theirs.how if theirs.how == ours.how else f"{theirs.how}, {ours.how}",
    }


def peer_dtype(device: torch.device) -> torch.dtype:
    """Return bf16, or fp16 on a CPU: the peers' kernels refuse fp32, and the interpreter cannot round bf16."""
    return torch.float16 if device.type == "cpu" else torch.bfloat16


def check_peer(peer: Peer, work: LoraWork, spec: ModelSpec, device: torch.device) -> None:
    """Check a peer's deltas against fp32 products: is it called correctly? Raises AssertionError if not."""
    for group in groups_of(spec):
        weights = padded_weights(group, work.ranks, peer_dtype(device), device)
        x, out = peer_tensors(group, work.rows, device)
        peer.call(weights, x, out.zero_())()
        exact = []
        for adapter_slot, rows in enumerate(x.float().split(list(work.lengths))):
            sides = zip(weights.a, weights.b, strict=True)
            exact.append(
                torch.cat([rows @ a[adapter_slot].float().T @ b[adapter_slot].float().T for a, b in sides], dim=1)
            )
        relative_error(out, torch.cat(exact), out.dtype)


def peer_calls(peer: Peer, work: LoraWork, spec: ModelSpec, device: torch.device) -> list[Call]:
    """Return a peer's calls to time: one for each group of so many layers that no cache holds their weights."""
    layer_bytes = max(work.ranks) * len(work.ranks) * adapter_elements(with_layers(spec, 1), 1) * 2
    layers = 1 if device.type == "cpu" else ceil(COLD_BYTES / layer_bytes)
    tensors = {group: peer_tensors(group, work.rows, device) for group in groups_of(spec)}
    return [
        peer.call(padded_weights(group, work.ranks, peer_dtype(device), device), *tensors[group])
        for _ in range(layers)
        for group in groups_of(spec)
    ]


def peer_tensors(group: ProjectionGroup, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random (x, output) of `rows` rows for a group, in `peer_dtype`."""
    like: dict[str, Any] = {"dtype": peer_dtype(device), "device": device}
    x = torch.empty(rows, group.in_features, **like).normal_()
    return x, torch.empty(rows, sum(group.out_features), **like).normal_()
