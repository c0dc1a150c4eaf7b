"""What every backend must satisfy, as functions of a backend: numba's and the reference are checked in the test
process, the Triton one in a process of its own under the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from expert_checks import EXPERT_CHECKS
from kernel_cases import ATTENTION_CASES, LORA_CASES, AttentionCase, LoraCase, attention_case, lora_case
from pointwise_checks import POINTWISE_CHECKS
from torch import Tensor

from lora_kernels import reference
from lora_kernels.backend import Backend
from lora_kernels.layout import ProjectionGroup, pack_adapter, plan_layout

Check = Callable[[Backend], None]


def run_lora(backend: Backend, case: LoraCase, out: Tensor, x: Tensor, layer: int, group: ProjectionGroup) -> Tensor:
    result = out.clone()
    prepared = backend.prepare_lora(case.arena, case.table, case.plan)
    if prepared is not None:
        backend.add_lora(result, x, prepared, layer, group)
    return result


def run_attention(backend: Backend, case: AttentionCase, window: int | None = None) -> Tensor:
    backend.write_kv(case.kv, case.key, case.value, case.batch)
    return backend.attention(case.query, case.kv, case.batch, case.scores, window)


def lora_matches_reference(name: str, backend: Backend) -> None:
    case = LORA_CASES[name]()
    for layer, group in [(0, case.shape.groups[0]), *((1, group) for group in case.shape.groups)]:
        out, x = case.inputs(group)
        expected = out + reference.lora_delta(x, case.row_adapter_slots, case.arena, case.table, layer, group)
        torch.testing.assert_close(run_lora(backend, case, out, x, layer, group), expected, rtol=1e-4, atol=1e-4)


def attention_matches_reference(name: str, backend: Backend) -> None:
    build, window = ATTENTION_CASES[name]
    case = build()
    out = run_attention(backend, case, window)
    expected = reference.attention(case.query, case.kv, case.batch, case.scores, window)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def no_segments_prepare_nothing(backend: Backend) -> None:
    case = lora_case([8], [-1, -1, -1])
    assert backend.prepare_lora(case.arena, case.table, case.plan) is None


def base_rows_stay_as_they_are(backend: Backend) -> None:
    case = lora_case([8, 40], [-1, 0, -1, 1, -1])
    group = case.shape.groups[0]
    out, x = case.inputs(group)
    result = run_lora(backend, case, out, x, 0, group)
    assert torch.equal(result[::2], out[::2])
    assert not torch.isclose(result[1::2], out[1::2]).all()


def zero_b_is_the_identity(backend: Backend) -> None:
    case = lora_case([8, 1, 33], [0, 1, 2, 2, 0, 1, 0, 0], zero_b=True)
    for group in case.shape.groups:
        out, x = case.inputs(group)
        assert torch.equal(run_lora(backend, case, out, x, 1, group), out)


def permuting_rows_permutes_outputs(backend: Backend) -> None:
    adapter_slots = [0, 3, 1, -1, 2, 2, 0, 1, 3, 3, 3, 3, 3, -1, 0]
    order = torch.randperm(len(adapter_slots), generator=torch.Generator().manual_seed(5))
    case = lora_case([8, 17, 3, 64], adapter_slots)
    permuted = lora_case([8, 17, 3, 64], [adapter_slots[index] for index in order])
    for group in case.shape.groups:
        out, x = case.inputs(group)
        expected = run_lora(backend, case, out, x, 0, group)[order]
        torch.testing.assert_close(run_lora(backend, permuted, out[order], x[order], 0, group), expected)


def a_sick_row_harms_no_other(backend: Backend) -> None:
    """A NaN or an infinity in one row of the input stays in that row."""
    case = lora_case([8, 8, 8, 8, 8], [0, 1, 2, 3, 4, -1, 0, 1])
    group = case.shape.groups[0]
    out, x = case.inputs(group)
    healthy = run_lora(backend, case, out, x, 0, group)
    x[1], x[4] = float("nan"), float("inf")
    rest = [0, 2, 3, 5, 6, 7]
    torch.testing.assert_close(run_lora(backend, case, out, x, 0, group)[rest], healthy[rest])


def huge_adapters_harm_no_other(backend: Backend) -> None:
    """An adapter whose products overflow leaves rows of other adapters alone."""
    case = lora_case([8, 8, 8], [0, 1, 2, 0])
    group = case.shape.groups[0]
    out, x = case.inputs(group)
    healthy = run_lora(backend, case, out, x, 0, group)
    layout = plan_layout(case.table.host_ranks[1], case.shape.widths, case.table.page_elems)
    huge = {key: (torch.full_like(a, 3e38), torch.full_like(b, 3e38)) for key, (a, b) in case.blocks[1].items()}
    blob = pack_adapter(layout, huge, case.table.page_elems, case.arena.dtype)
    case.arena.view(-1, case.table.page_elems)[list(case.pages[1])] = blob
    torch.testing.assert_close(run_lora(backend, case, out, x, 0, group)[[0, 2, 3]], healthy[[0, 2, 3]])


def replaced_adapter_is_noticed(backend: Backend) -> None:
    """The same plan over a slot that changed owner gives the new owner's result; a cleared slot is the identity."""
    case = lora_case([8, 24], [0, 0, 1])
    group = case.shape.groups[2]
    out, x = case.inputs(group)
    run_lora(backend, case, out, x, 1, group)
    layout = plan_layout(case.table.host_ranks[1], case.shape.widths, case.table.page_elems)
    case.table.set(0, layout, case.pages[1])
    expected = out + reference.lora_delta(x, case.row_adapter_slots, case.arena, case.table, 1, group)
    torch.testing.assert_close(run_lora(backend, case, out, x, 1, group), expected, rtol=1e-4, atol=1e-4)
    case.table.clear(0)
    case.table.clear(1)
    assert torch.equal(run_lora(backend, case, out, x, 1, group), out)


def lora_error_is_that_of_two_gemms(dtype: torch.dtype, backend: Backend) -> None:
    case = lora_case([8, 16, 33], [0, 1, 2, 2, 0, 1] * 3, dtype=dtype)
    for group in case.shape.groups:
        out, x = case.inputs(group)
        exact = out.float() + reference.lora_delta(x, case.row_adapter_slots, case.arena, case.table, 0, group)
        plain = out.clone()
        column = 0
        for target, features in zip(group.targets, group.out_features, strict=True):
            for adapter_slot, blocks in enumerate(case.blocks):
                rows = [row for row, used in enumerate(case.row_adapter_slots) if used == adapter_slot]
                a, b = (part.to(dtype) for part in blocks[0, target])
                plain[rows, column : column + features] += x[rows] @ a.T @ b.T
            column += features
        assert_error_within_twice(run_lora(backend, case, out, x, 0, group), plain, exact)


def attention_error_is_that_of_eager(dtype: torch.dtype, backend: Backend) -> None:
    case = attention_case([(1, 40), (1, 9), (12, 25)], heads=6, kv_heads=3, head_dim=32, dtype=dtype)
    result = run_attention(backend, case)
    exact = reference.attention(case.query, case.kv, case.batch, case.scores)
    plain = torch.empty_like(case.query)
    for index, context in enumerate(case.batch.host_context_lens):
        start, stop = case.batch.host_query_starts[index : index + 2]
        key, value = case.kv[case.batch.block_tables[index]].transpose(0, 1).flatten(1, 2)[:, :context].transpose(1, 2)
        causal = torch.ones(stop - start, context, dtype=torch.bool).tril(context - (stop - start))
        scores = case.query[start:stop].transpose(0, 1) @ key.repeat_interleave(2, 0).mT * case.scores.scale
        weights = F.softmax(scores.masked_fill(~causal, float("-inf")), dim=-1)
        plain[start:stop] = (weights @ value.repeat_interleave(2, 0)).transpose(0, 1)
    assert_error_within_twice(result, plain, exact)


def assert_error_within_twice(result: Tensor, plain: Tensor, exact: Tensor) -> None:
    ours, theirs = (result.float() - exact).abs(), (plain.float() - exact).abs()
    assert ours.mean() <= 2 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()


def write_kv_writes_its_slots_only(backend: Backend) -> None:
    case = attention_case([(1, 9), (6, 20)])
    before = case.kv.clone()
    backend.write_kv(case.kv, case.key, case.value, case.batch)
    page, offset = case.batch.kv_slots // 8, case.batch.kv_slots % 8
    assert torch.equal(case.kv[page, 0, offset], case.key)
    assert torch.equal(case.kv[page, 1, offset], case.value)
    case.kv[page, :, offset] = before[page, :, offset]
    assert torch.equal(case.kv.nan_to_num(7), before.nan_to_num(7))


def slices_of_one_projection_are_inputs(backend: Backend) -> None:
    """Query, key and value may be views of the fused projection's output."""
    case = attention_case([(1, 12), (5, 9)], heads=4, kv_heads=2, head_dim=16)
    fused = torch.cat([part.flatten(1) for part in (case.query, case.key, case.value)], dim=1)
    query, key, value = (part.unflatten(1, (-1, 16)) for part in fused.split([64, 32, 32], dim=1))
    backend.write_kv(case.kv, key, value, case.batch)
    out = backend.attention(query, case.kv, case.batch, case.scores)
    expected = reference.attention(query, case.kv, case.batch, case.scores)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def batches_follow_each_other(backend: Backend) -> None:
    """One backend serves one batch after another, and two windows in one batch."""
    for seed, chunks in enumerate(([(1, 9), (4, 12)], [(1, 30)], [(3, 3), (1, 17)])):
        case = attention_case(chunks, seed=seed)
        for window in (None, 6):
            out = run_attention(backend, case, window)
            expected = reference.attention(case.query, case.kv, case.batch, case.scores, window)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


CHECKS: dict[str, Check] = {
    **POINTWISE_CHECKS,
    **EXPERT_CHECKS,
    **{f"lora: {name}": partial(lora_matches_reference, name) for name in LORA_CASES},
    **{f"attention: {name}": partial(attention_matches_reference, name) for name in ATTENTION_CASES},
    "lora: bf16 error": partial(lora_error_is_that_of_two_gemms, torch.bfloat16),
    "lora: fp16 error": partial(lora_error_is_that_of_two_gemms, torch.float16),
    "attention: bf16 error": partial(attention_error_is_that_of_eager, torch.bfloat16),
    "attention: fp16 error": partial(attention_error_is_that_of_eager, torch.float16),
    **{
        check.__name__: check
        for check in (
            no_segments_prepare_nothing,
            base_rows_stay_as_they_are,
            zero_b_is_the_identity,
            permuting_rows_permutes_outputs,
            a_sick_row_harms_no_other,
            huge_adapters_harm_no_other,
            replaced_adapter_is_noticed,
            write_kv_writes_its_slots_only,
            slices_of_one_projection_are_inputs,
            batches_follow_each_other,
        )
    },
}
