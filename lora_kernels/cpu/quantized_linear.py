"""A linear layer of quantised weights on a CPU, and the embedding that shares its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_kernels.cpu.formats import FORMATS
from lora_kernels.cpu.numba_activations import CodeBlock, code_kernel
from lora_kernels.cpu.numba_quantized_gemm import QuantizedBlock, code_bits, product_kernel
from lora_kernels.cpu.numba_quantized_rows import RowsBlock, rows_kernel
from lora_kernels.cpu.openmp import team
from lora_kernels.cpu.quantized_panels import PANEL, PanelForm, pack
from lora_kernels.quantized import QuantizedWeight

CODED_NUMBERS = 4096
"""Activations that a thread codes at a time: less would cost more to share out than to compute."""


class Panels:
    """A quantised weight [out_features, in_features], packed."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.coding, (self.features, self.width) = weight.coding, weight.shape
        self.memory = pack(weight)
        self.order = weight.order


class QuantizedEmbedding:
    """Looks up rows of a quantised weight, which may be that of the head, in panels.

    Args:
        panels: the weight, [vocab_size, hidden_size], whose `order` must be None.
        dtype: dtype of the rows.
    """

    def __init__(self, panels: Panels, dtype: torch.dtype) -> None:
        self._panels, self._dtype, self._team = panels, dtype, team()
        self._kernel = rows_kernel(panels.coding)
        self._block = RowsBlock(
            w=panels.memory.data_ptr(),
            panel_bytes=panels.memory.shape[1],
            blocks=panels.width // PanelForm(panels.coding, code_bits=0).block,
            out_row=4 * panels.width,
        )

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the rows [num_rows, hidden_size] that `token_ids` (integers [num_rows]) name: in `out`, if it is
        given."""
        numbers = token_ids.to(torch.int64).contiguous()
        rows = torch.empty(len(numbers), self._panels.width)
        block = self._block
        block.rows, block.numbers, block.out = len(rows), numbers.data_ptr(), rows.data_ptr()
        self._team.run(self._kernel, block, len(rows))
        return rows.to(self._dtype) if out is None else out.copy_(rows)


class QuantizedLinear:
    """A linear layer of quantised pieces, one below the other: [num_rows, in_features] in `dtype` (fp32, bf16 or fp16)
    -> [num_rows, out_features], in `out_dtype` if that is given and `code_bits` is not 0."""

    def __init__(
        self,
        weights: Sequence[QuantizedWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype, self._team, self._width = dtype, team(), weights[0].shape[1]
        self._features = sum(weight.shape[0] for weight in weights)
        forms = [PanelForm(weight.coding, code_bits(dtype, weight.coding.bits)) for weight in weights]
        self._out_dtype = (out_dtype or dtype) if all(form.code_bits for form in forms) else dtype
        bias = torch.zeros(self._features) if bias is None else bias
        self.panels = [Panels(weight) for weight in weights]
        self._parts: list[_Part] = []
        start = 0
        for panels, form in zip(self.panels, forms, strict=True):
            self._parts.append(_Part(panels, form, bias, start, dtype, self._out_dtype))
            start += panels.features

    @property
    def nbytes(self) -> int:
        return sum(panels.memory.nbytes for panels in self.panels)

    @property
    def reorders(self) -> bool:
        """Return whether torch first reorders the columns of inputs for `QuantizedWeight.order` (GPTQ's act-order), so
        that a tape cannot record the layer."""
        return any(panels.order is not None for panels in self.panels)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output, a new tensor. Raises ValueError unless `x` is [num_rows, in_features] in `dtype`."""
        if x.dtype != self._dtype or x.shape[1] != self._width:
            expected = f"{self._dtype} [num_rows, {self._width}]"
            raise ValueError(f"a quantised linear of {expected} was given {x.dtype} {list(x.shape)}")
        x, rows = x.contiguous(), x.shape[0]
        out = self._team.empty((rows, self._features), self._out_dtype)
        coded: dict[tuple[int, int, int], Tensor] = {}
        for part in self._parts:
            if part.key not in coded:
                coded[part.key] = part.prepare(x)
            part.multiply(coded[part.key], out)
        return out


class _Part:
    """The part of a linear layer that one piece of its weight computes: the outputs from `start` on. `bias` is that of
    the whole layer, [out_features]."""

    def __init__(
        self, panels: Panels, form: PanelForm, bias: Tensor, start: int, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> None:
        self._panels, self._start, self._team = panels, start, team()
        self._bias = torch.zeros(len(panels.memory) * PANEL)
        self._bias[: panels.features] = bias[start : start + panels.features]
        order = 0 if panels.order is None else id(panels)
        self.key = form.code_bits, form.block if form.code_bits else 0, order
        blocks = panels.width // form.block
        self._product = product_kernel(form, FORMATS[out_dtype])
        self._code = code_kernel(form, FORMATS[dtype]) if form.code_bits else None
        self._block = QuantizedBlock(
            panels=len(panels.memory),
            w=panels.memory.data_ptr(),
            panel_bytes=panels.memory.shape[1],
            blocks=blocks,
            bias=self._bias.data_ptr(),
            features=panels.features,
            out_row=len(bias) * out_dtype.itemsize,
        )
        self._coding = CodeBlock(
            item_rows=max(1, CODED_NUMBERS // panels.width),
            x_row=panels.width * dtype.itemsize,
            blocks=blocks,
            out_row=panels.width * form.code_bits // 8 + 8 * blocks,
        )

    def prepare(self, x: Tensor) -> Tensor:
        """Return the rows of `x` as `multiply` reads them: with columns in the order of the weight's codes and, for
        products in integers, coded. Parts with the same `key` can share the result."""
        if self._panels.order is not None:
            x = x[:, self._panels.order]
        if self._code is None:
            return x
        block = self._coding
        out = self._team.empty((len(x), block.out_row), torch.uint8)
        block.rows, block.x, block.out = len(x), x.data_ptr(), out.data_ptr()
        self._team.run(self._code, block, -(-len(x) // block.item_rows))
        return out

    def multiply(self, x: Tensor, out: Tensor) -> None:
        """Multiply the rows `x`, which `prepare` returned, and write the part's columns of `out`."""
        block = self._block
        block.rows, block.x, block.x_row = len(x), x.data_ptr(), x.stride(0) * x.element_size()
        block.out = out.data_ptr() + self._start * out.element_size()
        self._team.run(self._product, block, block.panels if len(x) else 0)
