"""Packed linears against fp32 products."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lora_kernels.cpu import numba_dense, numba_tiles
from lora_kernels.cpu.huge_pages import PAGE, zeros
from lora_kernels.cpu.numba_dense import DenseLinear
from lora_kernels.cpu.numba_tiles import panel_dtype
from lora_kernels.linear import make_embedding, make_linear, packed_bits

packs = pytest.mark.usefixtures("packed_linears")


def made(features, width, dtype, bias):
    generator = torch.Generator().manual_seed(features)
    weight = torch.randn(features, width, generator=generator).to(dtype) / width**0.5
    offset = torch.randn(features, generator=generator).to(dtype) if bias else None
    return weight, offset, make_linear(weight, offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("features", "width"), [(48, 64), (97, 64), (7, 2), (200, 130), (33, 31)])
@pytest.mark.parametrize("rows", [1, 8, 9, 31])
def test_it_is_rounded_once(features, width, rows, bias, dtype):
    weight, offset, linear = made(features, width, dtype, bias)
    x = torch.randn(rows, width).to(dtype)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    bound = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    assert ((linear(x).double() - exact).abs() <= bound * exact.abs() + 1e-5).all()


@packs
def test_outputs_that_ranks_sum_are_not_rounded():
    weight, offset, _ = made(200, 130, torch.bfloat16, True)
    x, linear = torch.randn(9, 130).to(torch.bfloat16), make_linear(weight, offset, out_dtype=torch.float32)
    exact = x.double() @ weight.double().T + offset.double()
    torch.testing.assert_close(linear(x), exact.float(), rtol=1e-5, atol=1e-5)


@packs
def test_a_row_keeps_its_bits_among_others():
    *_, linear = made(200, 130, torch.bfloat16, True)
    x = torch.randn(40, 130).to(torch.bfloat16)
    among = linear(x)
    for rows in (1, 3, 8, 17):
        assert torch.equal(linear(x[5 : 5 + rows]), among[5 : 5 + rows])


@packs
def test_a_sick_row_harms_no_other_and_a_view_is_read_right():
    weight, _, linear = made(96, 64, torch.bfloat16, False)
    wide = torch.randn(20, 128).to(torch.bfloat16)
    wide[3] = float("nan")
    out = linear(wide[:, 64:])
    healthy = [row for row in range(20) if row != 3]
    torch.testing.assert_close(out[healthy], wide[healthy, 64:] @ weight.T)
    assert out[3].isnan().all()


@packs
def test_a_wrong_input_is_refused():
    *_, linear = made(96, 64, torch.bfloat16, False)
    for wrong in (torch.zeros(2, 63, dtype=torch.bfloat16), torch.zeros(2, 64)):
        with pytest.raises(ValueError, match=r"a linear of bf16 \[num_rows, 64\]"):
            linear(wrong)


@pytest.mark.parametrize(("features", "width"), [(97, 64), (7, 2), (33, 31)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_panels_in_fp32_are_exact_and_a_row_keeps_its_bits(features, width, has_bias):
    weight, offset, _ = made(features, width, torch.float32, has_bias)
    linear, x = DenseLinear(weight, offset), torch.randn(31, 2 * width)[:, width:]
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    among = linear(x)
    torch.testing.assert_close(among, exact.float(), rtol=1e-5, atol=1e-5)
    for rows in (0, 1, 6, 13):
        assert torch.equal(linear(x[5 : 5 + rows]), among[5 : 5 + rows])
    for wrong in (x.bfloat16(), x[:, 1:]):
        with pytest.raises(ValueError, match=rf"a linear of fp32 \[num_rows, {width}\]"):
            linear(wrong)


def test_numbers_of_bf16_are_kept_in_bf16_with_the_same_results(monkeypatch):
    weight, offset, _ = made(97, 64, torch.bfloat16, True)
    weight, offset, x = weight.float(), offset.float(), torch.randn(9, 64)
    half = DenseLinear(weight, offset)
    monkeypatch.setattr(numba_dense, "panel_dtype", lambda weight: weight.dtype)
    whole = DenseLinear(weight, offset)
    assert half.nbytes == whole.nbytes // 2
    assert torch.equal(half(x), whole(x))


def test_bf16_weights_are_packed_as_they_are(monkeypatch):
    monkeypatch.setattr(numba_dense, "computes_fp32", lambda: True)
    weight, offset, _ = made(97, 64, torch.bfloat16, True)
    expected = make_linear([weight[:40].float(), weight[40:].float()], offset.float(), torch.float32)
    packed = []
    monkeypatch.setattr(numba_dense, "panel_dtype", lambda weight: packed.append(weight.dtype) or weight.dtype)
    found, x = make_linear([weight[:40], weight[40:]], offset, torch.float32), torch.randn(9, 64)
    assert packed == [torch.bfloat16], "and no copy in fp32"
    assert found.nbytes == expected.nbytes and torch.equal(found(x), expected(x))


def test_an_embedding_in_bf16_has_rows_in_fp32():
    weight, tokens, out = torch.randn(9, 4).to(torch.bfloat16), torch.tensor([8, 0, 8]), torch.empty(3, 4)
    embed = make_embedding(weight, make_linear(weight), torch.float32, tied=True)
    assert torch.equal(embed(tokens), weight.float()[tokens]) and embed(tokens, out) is out
    assert torch.equal(out, embed(tokens)) and out.dtype == torch.float32


def test_a_gpu_computes_with_the_tensor_itself(monkeypatch):
    """A head has the memory of the embedding that it is tied to."""
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, bias: weight)
    weight = torch.empty(6, 4, device="meta")
    assert make_linear(weight, dtype=torch.float32)(weight) is weight
    assert packed_bits(weight.device, torch.float32, is_bf16=True) is None


def test_no_copy_of_a_large_weight_is_compared_with_it(monkeypatch):
    monkeypatch.setattr(numba_tiles, "COMPARED", 1000)
    copied = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if func is torch.ops.aten._to_copy.default:
                copied.append(result.numel())
            return result

    weight = torch.ones(501, 20)
    with Copies():
        assert panel_dtype(weight) == torch.bfloat16
    assert sum(copied) == 2 * weight.numel() and max(copied) == 1000
    weight[-1, -1] = 1.001
    assert panel_dtype(weight) == torch.float32


def test_memory_of_huge_pages_is_zero_and_can_be_written():
    memory = zeros(3, PAGE // 4, dtype=torch.float32)
    assert memory.shape == (3, PAGE // 4) and not memory.any()
    assert memory.fill_(2.0).sum() == 6 * PAGE // 4
