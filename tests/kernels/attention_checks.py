"""What the Triton attention kernels must satisfy beyond `backend_checks`, for tunings so small that few tokens make
many blocks, tiles and splits. To be run under the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
import torch
from kernel_cases import AttentionCase, attention_case
from torch import Tensor

from lora_kernels import reference
from lora_kernels.backend import AttentionBatch, KvCoding
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_context import FP8, AttentionCall
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_kv import write_kv
from lora_kernels.gpu.triton_pointwise import rotate_and_write
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning, plan_prefill

DECODE = DecodeTuning(block_n=16, split_tokens=32, max_splits=4, programs=5)
PREFILL = PrefillTuning(block_m=16, block_n=16, fill=1, programs=3)
SPLITTING = replace(PREFILL, fill=64, split_tokens=16, max_splits=4)
SPLIT_CONTEXTS = (1, 31, 32, 33, 47, 64, 65, 128, 129, 200, 257)
"""For 32 tokens a split and at most four: none, exact multiples, one past them, longer splits instead of more."""


def attend(
    case: AttentionCase, window: int | None = None, decode: DecodeTuning = DECODE, prefill: PrefillTuning = PREFILL
) -> Tensor:
    write_kv(case.kv, case.key, case.value, case.batch.kv_slots)
    return PagedAttention(decode, prefill)(case.query, case.kv, case.batch, case.scores, window)


def matches_reference(
    case: AttentionCase, window: int | None = None, decode: DecodeTuning = DECODE, prefill: PrefillTuning = PREFILL
) -> None:
    out = attend(case, window, decode, prefill)
    expected = reference.attention(case.query, case.kv, case.batch, case.scores, window)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def any_group(group: int) -> None:
    case = attention_case([(1, 40), (1, 7), (6, 21)], heads=2 * group, kv_heads=2)
    matches_reference(case, prefill=SPLITTING)


def any_head(head_dim: int) -> None:
    matches_reference(attention_case([(1, 70), (3, 20)], head_dim=head_dim, block_size=16), prefill=SPLITTING)


def any_split(window: int | None) -> None:
    matches_reference(attention_case([(1, context) for context in SPLIT_CONTEXTS]), window)


def ragged_chunks_beside_decodes(window: int | None) -> None:
    """Chunks that end in a tile, at its end and one past it; alone and deep in a context; split and not."""
    chunks = [(1, 90), (8, 8), (1, 1), (16, 16), (17, 50), (9, 100), (2, 33), (1, 33)]
    for prefill in (PREFILL, SPLITTING):
        matches_reference(attention_case(chunks), window, prefill=prefill)


def parts_share_one_sink(window: int | None) -> None:
    """A sink counts once in a row, whether its context is split or not; scores are bounded before they are masked."""
    chunks = [(1, context) for context in SPLIT_CONTEXTS] + [(8, 8), (17, 50), (9, 100)]
    for cap, sinks in ((None, True), (1.0, True)):  # a case that every backend has is capped without sinks
        matches_reference(attention_case(chunks, cap=cap, sinks=sinks), window, prefill=SPLITTING)


def part_of(case: AttentionCase, sequence: int) -> AttentionCase:
    """The same pages and rows, with one sequence in the batch."""
    batch, (start, stop) = case.batch, case.batch.host_query_starts[sequence : sequence + 2]
    rows, context = slice(start, stop), batch.host_context_lens[sequence]
    alone = replace(
        batch,
        query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
        context_lens=batch.context_lens[sequence : sequence + 1],
        block_tables=batch.block_tables[sequence : sequence + 1],
        kv_slots=batch.kv_slots[rows],
        num_decodes=int(stop - start == 1),
        max_query=stop - start,
        max_context=context,
        host_query_starts=(0, stop - start),
        host_context_lens=(context,),
    )
    return replace(case, query=case.query[rows], key=case.key[rows], value=case.value[rows], batch=alone)


def rows_keep_their_bits(window: int | None) -> None:
    """Check a sequence's bits whichever others share the batch, and however many programs there are."""
    case = attention_case([(1, context) for context in (33, 1, 200, 64)] + [(9, 60), (20, 20)])
    together = attend(case, window, prefill=SPLITTING)
    for sequence, start in enumerate(case.batch.host_query_starts[:-1]):
        decode, prefill = (replace(tuning, programs=1 + sequence) for tuning in (DECODE, SPLITTING))
        alone = attend(part_of(case, sequence), window, decode, prefill)
        assert_same(together[start : start + len(alone)], alone)


def numpy_keeps_bits() -> bool:
    """Return whether a row of a product of numpy's is bitwise the same however many rows there are."""
    left, right = torch.randn(64, 64).numpy(), torch.randn(64, 64).numpy()
    return bool(((left[:11] @ right) == (left @ right)[:11]).all())


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Check that rows are bitwise the same, or as close as the processor allows.

    The interpreter's products are numpy's, and on some processors (AMD EPYC, with OpenBLAS) the sums of a row depend on
    how many rows there are. A kernel that cut its own sums differently would be further off than that.
    """
    if numpy_keeps_bits():
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-6)


def rows_keep_their_bits_however_a_prompt_is_cut() -> None:
    whole = attention_case([(40, 40)])
    out = attend(whole)
    tail = part_of(whole, 0)
    rows = slice(29, 40)
    batch = replace(
        tail.batch,
        query_starts=torch.tensor([0, 11], dtype=torch.int32),
        kv_slots=tail.batch.kv_slots[rows],
        host_query_starts=(0, 11),
    )
    cut = replace(tail, query=tail.query[rows], key=tail.key[rows], value=tail.value[rows], batch=batch)
    assert_same(attend(cut), out[rows])


def padding_rows_become_zero() -> None:
    """A captured step has rows without a sequence: context 0, and a slot that is none."""
    case = attention_case([(1, 40), (1, 9), (1, 70), (1, 5)])
    expected = attend(case)
    case.batch.context_lens[1] = 0
    case.batch.block_tables[1] = 0
    case.batch.kv_slots[1] = -1
    before = case.kv.clone()
    case.key[1], case.value[1] = float("nan"), float("nan")
    out = attend(case)
    assert torch.equal(case.kv.nan_to_num(7), before.nan_to_num(7))
    expected[1] = 0
    assert torch.equal(out, expected)


def a_launch_serves_later_contexts() -> None:
    """One workspace and one batch object, whose tensors change between two steps, as a captured step's do."""
    attention = PagedAttention(DECODE, PREFILL)
    case = attention_case([(1, 200), (1, 65), (1, 40)])
    write_kv(case.kv, case.key, case.value, case.batch.kv_slots)
    attention.reserve(3, 4, case.kv)
    for contexts in ((200, 65, 40), (10, 33, 1), (129, 0, 38)):
        case.batch.context_lens.copy_(torch.tensor(contexts))
        out = attention(case.query, case.kv, case.batch, case.scores)
        batch = replace(case.batch, host_context_lens=tuple(max(1, context) for context in contexts))
        expected = reference.attention(case.query, case.kv, batch, case.scores)
        expected[[context == 0 for context in contexts]] = 0
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def tiles_and_splits_cover_every_row_and_token_once(seed: int) -> None:
    random = Random(seed)
    window, group = random.choice([None, 1, 20, 64]), random.randint(1, 3)
    tuning = replace(SPLITTING, fill=random.choice([1, 8, 64]))
    chunks = [(rows, rows + random.randint(0, 150)) for rows in random.choices(range(2, 40), k=random.randint(1, 4))]
    case = attention_case([(1, 5)] * random.randint(0, 2) + chunks, heads=2 * group)
    check_plan(case, window, tuning)
    case = replace(case, batch=of_any_lengths(case.batch, spare_rows=9, spare_seqs=2, max_context=200))
    check_plan(case, window, tuning)


def check_plan(case: AttentionCase, window: int | None, tuning: PrefillTuning) -> None:
    """Check the items and the merged rows against the chunks, and that the room on the host holds them."""
    batch, call = case.batch, AttentionCall(case.query, case.query, case.kv, 1.0, window)
    plan, tile_rows = plan_prefill(batch, call, tuning), tuning.tile_rows(call.group)
    num_items, num_merged = plan.counts.tolist()
    assert num_items <= len(plan.items) and num_merged <= len(plan.rows)
    merged = {row: (part, count) for row, part, count in plan.rows[:num_merged].tolist()}
    tiles: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for sequence, first, *split in plan.items[:num_items].tolist():
        assert sequence < len(batch.context_lens)
        if split[0] < split[1]:
            tiles.setdefault((sequence, first), []).append(tuple(split))
    covered, parts = [], []
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for (sequence, first), splits in tiles.items():
        start, stop = starts[sequence : sequence + 2]
        rows = range(start + first, min(start + first + tile_rows, stop))
        seen = contexts[sequence] - (stop - rows[0])
        check_splits(sorted(splits), 0 if window is None else max(0, seen + 1 - window), seen + len(rows))
        stride = splits[0][3]
        if len(splits) == 1:
            assert splits[0][2] == -1
            assert all(merged.get(row, (0, 1))[1] == 1 for row in rows)
        else:
            assert [merged[row] for row in rows] == [
                (min(splits)[2] + index * stride, len(splits)) for index in range(len(rows))
            ]
            parts += [part + index * stride for _, _, part, _ in splits for index in range(len(rows))]
        covered += rows
    chunks = [range(*pair) for pair in pairwise(starts)]
    assert sorted(covered) == [row for rows in chunks if len(rows) > 1 for row in rows]
    assert len(set(parts)) == len(parts) and max(parts, default=-1) < len(plan.partials.totals)


def check_splits(splits: Sequence[tuple[int, ...]], begin: int, end: int) -> None:
    """Check (begin, end, part, stride) of each: whole blocks, one after the other, that cover what the tile sees."""
    assert splits[0][0] <= begin < splits[0][0] + 16
    assert splits[-1][1] == end
    assert all(before[1] == after[0] for before, after in pairwise(splits))
    assert all(first < last and first % 16 == 0 for first, last, _, _ in splits)
    assert len(splits) <= 4
    assert len({stride for _, _, _, stride in splits}) == 1 and splits[0][3] >= len(splits)
    first_part = splits[0][2]
    assert len(splits) == 1 or [part for _, _, part, _ in splits] == list(range(first_part, first_part + len(splits)))


def of_any_lengths(batch: AttentionBatch, spare_rows: int, spare_seqs: int, max_context: int) -> AttentionBatch:
    """The batch of a captured step with prompts that is replayed for `batch`: the host knows sizes only, and there are
    padding rows and sequences."""
    rows, seqs = batch.host_query_starts[-1] + spare_rows, len(batch.host_context_lens) + spare_seqs
    padding, width = torch.zeros(spare_seqs, dtype=torch.int32), batch.block_tables.shape[1]
    return AttentionBatch(
        query_starts=torch.cat([batch.query_starts, padding + batch.query_starts[-1]]),
        context_lens=torch.cat([batch.context_lens, padding]),
        block_tables=torch.cat([batch.block_tables, torch.full((spare_seqs, width), 10**6, dtype=torch.int32)]),
        kv_slots=torch.cat([batch.kv_slots, torch.full((spare_rows,), -1)]),
        num_decodes=seqs,
        max_query=rows,
        max_context=max_context,
        host_query_starts=(0,) * (seqs + 1),
        host_context_lens=(max_context,) * seqs,
    )


def a_launch_serves_later_chunks(window: int | None) -> None:
    """Tensors at fixed addresses serve one step after the other: bit for bit what the kernels compute for the step
    alone, whether decodes and chunks are split or not."""
    attention, rows, seqs, context = PagedAttention(DECODE, SPLITTING), 24, 4, 90
    fixed: AttentionBatch | None = None
    for chunks in (
        [(1, 70), (1, 20), (10, 50), (2, 33)],
        [(20, 20)],
        [(1, 90), (1, 1)],
        [(2, 60), (22, 85)],
    ):
        case = attention_case(chunks)
        expected = attend(case, window, DECODE, SPLITTING)
        spare = rows - len(case.query), seqs - len(chunks)
        case = replace(case, query=torch.cat([case.query, torch.full((spare[0], 4, 16), float("nan"))]))
        batch = of_any_lengths(case.batch, *spare, context)
        if fixed is None:
            blocks = torch.zeros(seqs, context // 8 + 1, dtype=torch.int32)
            fixed = replace(batch, block_tables=blocks)
            attention.reserve(seqs, 4, case.kv, rows, context)
        fixed.query_starts.copy_(batch.query_starts)
        fixed.context_lens.copy_(batch.context_lens)
        fixed.block_tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        out = attention(case.query, case.kv, replace(fixed), case.scores, window)
        assert torch.equal(out[: len(expected)], expected)


def no_more_decodes_than_reserved() -> None:
    attention, case = PagedAttention(DECODE, PREFILL), attention_case([(1, 4), (1, 9)])
    attention.reserve(1, 4, case.kv)
    with pytest.raises(ValueError, match="2 decodes, and room was reserved for 1"):
        attention(case.query, case.kv, case.batch, case.scores)


def eight_bits(scaled: bool) -> None:
    """Check that numbers are read as they were stored, in pages full of NaN; fp16 holds every e4m3 number.

    Numbers are ones that need no rounding: to the next power of two, the interpreter rounds to half of it.
    """
    case = attention_case(
        [(1, 90), (1, 33), (9, 40)], heads=6, dtype=torch.float16, cap=2.0 if scaled else None, sinks=scaled
    )
    key, value = (given.abs().clamp(0.25).copysign(given).to(FP8).half() for given in (case.key, case.value))
    case = replace(case, key=key, value=value)
    scales = torch.tensor([[0.25, 0.5], [2.0, 0.125]]) if scaled else None
    divisor = torch.ones(2, 2) if scales is None else scales
    kv = case.kv.float().div(divisor[:, None, :, None]).to(FP8)
    write_kv(kv, case.key, case.value, case.batch.kv_slots, scales)
    out = PagedAttention(DECODE, SPLITTING)(case.query, kv, case.batch, case.scores, None, scales)
    stored = kv.float() * divisor[:, None, :, None]
    page, offset = case.batch.kv_slots // 8, case.batch.kv_slots % 8
    for side, given in enumerate((case.key, case.value)):
        assert torch.equal(stored[page, side, offset], given.float())
    expected = reference.attention(case.query, stored, case.batch, case.scores)
    torch.testing.assert_close(out.float(), expected, rtol=5e-3, atol=2e-3)


def eight_bits_cut_what_is_too_large() -> None:
    case = attention_case([(1, 1)], dtype=torch.float16)
    kv = case.kv.to(FP8)
    case.key[:], case.value[:] = 1000, -1000
    write_kv(kv, case.key, case.value, case.batch.kv_slots)
    page, offset = int(case.batch.kv_slots[0]) // 8, int(case.batch.kv_slots[0]) % 8
    assert (kv[page, 0, offset].float() == 448).all()
    assert (kv[page, 1, offset].float() == -448).all()


def heads_are_written_as_keys_and_values_are(dtype: torch.dtype, coded: bool = False) -> None:
    """By the launch that turns them (here by nothing), into pages of any kind, and nowhere for rows that only pad."""
    case = attention_case([(1, 12), (5, 9)], dtype=torch.float16)
    rows, _, head_dim = case.key.shape
    key, value = (given.abs().clamp(0.25).copysign(given).to(FP8).half() for given in (case.key, case.value))
    key[0], value[0] = 3000, -3000
    case.batch.kv_slots[2] = -1
    expected, found = (case.kv.nan_to_num(7).to(dtype) for _ in range(2))
    coding, shift = None, torch.zeros(2, head_dim)
    if coded:
        shift = torch.tensor([[1.0], [-0.5]]) * torch.arange(head_dim)  # fp16 holds the sums with keys exactly
        coding = KvCoding(torch.tensor([[0.25, 2.0], [4.0, 0.5]]), shift)
    write_kv(expected, key, value, case.batch.kv_slots, None if coding is None else coding.scales)
    qkv = torch.cat([case.query.flatten(1), (key + shift).half().flatten(1), value.flatten(1)], 1)
    still = torch.ones(rows, 1, head_dim), torch.zeros(rows, 1, head_dim)
    query = rotate_and_write(qkv, found, case.batch.kv_slots, *still, None, coding)
    assert torch.equal(query, case.query)
    assert torch.equal(found.float(), expected.float())
    assert found.float().abs().max() == (448 if dtype == FP8 else 3000)


ATTENTION_CHECKS: dict[str, Callable[[], None]] = {
    **{f"attention: group of {group}": partial(any_group, group) for group in range(1, 9)},
    **{f"attention: head of {size}": partial(any_head, size) for size in (64, 80, 96, 112, 128, 256)},
    **{f"attention: splits, window {window}": partial(any_split, window) for window in (None, 1, 32, 50, 100)},
    **{
        f"attention: chunks, window {window}": partial(ragged_chunks_beside_decodes, window) for window in (None, 5, 30)
    },
    **{f"attention: sinks, window {window}": partial(parts_share_one_sink, window) for window in (None, 30)},
    **{f"attention: bits, window {window}": partial(rows_keep_their_bits, window) for window in (None, 40)},
    **{
        f"attention: a launch serves later chunks, window {window}": partial(a_launch_serves_later_chunks, window)
        for window in (None, 40)
    },
    **{
        f"attention: tiles and splits, {seed}": partial(tiles_and_splits_cover_every_row_and_token_once, seed)
        for seed in range(20)
    },
    **{f"attention: eight bits{', scaled' * scaled}": partial(eight_bits, scaled) for scaled in (False, True)},
    **{
        f"attention: heads are written, {dtype}": partial(heads_are_written_as_keys_and_values_are, dtype)
        for dtype in (torch.float16, FP8)
    },
    "attention: heads are written, coded": partial(heads_are_written_as_keys_and_values_are, FP8, True),
    **{
        f"attention: {check.__name__}": check
        for check in (
            rows_keep_their_bits_however_a_prompt_is_cut,
            padding_rows_become_zero,
            a_launch_serves_later_contexts,
            no_more_decodes_than_reserved,
            eight_bits_cut_what_is_too_large,
        )
    },
}
