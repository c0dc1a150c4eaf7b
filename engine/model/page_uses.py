"""Records which pages each step's kernels use, so that a copy to other pages need not wait for the steps under way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.core.step import PageCopy

PageArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class PageUses:
    """The pages that one step's work in the kernels' order reads or writes. Making it only takes references, because
    few steps are followed by a load of an adapter, before which `used_pages` looks through them.

    Attributes:
        copies: the step's saves and restores of KV.
        arrays: pages in arrays of any shape: the block tables of the step's sequences, and its adapters' pages.
    """

    copies: tuple[PageCopy, ...] = ()
    arrays: Sequence[PageArray] = ()


def used_pages(uses: Iterable[PageUses], num_pages: int) -> npt.NDArray[np.bool_]:
    """Returns, for each of a pool's `num_pages` pages, whether any of the uses includes it."""
    used = np.zeros(num_pages, dtype=np.bool_)
    for use in uses:
        for array in use.arrays:
            used[array] = True
        used[[copy.page for copy in use.copies]] = True
    return used
