"""The linears of experts against one linear for each."""

from itertools import pairwise

import pytest
import torch

from lora_kernels.grouped import ExpertByExpert, make_grouped
from lora_kernels.linear import make_linear
from lora_kernels.quantized import INT8, quantize

STARTS = torch.tensor([0, 1, 1, 8, 21, 23, 23], dtype=torch.int32)
"""Experts with one entry, none, seven, thirteen, two and none."""


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 0), (torch.float32, 3), (torch.bfloat16, 6)])
@pytest.mark.parametrize(("width", "features"), [(64, 48), (33, 41)])
def test_entries_meet_the_weights_of_their_expert(dtype, exact, width, features):
    """The first `exact` experts have weights that bf16 holds exactly."""
    torch.manual_seed(0)
    weights = [[torch.randn(rows, width).to(dtype) / 8 for rows in (features - 7, 7)] for _ in range(6)]
    weights[:exact] = [[piece.bfloat16().to(dtype) for piece in pieces] for pieces in weights[:exact]]
    x = torch.randn(23, width).to(dtype)
    linears = make_grouped(weights, 6, dtype, torch.float32)
    parts = [
        x[start:stop].float() @ torch.cat(pieces).float().T
        for pieces, (start, stop) in zip(weights, pairwise(STARTS.tolist()), strict=True)
    ]
    out = linears(x, STARTS)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-4, atol=1e-4)


def test_an_entrys_output_does_not_depend_on_the_others():
    torch.manual_seed(0)
    linears = make_grouped([[torch.randn(32, 64)]], 1, torch.float32)
    x = torch.randn(13, 64)
    together = linears(x, torch.tensor([0, 13], dtype=torch.int32))
    for row in range(13):
        assert torch.equal(linears(x[row : row + 1], torch.tensor([0, 1], dtype=torch.int32))[0], together[row])


def test_quantised_experts_are_those_of_their_own_linears():
    torch.manual_seed(0)
    weights = [quantize(torch.randn(48, 64), INT8) for _ in range(6)]
    x = torch.randn(23, 64)
    linears = make_grouped(([weight] for weight in weights), 6, torch.float32)
    assert isinstance(linears, ExpertByExpert)
    parts = [
        make_linear(weight, None, torch.float32)(x[start:stop])
        for weight, (start, stop) in zip(weights, pairwise(STARTS.tolist()), strict=True)
        if start < stop
    ]
    assert torch.equal(linears(x, STARTS), torch.cat(parts))


@pytest.mark.parametrize("quantised", [False, True])
def test_each_expert_has_its_own_biases(quantised):
    torch.manual_seed(0)
    weights, biases, x = [torch.randn(41, 64) / 8 for _ in range(6)], torch.randn(6, 41), torch.randn(23, 64)
    stored = [[quantize(weight, INT8) if quantised else weight] for weight in weights]
    out = make_grouped(stored, 6, torch.float32, biases=biases)(x, STARTS)
    plain = make_grouped(stored, 6, torch.float32)(x, STARTS)
    torch.testing.assert_close(out - plain, biases.repeat_interleave(STARTS.diff(), 0), rtol=1e-5, atol=1e-5)
