"""What lies between a decoder's products, against its form in torch: functions of a backend, like `backend_checks`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from kernel_cases import attention_case
from torch import Tensor

from lora_kernels.backend import Backend
from lora_kernels.pointwise import BoundedSwiglu, QkNorms, TorchPointwise, rotate_heads

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 4e-2}
"""Allows bfloat16 three times what one rounding may cost: Triton's interpreter cuts off where a GPU rounds."""


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Close everywhere, and in float16 the same number almost everywhere: an intermediate rounding left out would
    change one in four."""
    tolerance = TOLERANCES[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    if theirs.dtype == torch.float16:
        assert (ours == theirs)[~theirs.isnan()].float().mean() > 0.98


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """As the engine makes them: the first half of the sines is negated."""
    turns = random(rows, 1, head_dim // 2, seed=9) * 3
    cos, sin = turns.cos(), turns.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def norm_is_torchs(dtype: torch.dtype, width: int, weight_dtype: torch.dtype, backend: Backend) -> None:
    x, delta = (random(5, width, dtype=dtype, seed=seed) for seed in range(2))
    weight, theirs, plain = random(width, dtype=weight_dtype, seed=2), x.clone(), TorchPointwise()
    for step, norm, factor in ((delta, weight, 1.0), (None, weight, 1.0), (delta, weight, 0.3), (delta, None, 0.3)):
        expected = plain.add_norm(theirs, step, norm, 1e-5, factor)
        assert_same(backend.pointwise.add_norm(x, step, norm, 1e-5, factor), expected)
        assert_same(x, theirs)


def glu_is_torchs(dtype: torch.dtype, width: int, backend: Backend) -> None:
    gate_up = random(3, 2 * width, dtype=dtype) * 4
    gate_up[0, :5] = torch.tensor([-200.0, 200.0, 0.0, -80.0, 80.0])
    gate_up[1, 0] = float("nan")
    assert_same(backend.pointwise.swiglu(gate_up), TorchPointwise().swiglu(gate_up))
    gate_up /= 4  # torch's own form of GELU is imprecise far below 0
    gate_up[0, :3] = torch.tensor([-30.0, 30.0, 0.0])
    assert_same(backend.pointwise.geglu(gate_up), TorchPointwise().geglu(gate_up))
    gate_up[0, width : width + 2] = torch.tensor([-30.0, 30.0])
    gate_up[2, width] = float("nan")
    bounds = BoundedSwiglu(limit=1.5, slope=1.702)
    assert_same(backend.pointwise.bounded_swiglu(gate_up, bounds), TorchPointwise().bounded_swiglu(gate_up, bounds))


def rotation_is_torchs(dtype: torch.dtype, head_dim: int, rotary_dim: int, backend: Backend) -> None:
    cos, sin = angles(5, rotary_dim)
    fused = random(5, 13, head_dim, dtype=dtype)
    before = fused.clone()
    ours, theirs = fused[:, 1:12], fused[:, 1:12].clone()
    backend.pointwise.rotate(ours, cos, sin)
    TorchPointwise().rotate(theirs, cos, sin)
    assert_same(ours, theirs)
    assert torch.equal(fused[:, [0, 12]], before[:, [0, 12]])
    assert torch.equal(ours[..., rotary_dim:], before[:, 1:12, rotary_dim:])


def heads_are_turned_and_written(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norm_dtype: torch.dtype | None,
    rotary_dim: int,
    backend: Backend,
    *,
    together: bool = False,
) -> None:
    """With norms of each head, or of all heads together."""
    case = attention_case([(1, 12), (5, 9)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    before, rows = case.kv.clone(), len(case.query)
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = angles(rows, rotary_dim)
    weights = random((heads + kv_heads) * head_dim, dtype=norm_dtype or dtype, seed=4)
    widths = (heads * head_dim, kv_heads * head_dim) if together else (head_dim, head_dim)
    of_query, of_key = weights[: sum(widths)].split(widths)
    norms = QkNorms(of_query, of_key, 1e-6) if norm_dtype else None
    query, key, value = rotate_heads(TorchPointwise(), qkv.clone(), case.kv, cos, sin, norms)
    assert_same(backend.rotate_and_write(qkv, case.kv, case.batch, cos, sin, norms), query)
    page, offset = case.batch.kv_slots // 8, case.batch.kv_slots % 8
    assert_same(case.kv[page, 0, offset], key)
    assert torch.equal(case.kv[page, 1, offset], value)
    case.kv[page, :, offset] = before[page, :, offset]
    assert torch.equal(case.kv.nan_to_num(7), before.nan_to_num(7))


SHAPES = ((4, 2, 16, False, 16), (9, 3, 80, True, 80), (8, 1, 64, False, 48), (10, 10, 16, True, 12))
"""Query heads, KV heads, dimensions of each, whether there are norms of heads, and rotated dimensions."""

POINTWISE_CHECKS: dict[str, Callable[[Backend], None]] = {
    **{
        f"norm: {name}, {w}": partial(norm_is_torchs, DTYPES[name], w, DTYPES[name])
        for name in DTYPES
        for w in (64, 49, 600)
    },
    **{
        f"norm: {name}, fp32 weight": partial(norm_is_torchs, DTYPES[name], 49, torch.float32)
        for name in ("float16", "bfloat16")
    },
    **{f"glu: {name}, {w}": partial(glu_is_torchs, DTYPES[name], w) for name in DTYPES for w in (49, 1100)},
    **{
        f"rotation: {name}, {rotary} of {d}": partial(rotation_is_torchs, DTYPES[name], d, rotary)
        for name in DTYPES
        for d, rotary in ((16, 16), (80, 80), (80, 60))
    },
    **{
        f"heads: {name}, {shape}": partial(heads_are_turned_and_written, DTYPES[name], *shape[:3], norms, shape[4])
        for name in DTYPES
        for shape in SHAPES
        for norms in [DTYPES[name] if shape[3] else None]
    },
    **{
        f"heads: {name}, norms of all together": partial(
            heads_are_turned_and_written, DTYPES[name], 6, 2, 24, torch.float32, 24, together=True
        )
        for name in ("float32", "bfloat16")
    },
    "heads: bfloat16, fp32 norms": partial(heads_are_turned_and_written, torch.bfloat16, 4, 2, 16, torch.float32, 16),
}
