"""Replaces rows of the embedding and of the head for adapters that have trained the rows of some tokens. The host knows
which rows have such adapters, and the device finds the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_kernels.layout import LoraTable
from lora_kernels.pinned import upload
from lora_kernels.segments import SegmentPlan
from lora_kernels.token_rows import TokenTable

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The rows of a step whose adapters have trained tokens: for each of these adapters its batch rows (int64,
    ascending) and its table. `arena` is flat, [num_elements]."""

    arena: Tensor
    segments: tuple[tuple[Longs, TokenTable], ...]

    def embed(self, x: Tensor, token_ids: Tensor, scale: float = 1.0) -> None:
        """Replace the embedded rows of trained tokens in place.

        Args:
            x: [num_rows, hidden_size].
            token_ids: integers [num_rows].
            scale: factor of every embedded row.
        """
        for rows, table in self.segments:
            if not len(table.embedding.ids):
                continue
            chosen = upload(rows, x.device)
            ids = token_ids.index_select(0, chosen).long()
            place = torch.searchsorted(table.embedding.ids, ids).clamp_(max=len(table.embedding.ids) - 1)
            is_trained = table.embedding.ids.index_select(0, place) == ids
            trained = self._rows(table.embedding.starts.index_select(0, place), x.shape[1]).to(x.dtype)
            trained = trained if scale == 1.0 else trained * torch.tensor(scale, dtype=x.dtype).item()
            x.index_copy_(0, chosen, torch.where(is_trained[:, None], trained, x.index_select(0, chosen)))

    def adjust(self, outputs: Tensor, hidden: Tensor, rows: Longs | None) -> None:
        """Replace the head's outputs [num_samples, vocab_size] for trained tokens in place, from `hidden` [num_samples,
        hidden_size], which the head has read. `rows` are the batch rows of the samples, None if the same."""
        # Each row is multiplied alone, so that its outputs are bitwise the same whatever its batch mates.
        sampled = np.arange(len(outputs)) if rows is None else rows
        for lora_rows, table in self.segments:
            places = np.flatnonzero(np.isin(sampled, lora_rows))
            if len(table.head.ids) and len(places):
                head = self._rows(table.head.starts, hidden.shape[1]).float()
                for place in places.tolist():
                    outputs[place].index_copy_(0, table.head.ids, (head @ hidden[place].float()).to(outputs.dtype))

    def _rows(self, starts: Tensor, width: int) -> Tensor:
        """Return the rows of `width` elements that start at these elements of the arena, [len(starts), width]."""
        return self.arena.as_strided((self.arena.numel() - width + 1, width), (1, 1)).index_select(0, starts)


def prepare_tokens(arena: Tensor, table: LoraTable, plan: SegmentPlan) -> TrainedTokens | None:
    """Return the trained tokens of one step, or None if no adapter of the step has any."""
    if not table.replaces_tokens(plan):
        return None
    return TrainedTokens(
        arena,
        tuple(
            (np.sort(plan.rows[plan.starts[index] : plan.starts[index + 1]]).astype(np.int64), table.tokens[slot])
            for index, slot in enumerate(plan.adapter_slots.tolist())
            if slot in table.tokens
        ),
    )
