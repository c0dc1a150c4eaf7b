"""The operations in which the ranks of one model take part. Ranks of a stage exchange sums; between stages, and from
the last to the first, rows go to the rank of the same number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import EngineConfig

if TYPE_CHECKING:
    from torch.distributed import Store

COLLECTIVE_S = 300.0
"""Seconds after which a collective fails that another rank has not joined. It covers differences in how long ranks take
to start. A rank whose process has ended closes its connections, which the others notice at once."""


class StageLink:
    """A connection from a rank of one stage to one of the next, through which rows pass in the order in which they are
    sent. `group` is a process group of the two, the sender first."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sent: list[tuple[Tensor, Any]] = []

    def send(self, rows: Tensor) -> None:
        """Start to send a tensor to the next stage. The caller must not change it before `finish`."""
        self._sent.append((rows, self._group.send([rows], 1, 0)))

    def receive(self, rows: Tensor) -> None:
        """Receive into `rows` the next tensor that the stage before has sent, which has the same shape."""
        self._group.recv([rows], 0, 0).wait()

    def finish(self) -> None:
        """Wait until all tensors have been sent to the next stage."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage's place among the stages of a pipeline, which pass rows on in a ring."""

    number: int
    count: int
    """`number` and `count`: number of the stage, from 0, and of all stages."""
    everyone: Any
    """Process group of all ranks of all stages."""
    before: StageLink
    after: StageLink
    """`before` and `after`: links from the stage before and to the stage after; the first stage comes after the last
    one."""


class Ranks:
    """This rank's place among the ranks of one engine, and the operations in which the ranks of its stage take part, in
    the same order. With one rank, each operation returns its input."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: Any = None,
        device: torch.device | None = None,
        stage: Stage | None = None,
    ) -> None:
        """`group` is a process group of torch.distributed, of the stage's ranks; None is for one rank. `device` is
        where tensors lie."""
        self.rank = rank
        """Number of this rank in its stage, from 0."""
        self.size = size
        """Number of ranks of each stage."""
        self.stage = stage
        """The rank's stage in a pipeline. None means that every rank has all layers."""
        self._group = group
        self._device = device or torch.device("cpu")

    @property
    def number(self) -> int:
        """Number of this rank among all ranks of all stages."""
        return self.rank + (self.stage.number * self.size if self.stage else 0)

    @property
    def count(self) -> int:
        """Number of all ranks of all stages."""
        return self.size * (self.stage.count if self.stage else 1)

    def sum(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of all ranks' tensors [num_rows, width], computed in fp32 and rounded to `dtype`."""
        # On a CPU the parts are gathered and added in the order of ranks: gloo's all-reduce takes 1.5 ms in place of
        # 1.0, and a row's sum would depend on the batch. On a GPU one all-reduce may be captured in a CUDA graph.
        if self.size == 1:
            return part
        if part.is_cuda:
            total = part.float()
            self._group.allreduce([total]).wait()
            return total.to(dtype)
        parts = self._gather(part)
        total = parts[0].float()
        for other in parts[1:]:
            total += other
        return total.to(dtype)

    def join_columns(self, part: Tensor, width: int) -> Tensor:
        """Return all ranks' columns side by side, cut to [num_rows, width]. `part` is [num_rows, columns]; every rank
        has ceil(width / size) columns, and the last may have fewer."""
        if self.size == 1:
            return part
        each = -(-width // self.size)
        parts = self._gather(F.pad(part, (0, each - part.shape[1])))
        return parts.transpose(0, 1).flatten(1)[:, :width].contiguous()

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise minimum of the `values` with which the ranks of all stages call this, for example of
        sizes that all ranks must agree on."""
        if self.count == 1:
            return list(values)
        everyone = self.stage.everyone if self.stage else self._group
        return _gather(everyone, self.count, torch.tensor(values, device=self._device)).amin(0).tolist()

    def share(self, tensor: Tensor) -> None:
        """Broadcast the tensor of the stage's rank 0: overwrite the tensors of the stage's other ranks by it."""
        if self.size > 1:
            self._group.broadcast([tensor], 0).wait()

    def _gather(self, part: Tensor) -> Tensor:
        return _gather(self._group, self.size, part)


ALONE = Ranks()
"""The `Ranks` of an engine with one rank, where each operation returns its input."""


def join_ranks(store: Store, number: int, config: EngineConfig, device: torch.device) -> Ranks:
    """Return the `Ranks` of rank `number` once all ranks of the configuration have called this with the same `store`:
    connected through NCCL on GPUs, else through gloo on the loopback interface."""
    size, stages = config.tensor_parallel, config.pipeline_parallel
    stage, rank = divmod(number, size)
    everyone = _connect(store, "all", number, size * stages, device)
    if stages == 1:
        return Ranks(rank, size, everyone, device)
    group = _connect(store, f"stage {stage}", rank, size, device) if size > 1 else None
    # A group of its own for each link: NCCL keeps the order of operations in a group, and sends must not wait for
    # results that are to be received.
    links: dict[bool, StageLink] = {}
    for sender in range(stages):
        ends = (sender, (sender + 1) % stages)
        if stage in ends:
            is_sender = stage == sender
            links[is_sender] = StageLink(_connect(store, f"link {sender} {rank}", ends.index(stage), 2, device))
    return Ranks(rank, size, group, device, Stage(stage, stages, everyone, links[False], links[True]))


def _connect(store: Store, name: str, rank: int, size: int, device: torch.device) -> Any:
    """Return a process group of torch.distributed, once all its ranks have called this with its name."""
    import torch.distributed as dist

    store, timeout = dist.PrefixStore(name, store), timedelta(seconds=COLLECTIVE_S)
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]  # torch for a CPU has none
        return nccl(store, rank, size, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, size, options)


def _gather(group: Any, size: int, part: Tensor) -> Tensor:
    """Return the tensors of a group's ranks, which have one shape, [size, *part.shape]."""
    parts = part.new_empty(size * part.numel())
    group._allgather_base(parts, part.contiguous().view(-1)).wait()
    return parts.view(size, *part.shape)


def threads_of_rank(threads: int, size: int) -> int:
    """Return how many of an engine's CPU threads each of the `size` ranks of a stage uses. Stages share them, because
    they compute in turn, except with micro-batches."""
    # Two stages on two cores, each with all or half of the threads: 8 decodes take 44 or 52 ms.
    return max(1, threads // size)
