"""fp32 linear layers for processors with AVX2 and without AVX-512. The kernel of experts (numba_grouped.py) computes
them as one expert that has all rows: as fast as oneDNN within 10 %, and recordable on a tape."""

from __future__ import annotations

from functools import cache

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_kernels.cpu.formats import F32, FORMATS
from lora_kernels.cpu.huge_pages import zeros
from lora_kernels.cpu.numba_grouped import GroupedArguments, grouped_kernel
from lora_kernels.cpu.numba_tiles import pack_panels, panel_dtype
from lora_kernels.cpu.openmp import team
from lora_kernels.cpu.simd import LANES, has_wide_vectors


class DenseLinear:
    """A linear layer with a packed copy of its weight, fp32 or bf16: fp32 [num_rows, in_features] -> [num_rows,
    out_features]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._features, self._width = weight.shape
        self._weight = zeros(-(-self._features // LANES), self._width, LANES, dtype=panel_dtype(weight))
        pack_panels(weight, self._weight)
        self._bias = None if bias is None else F.pad(bias.float(), (0, len(self._weight) * LANES - self._features))
        self._kernel, self._team = grouped_kernel(F32, FORMATS[self._weight.dtype], F32), team()
        self._block = GroupedArguments(
            experts=1,
            panels=len(self._weight),
            w=self._weight.data_ptr(),
            panel_bytes=self._weight.stride(0) * self._weight.element_size(),
            width=self._width,
            bias=0 if self._bias is None else self._bias.data_ptr(),
            x_row=4 * self._width,
            out_row=4 * self._features,
            features=self._features,
        )

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output, a new tensor. Raises ValueError unless `x` is fp32 [num_rows, in_features]."""
        if x.dtype != torch.float32 or x.shape[1] != self._width:
            raise ValueError(f"a linear of fp32 [num_rows, {self._width}] was given {x.dtype} {list(x.shape)}")
        x = x.contiguous()
        out = self._team.empty((len(x), self._features), torch.float32)
        block = self._block
        block.starts, block.x, block.out = _starts(len(x)).ctypes.data, x.data_ptr(), out.data_ptr()
        self._team.run(self._kernel, block, block.panels if len(x) else 0)
        return out


@cache
def _starts(rows: int) -> npt.NDArray[np.int32]:
    """Return `Routing.starts` of one expert that has all rows, int32 [2]. Cached, because a tape keeps its address."""
    return np.array([0, rows], np.int32)


def computes_fp32() -> bool:
    """Return whether this processor has AVX2 and no AVX-512, for which oneDNN is faster."""
    return "+avx2" in numba.core.codegen.get_host_cpu_features() and not has_wide_vectors()
