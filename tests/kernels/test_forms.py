"""What the tables of forms predict of a weight is what the layers of it hold."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lora_kernels import forms
from lora_kernels.cpu import numba_dense
from lora_kernels.forms import EMBEDDING_FORMS, FORMS, LinearParts, Stored, choose
from lora_kernels.fp8 import FP8, Fp8Weight
from lora_kernels.linear import make_embedding, make_linear
from lora_kernels.quantized import INT4, INT8, Coding, QuantizedWeight, quantize

CPU, GPU, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEATURES, WIDTH = 96, 1024
BY_ROWS = Coding(8, 32, 128, by_rows=True)
CODINGS = (INT8, INT4, Coding(5, 32, shared=4), Coding(6, 64, 32), Coding(4, 128, in_scales=True))
CASES = [
    ("FP8 on a GPU", Stored(FP8, GPU, BF16)),
    *(("codes on a GPU", Stored(coding, GPU, BF16)) for coding in (*CODINGS, BY_ROWS)),
    ("codes on a GPU", Stored(INT4, GPU, FP16)),
    *(("codes on a CPU", Stored(coding, CPU, dtype)) for coding in (*CODINGS, BY_ROWS) for dtype in (FP32, BF16)),
    ("panels in bf16", Stored(None, CPU, BF16, is_bf16=True)),
    ("panels for fp32", Stored(None, CPU, FP32, is_bf16=True)),
    ("panels for fp32", Stored(None, CPU, FP32)),
    ("oneDNN's layout", Stored(None, CPU, FP32)),
    ("a copy on a CPU", Stored(None, CPU, FP16)),
    ("the tensor itself", Stored(None, META, BF16, is_bf16=True)),
]
EMBEDDINGS = [
    ("codes on a GPU", Stored(INT4, GPU, BF16)),
    ("codes on a CPU", Stored(INT4, CPU, FP32)),
    ("bf16 on a CPU", Stored(None, CPU, FP32, is_bf16=True)),
    ("the tensor", Stored(None, CPU, BF16, is_bf16=True)),
    ("the tensor", Stored(None, CPU, FP32)),
    ("the tensor", Stored(None, META, FP16)),
]


def weight_of(stored: Stored) -> Tensor | QuantizedWeight | Fp8Weight:
    """Return a weight as `stored` describes it. What a GPU would have lies on the CPU, and computes nothing."""
    device = CPU if stored.device == GPU else stored.device
    weight = torch.randn(FEATURES, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    if stored.coding is None:
        return weight.bfloat16() if stored.is_bf16 else weight.to(stored.dtype)
    if stored.coding == FP8:
        return Fp8Weight(weight.to(torch.float8_e4m3fn), torch.ones(FEATURES))
    if not (stored.coding.shared or stored.coding.in_scales):
        return quantize(weight, stored.coding)
    codes, groups = torch.ones(FEATURES, WIDTH, dtype=torch.uint8), WIDTH // stored.coding.group
    scales = torch.ones(FEATURES, groups, dtype=torch.int8 if stored.coding.shared else FP16)
    units = torch.ones(FEATURES, groups // stored.coding.shared, 2, dtype=FP16) if stored.coding.shared else None
    return QuantizedWeight(stored.coding, codes, scales, scales, units)


def matrices(held: object) -> Iterator[Tensor]:
    """Yield the tensors with two axes or more that an object holds, also in its attributes, lists and tuples."""
    if isinstance(held, Tensor):
        if held.ndim > 1:
            yield held
    elif isinstance(held, list | tuple):
        for one in held:
            yield from matrices(one)
    elif isinstance(held, partial):
        yield from matrices([*held.args, *held.keywords.values()])
    elif closure := getattr(held, "__closure__", None):
        yield from matrices([cell.cell_contents for cell in closure])
    elif type(held).__module__.startswith("lora_kernels."):
        names = [*getattr(held, "__dict__", {}), *getattr(held, "__slots__", ())]
        yield from matrices([getattr(held, name) for name in names])


def held_bits(layer: object, weight: Tensor | QuantizedWeight | Fp8Weight) -> float:
    """Return the bits that a layer holds for each number of a weight, besides the weight itself if it is a tensor."""
    own = {(tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)): tensor for tensor in matrices(layer)}
    if isinstance(weight, Tensor):
        own = {address: tensor for address, tensor in own.items() if tensor is not weight}
    return 8 * sum(tensor.numel() * tensor.element_size() for tensor in own.values()) / (FEATURES * WIDTH)


@pytest.fixture(autouse=True)
def all_rows_fit(monkeypatch, request):
    """Pretend a GPU that multiplies in FP8, and a processor on which the row of the case comes first."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    name = request.node.callspec.params["name"]
    monkeypatch.setattr(numba_dense, "computes_fp32", lambda: name == "panels for fp32")
    if name == "panels in bf16":
        request.getfixturevalue("packed_linears")


@pytest.mark.parametrize(("name", "stored"), CASES)
def test_a_linear_holds_what_was_predicted(name, stored):
    form = choose(FORMS, stored)
    assert form.name == name
    weight = weight_of(stored)
    if stored.device == GPU:
        layer = form.make(LinearParts([weight], None, stored.dtype, None))
    else:
        described = Stored.of(weight, stored.dtype)
        assert choose(FORMS, described) is form, "the weight has the form that was predicted before it was read"
        layer = make_linear(weight, None, stored.dtype)
    assert held_bits(layer, weight) == pytest.approx(form.bits(stored) or 0.0, rel=0.01)


@pytest.mark.parametrize(("name", "stored"), EMBEDDINGS)
def test_an_embedding_holds_what_was_predicted(name, stored):
    form = choose(EMBEDDING_FORMS, stored)
    assert form.name == name
    weight = weight_of(stored)
    if stored.device == GPU:
        layer = form.make(weight, None, stored.dtype)
    else:
        assert choose(EMBEDDING_FORMS, Stored.of(weight, stored.dtype)) is form
        layer = make_embedding(weight, torch.nn.Identity(), stored.dtype, tied=False)
    bits = held_bits(layer, torch.empty(0))
    assert bits == pytest.approx(form.bits(stored), rel=0.01)


@pytest.mark.parametrize("name", ["every row"])
def test_every_row_has_a_case(name):
    assert {name for name, _ in CASES} == {form.name for form in forms.FORMS}
    assert {name for name, _ in EMBEDDINGS} == {form.name for form in forms.EMBEDDING_FORMS}
