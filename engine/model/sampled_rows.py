"""Uploads what a step's rows are sampled with, in one copy to a block of memory at a fixed address:

    slots | lines | masks

The masks come last, with room for one in every row; a step fills and uploads only those that it has.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from engine.model.masks import TokenMasks, num_words
from lora_kernels.gpu.triton_sampling import SampledRows
from lora_kernels.pinned import HostBlock

ALIGN = 4
"""Slots and lines have room for a multiple of this many int32, which are 16 bytes."""
EVERY_TOKEN = -1
"""Line of a row that allows every token."""


class RowUploads:
    """The block on the device, and two on the host: one is filled while the other is copied. They are pinned if the
    device is a GPU, and no memory is allocated after construction.

    Args:
        max_rows: largest number of rows that are sampled in one step.
        vocab_size: tokens of a row.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._room, self._words = -(-max_rows // ALIGN) * ALIGN, num_words(vocab_size)
        size = self._room * (2 + self._words)
        self._block = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = cycle((HostBlock(size, device), HostBlock(size, device)))

    def upload(self, slots: npt.NDArray[np.int32], masks: TokenMasks | None) -> SampledRows:
        """Starts to copy the rows' slots (int32 [num_rows]) and masks (None: every row allows every token). Does not
        wait for a GPU, on which the result is valid for kernels that are launched before the next upload."""
        rows, room, host = len(slots), self._room, next(self._hosts)
        host.wait()
        numbers, used = host.numbers.numpy(), 2 * room
        numbers[:rows] = slots
        lines = numbers[room : room + rows]
        lines[:] = EVERY_TOKEN
        if masks is not None:
            lines[list(masks.rows)] = np.arange(len(masks.rows))
            used += masks.words.size
            numbers[2 * room : used] = masks.words.ravel()
        host.send(self._block, used)
        by_line = self._block[2 * room :].view(room, self._words)
        return SampledRows(self._block[:rows], self._block[room : room + rows], by_line)
