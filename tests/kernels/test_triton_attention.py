"""Attention's launches, and how chunks are cut, on the host: nothing here runs a kernel."""

from itertools import pairwise

import pytest
import torch
from compile_attention import PROCESSORS
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import attention_case

from lora_kernels.gpu import triton_decode, triton_partials
from lora_kernels.gpu.triton_attention import PagedAttention, decode_tuning, prefill_tuning
from lora_kernels.gpu.triton_context import AttentionCall
from lora_kernels.gpu.triton_decode import DecodeTuning, make_workspace, workspace_bytes
from lora_kernels.gpu.triton_prefill import PrefillTuning, plan_prefill

DECODE = DecodeTuning(block_n=16, split_tokens=32, max_splits=4, programs=50)


class Recorder:
    """In the place of a kernel: notes its launches."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            places = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args]
            self.launches.append((grid, places, constants))

        return launch


@pytest.fixture
def recorders(monkeypatch):
    decode, merge = Recorder(), Recorder()
    monkeypatch.setattr(triton_decode, "decode_kernel", decode)
    monkeypatch.setattr(triton_partials, "merge_kernel", merge)
    return decode, merge


def test_a_captured_decode_step_launches_the_same_for_all_contexts(recorders):
    attention, case = PagedAttention(DECODE), attention_case([(1, 200), (1, 65), (1, 1)])
    attention.reserve(8, 4, case.kv)
    out = torch.empty_like(case.query)
    call = AttentionCall(out, case.query, case.kv, case.scale)
    for contexts in ((200, 65, 1), (0, 0, 0), (1, 1, 1)):
        case.batch.context_lens.copy_(torch.tensor(contexts))
        attention._decode_rows(call, case.batch)
    for recorder in recorders:
        assert len(recorder.launches) == 3
        assert recorder.launches[0] == recorder.launches[1] == recorder.launches[2]


@pytest.mark.parametrize(("context", "window", "merges"), [(32, None, 0), (33, None, 1), (200, 32, 0), (200, 40, 1)])
def test_what_cannot_be_split_is_not_merged(recorders, context, window, merges):
    case = attention_case([(1, context)])
    PagedAttention(DECODE)(case.query, case.kv, case.batch, case.scale, window)
    assert [len(recorder.launches) for recorder in recorders] == [1, merges]


def test_a_workspace_is_as_large_as_promised():
    workspace = make_workspace(3, 4, 16, DECODE, torch.device("cpu"))
    tensors = (workspace.partials.totals, workspace.partials.stats, workspace.rows)
    assert sum(tensor.nbytes for tensor in tensors) == workspace_bytes(3, 4, 16, DECODE)


def test_smaller_batches_use_the_same_room(recorders):
    attention = PagedAttention(DECODE)
    for chunks in ([(1, 40)] * 3, [(1, 40)], [(1, 90)] * 2):
        case = attention_case(chunks)
        attention(case.query, case.kv, case.batch, case.scale)
    assert len({places[3] for _, places, _ in recorders[0].launches}) == 1


@settings(max_examples=60, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(2, 40), st.integers(0, 150)), min_size=1, max_size=4),
    decodes=st.integers(0, 2),
    window=st.sampled_from([None, 1, 20, 64]),
    group=st.integers(1, 3),
    fill=st.sampled_from([1, 8, 64]),
)
def test_tiles_and_splits_cover_every_row_and_token_once(chunks, decodes, window, group, fill):
    tuning = PrefillTuning(block_m=16, block_n=16, fill=fill, split_tokens=16, max_splits=4)
    case = attention_case([(1, 5)] * decodes + [(rows, rows + before) for rows, before in chunks], heads=2 * group)
    batch, tile_rows = case.batch, 16 // group
    plan = plan_prefill(batch, AttentionCall(case.query, case.query, case.kv, 1.0, window), tuning)
    merged = {row: (part, count) for row, part, count in ([] if plan.rows is None else plan.rows.tolist())}
    tiles = {}
    for sequence, first, *split in plan.items.tolist():
        tiles.setdefault((sequence, first), []).append(tuple(split))
    covered, parts = [], []
    for (sequence, first), splits in tiles.items():
        start, stop = batch.host_query_starts[sequence : sequence + 2]
        rows = range(start + first, min(start + first + tile_rows, stop))
        seen = batch.host_context_lens[sequence] - (stop - rows[0])
        check_splits(sorted(splits), 0 if window is None else max(0, seen + 1 - window), seen + len(rows))
        if len(splits) == 1:
            assert splits[0][2] == -1
            assert not merged.keys() & set(rows)
        else:
            assert [merged[row] for row in rows] == [
                (min(splits)[2] + index * len(splits), len(splits)) for index in range(len(rows))
            ]
            parts += [part + index * stride for _, _, part, stride in splits for index in range(len(rows))]
        covered += rows
    assert sorted(covered) == list(range(decodes, batch.host_query_starts[-1]))
    assert sorted(parts) == list(range(0 if plan.partials is None else len(plan.partials.totals)))


def check_splits(splits, begin, end):
    """(begin, end, part, stride) each: whole blocks, one after the other, that cover what the tile sees."""
    assert splits[0][0] <= begin < splits[0][0] + 16
    assert splits[-1][1] == end
    assert all(before[1] == after[0] for before, after in pairwise(splits))
    assert all(first < last and first % 16 == 0 for first, last, _, _ in splits)
    assert len(splits) <= 4
    assert {stride for _, _, _, stride in splits} == {len(splits)}


@pytest.mark.parametrize("capability", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 256])
def test_there_are_tunings_for_every_layer(capability, dtype, head_dim):
    processor = PROCESSORS[capability]
    assert decode_tuning(head_dim, dtype, processor).programs >= processor.count
    assert prefill_tuning(head_dim, dtype, processor).height(group=8) >= 64


@pytest.mark.parametrize("wrong", [{"block_n": 48}, {"max_splits": 3}, {"split_tokens": 100}, {"split_tokens": 0}])
def test_senseless_decode_tunings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DecodeTuning(**wrong)


@pytest.mark.parametrize("wrong", [{"block_m": 100}, {"block_n": 0}, {"max_splits": 6}])
def test_senseless_prefill_tunings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrefillTuning(**wrong)
