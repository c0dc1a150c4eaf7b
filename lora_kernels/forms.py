"""The forms of linear layers and embeddings, as two tables: `FORMS` and `EMBEDDING_FORMS`. The first row that fits a
weight is its form, for the engine that plans memory and for the layer that is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_kernels.fp8 import Fp8Coding
from lora_kernels.quantized import AnyCoding, Coding, QuantizedWeight, Weight, dense

if TYPE_CHECKING:
    from lora_kernels.gpu.quantized_linear import DeviceLinear

Linear = Callable[[Tensor], Tensor]
"""Maps [num_rows, in_features] to [num_rows, out_features]. The result is a new tensor, which the caller may modify."""


class Embedding(Protocol):
    """Looks up the rows, [num_rows, hidden_size], of token ids, integers [num_rows]. Returns them in `out` if it is
    given, else in a new tensor."""

    def __call__(self, token_ids: Tensor, out: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """What decides the form of a weight. The engine knows all but the last two before it reads the weight."""

    coding: AnyCoding | None
    """How the weight is quantised. None means that it is a tensor."""
    device: torch.device
    dtype: torch.dtype
    """The dtype of inputs and outputs."""
    is_bf16: bool = False
    """True if all numbers of a tensor are bf16's."""
    has_order: bool = False
    """True if the columns of the weight are in another order than the inputs (`QuantizedWeight.order`)."""
    width: int = 2
    """Number of inputs, which is even in every model."""

    @classmethod
    def of(cls, weight: Weight, dtype: torch.dtype | None) -> Stored:
        """Describe a weight for inputs in `dtype`. None means the dtype of a tensor; for a quantised weight, fp32 on a
        CPU and bf16 on a GPU."""
        if isinstance(weight, Tensor):
            is_bf16 = weight.dtype == torch.bfloat16
            return cls(None, weight.device, dtype or weight.dtype, is_bf16, width=weight.shape[1])
        usual = torch.float32 if weight.device.type == "cpu" else torch.bfloat16
        has_order = isinstance(weight, QuantizedWeight) and weight.order is not None
        return cls(weight.coding, weight.device, dtype or usual, has_order=has_order, width=weight.shape[1])


@dataclass(frozen=True, slots=True)
class LinearParts:
    """What a linear layer is made of."""

    pieces: Sequence[Weight]
    """The weight in pieces, which lie one below the other. A tensor is one piece."""
    bias: Tensor | None
    """[out_features]."""
    dtype: torch.dtype
    """The dtype of inputs and outputs."""
    out_dtype: torch.dtype | None
    """The dtype of outputs where the kernel can give it. None means `dtype`."""

    @property
    def tensor(self) -> Tensor:
        """The weight as one tensor in the dtype of inputs."""
        return dense(self.pieces[0], self.dtype)


MakeLinear = Callable[[LinearParts], Linear]
MakeEmbedding = Callable[[Weight, Linear | None, torch.dtype], Embedding]
"""Makes an embedding of a weight, with rows in a dtype. It has the memory of a head that is tied to it, if one is given
and both are quantised."""
Make = TypeVar("Make", MakeLinear, MakeEmbedding)


@dataclass(frozen=True, slots=True)
class Form(Generic[Make]):
    """A row of a table of forms."""

    name: str
    """The numbers that are kept, and where."""
    fits: Callable[[Stored], bool]
    """Says whether a weight can be kept so."""
    bits: Callable[[Stored], float | None]
    """Bits of memory that each number of the weight takes, without padding. None means that the layer computes with the
    tensor itself and takes no memory of its own."""
    make: Make
    takes_others: bool = False
    """True if a layer of several pieces may have pieces of other forms beside those of this one."""


def choose(forms: Sequence[Form[Make]], stored: Stored) -> Form[Make] | None:
    """Return the first form that fits a weight. None means that the weight is dequantised: a tensor always has one."""
    return next((form for form in forms if form.fits(stored)), None)


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch can multiply in FP8 on a device with results in `dtype`: on GPUs of compute capability 8.9
    and up, in bf16."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 9)


# What rows fit. The modules of a device are imported late: a machine without CUDA may have no triton, and the
# measurements on GPUs hide numba (benchmarks/gpu/lean.py).


def _has_fp8_on_gpu(stored: Stored) -> bool:
    return isinstance(stored.coding, Fp8Coding) and multiplies_fp8(stored.device, stored.dtype)


def _has_codes_on_gpu(stored: Stored) -> bool:
    if stored.device.type != "cuda" or stored.dtype not in (torch.bfloat16, torch.float16):
        return False
    return isinstance(stored.coding, Coding) and _device_bits(stored) is not None


def _has_codes_on_cpu(stored: Stored) -> bool:
    return isinstance(stored.coding, Coding) and stored.device.type == "cpu" and has_numba()


def _is_in_order(fits: Callable[[Stored], bool], stored: Stored) -> bool:
    return fits(stored) and not stored.has_order


def _is_tensor(stored: Stored) -> bool:
    return stored.coding is None


def _is_on_cpu(stored: Stored) -> bool:
    return stored.coding is None and stored.device.type == "cpu"


def _becomes_bf16_panels(stored: Stored) -> bool:
    if not (_is_on_cpu(stored) and has_numba()):
        return False
    from lora_kernels.cpu.numba_gemm import can_pack

    return can_pack(torch.empty(0, stored.width, dtype=stored.dtype))


def _becomes_fp32_panels(stored: Stored) -> bool:
    if not (_is_on_cpu(stored) and stored.dtype == torch.float32 and has_numba()):
        return False
    from lora_kernels.cpu.numba_dense import computes_fp32

    return computes_fp32()


def _suits_onednn(stored: Stored) -> bool:
    has_layout = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    if not (_is_on_cpu(stored) and has_layout):
        return False
    is_bf16 = stored.dtype == torch.bfloat16
    return stored.dtype == torch.float32 or (is_bf16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _stays_bf16(stored: Stored) -> bool:
    return _is_on_cpu(stored) and stored.is_bf16 and stored.dtype != torch.bfloat16


def has_numba() -> bool:
    """Return whether the kernels of a CPU can be imported."""
    return find_spec("numba") is not None


# What numbers take.


def _coding_bits(stored: Stored) -> float | None:
    return stored.coding.bits_per_weight if stored.coding else None


def _device_bits(stored: Stored) -> float | None:
    from lora_kernels.gpu.quantized_weights import stored_bits

    return stored_bits(stored.coding) if isinstance(stored.coding, Coding) else None


def _dtype_bits(stored: Stored) -> float:
    return 8 * stored.dtype.itemsize


# How layers are made.


def _make_device_linear(parts: LinearParts) -> Linear:
    from lora_kernels.gpu.quantized_linear import DeviceLinear

    return DeviceLinear(parts.pieces, parts.bias, parts.dtype)


def _make_quantized_linear(parts: LinearParts) -> Linear:
    from lora_kernels.cpu.quantized_linear import QuantizedLinear

    pieces = [piece for piece in parts.pieces if isinstance(piece, QuantizedWeight)]
    return QuantizedLinear(pieces, parts.bias, parts.dtype, parts.out_dtype)


def _make_bf16_panels(parts: LinearParts) -> Linear:
    from lora_kernels.cpu.numba_gemm import PackedLinear

    return PackedLinear(parts.tensor, parts.bias, parts.out_dtype or parts.dtype)


def _make_fp32_panels(parts: LinearParts) -> Linear:
    """Pack a bf16 weight as it is. An fp32 copy would take twice the weight's memory, and would have to be compared
    with bf16 before it is packed as bf16 again."""
    from lora_kernels.cpu.numba_dense import DenseLinear

    weight = dense(parts.pieces[0])
    return DenseLinear(weight if weight.dtype == torch.bfloat16 else parts.tensor, parts.bias)


def _make_onednn_linear(parts: LinearParts) -> Linear:
    packed, bias = torch.ops.mkldnn._reorder_linear_weight(parts.tensor.contiguous(), None), parts.bias
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _make_linear_of_copy(parts: LinearParts) -> Linear:
    """Copy the tensor, which on a CPU may be mapped from the checkpoint's file."""
    return partial(F.linear, weight=parts.tensor.clone(), bias=parts.bias)


def _make_linear_of_tensor(parts: LinearParts) -> Linear:
    return partial(F.linear, weight=parts.tensor, bias=parts.bias)


def _make_device_embedding(weight: Weight, head: Linear | None, dtype: torch.dtype) -> Embedding:
    from lora_kernels.gpu.quantized_linear import make_device_embedding

    return make_device_embedding(cast("QuantizedWeight", weight), cast("DeviceLinear | None", head), dtype)


def _make_quantized_embedding(weight: Weight, head: Linear | None, dtype: torch.dtype) -> Embedding:
    from lora_kernels.cpu.quantized_linear import Panels, QuantizedEmbedding, QuantizedLinear

    panels = head.panels[0] if isinstance(head, QuantizedLinear) else Panels(cast("QuantizedWeight", weight))
    return QuantizedEmbedding(panels, dtype)


def _make_bf16_embedding(weight: Weight, head: Linear | None, dtype: torch.dtype) -> Embedding:
    return partial(_converted_rows, dense(weight).clone(), dtype)


def _converted_rows(rows: Tensor, dtype: torch.dtype, token_ids: Tensor, out: Tensor | None = None) -> Tensor:
    found = torch.index_select(rows, 0, token_ids)
    return found.to(dtype) if out is None else out.copy_(found)


def _make_embedding(weight: Weight, head: Linear | None, dtype: torch.dtype) -> Embedding:
    rows = dense(weight, dtype)
    return lambda token_ids, out=None: torch.index_select(rows, 0, token_ids, out=out)


FORMS: tuple[Form[MakeLinear], ...] = (
    Form("FP8 on a GPU", _has_fp8_on_gpu, _coding_bits, _make_device_linear, takes_others=True),
    Form("codes on a GPU", _has_codes_on_gpu, _device_bits, _make_device_linear, takes_others=True),
    Form("codes on a CPU", _has_codes_on_cpu, _coding_bits, _make_quantized_linear),
    Form("panels in bf16", _becomes_bf16_panels, _dtype_bits, _make_bf16_panels),
    Form("panels for fp32", _becomes_fp32_panels, lambda stored: 16 if stored.is_bf16 else 32, _make_fp32_panels),
    Form("oneDNN's layout", _suits_onednn, _dtype_bits, _make_onednn_linear),
    Form("a copy on a CPU", _is_on_cpu, _dtype_bits, _make_linear_of_copy),
    Form("the tensor itself", _is_tensor, lambda stored: None, _make_linear_of_tensor),
)
"""The forms of linear layers."""
EMBEDDING_FORMS: tuple[Form[MakeEmbedding], ...] = (
    Form("codes on a GPU", partial(_is_in_order, _has_codes_on_gpu), _device_bits, _make_device_embedding),
    Form("codes on a CPU", partial(_is_in_order, _has_codes_on_cpu), _coding_bits, _make_quantized_embedding),
    Form("bf16 on a CPU", _stays_bf16, lambda stored: 16, _make_bf16_embedding),
    Form("the tensor", _is_tensor, _dtype_bits, _make_embedding),
)
"""The forms of embeddings."""
