"""Attention's launches, on the host: nothing here runs a kernel."""

import pytest
import torch
from compile_attention import PROCESSORS
from kernel_cases import attention_case

from lora_kernels.gpu import triton_decode, triton_partials
from lora_kernels.gpu.triton_attention import PagedAttention, decode_tuning, prefill_tuning
from lora_kernels.gpu.triton_context import AttentionCall
from lora_kernels.gpu.triton_decode import DecodeTuning, make_workspace, workspace_bytes
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning

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
    call = AttentionCall(out, case.query, case.kv, case.scores)
    for contexts in ((200, 65, 1), (0, 0, 0), (1, 1, 1)):
        case.batch.context_lens.copy_(torch.tensor(contexts))
        attention._decode_rows(call, case.batch)
    for recorder in recorders:
        assert len(recorder.launches) == 3
        assert recorder.launches[0] == recorder.launches[1] == recorder.launches[2]


@pytest.mark.parametrize(("context", "window", "merges"), [(32, None, 0), (33, None, 1), (200, 32, 0), (200, 40, 1)])
def test_what_cannot_be_split_is_not_merged(recorders, context, window, merges):
    case = attention_case([(1, context)])
    PagedAttention(DECODE)(case.query, case.kv, case.batch, case.scores, window)
    assert [len(recorder.launches) for recorder in recorders] == [1, merges]


def test_a_workspace_is_as_large_as_promised():
    workspace = make_workspace(3, 4, 16, DECODE, torch.device("cpu"))
    tensors = (workspace.partials.totals, workspace.partials.stats, workspace.rows, workspace.count)
    assert sum(tensor.nbytes for tensor in tensors) == workspace_bytes(3, 4, 16, DECODE)


def test_smaller_batches_use_the_same_room(recorders):
    attention = PagedAttention(DECODE)
    for chunks in ([(1, 40)] * 3, [(1, 40)], [(1, 90)] * 2):
        case = attention_case(chunks)
        attention(case.query, case.kv, case.batch, case.scores)
    assert len({places[3] for _, places, _ in recorders[0].launches}) == 1


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
