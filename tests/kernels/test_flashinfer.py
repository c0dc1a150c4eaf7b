"""Attention by FlashInfer, over a stand-in: the lists that it plans, captured plans, and the choice between it and our
kernels. What the stand-in cannot show is checked by benchmarks/gpu, section A."""

from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from flashinfer_facts import find_differences
from kernel_cases import ATTENTION_CASES, attention_case

from lora_kernels import attention_choice, reference, select
from lora_kernels.attention_choice import (
    FEW_DECODES,
    LIBRARY,
    MANY_DECODES,
    PROMPTS,
    STEP_CLASSES,
    AttentionWish,
    choose_attention,
    record_key,
    require_attention,
    step_class,
)
from lora_kernels.gpu import flashinfer_attention, triton_tuned
from lora_kernels.gpu.flashinfer_attention import INT_BYTES, FlashInferAttention, compile_kernels, float_bytes
from lora_kernels.gpu.triton_attention import PagedAttention, Processor
from lora_kernels.tuning import Choice, Tunings
from tests.kernels import flashinfer_standin

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MAX_SEQS, MAX_ROWS, MAX_CONTEXT = 6, 40, 64


@pytest.fixture
def log():
    with flashinfer_standin.installed() as found:
        yield found


def write(case):
    block_size, slots = case.kv.shape[2], case.batch.kv_slots
    case.kv[slots // block_size, 0, slots % block_size] = case.key
    case.kv[slots // block_size, 1, slots % block_size] = case.value


def assert_is_reference(out, case, window=None):
    expected = reference.attention(case.query, case.kv, case.batch, case.scores, window)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ATTENTION_CASES if "sinks" not in name])
def test_launched_steps_match_the_reference(log, name):
    build, window = ATTENTION_CASES[name]
    case = build()
    write(case)
    attention = FlashInferAttention()
    assert_is_reference(attention(case.query, case.kv, case.batch, case.scores, window), case, window)
    assert log.runs == ["decode" if case.batch.max_query == 1 else "prefill"]


def test_all_layers_of_a_step_share_a_plan_for_each_window(log):
    case, attention = attention_case([(1, 33), (4, 20)]), FlashInferAttention()
    write(case)
    for window in (None, 5, None, 5, None):
        assert_is_reference(attention(case.query, case.kv, case.batch, case.scores, window), case, window)
    assert (log.plans, len(log.runs)) == (["prefill"] * 2, 5)
    following = replace(case.batch)
    attention(case.query, case.kv, following, case.scores, None)
    assert len(log.plans) == 3


def test_the_query_may_be_a_part_of_a_wider_row(log):
    case = attention_case([(1, 9), (1, 20)])
    write(case)
    wide = torch.cat([case.query, torch.full_like(case.query, torch.nan)], dim=1)
    assert_is_reference(FlashInferAttention()(wide[:, :4], case.kv, case.batch, case.scores), case)


class Captured:
    """A captured step of one size, whose tensors on the device are padded to it."""

    def __init__(self, attention, rows, seqs, has_prompts, windows=(None,)):
        self.attention, self.rows, self.windows = attention, rows, windows
        self.plans = attention.capture_plans(rows, seqs, has_prompts)
        first = attention_case([(1, 1)])
        self.batch = replace(
            first.batch,
            num_decodes=seqs,
            max_query=rows if has_prompts else 1,
            host_context_lens=(MAX_CONTEXT,) * seqs,
            plans=self.plans,
        )
        self.query = torch.full((rows, *first.query.shape[1:]), torch.nan)
        self.launch(first)

    def launch(self, case):
        batch = replace(self.batch)
        return [self.attention(self.query, case.kv, batch, case.scores, window) for window in self.windows]

    def replay(self, case):
        batch = case.batch
        starts, contexts = np.array(batch.host_query_starts), np.array(batch.host_context_lens)
        self.plans.renew(starts, contexts, batch.block_tables.numpy())
        self.query[: len(case.query)] = case.query
        flashinfer_standin.LOG.replaying = True
        outs = self.launch(case)
        flashinfer_standin.LOG.replaying = False
        for out, window in zip(outs, self.windows, strict=True):
            assert_is_reference(out[: len(case.query)], case, window)


def reserved():
    attention = FlashInferAttention()
    attention.reserve(MAX_SEQS, 4, attention_case([(1, 1)]).kv, MAX_ROWS, MAX_CONTEXT)
    return attention


def test_replays_serve_any_contexts_and_fewer_sequences(log):
    captured = Captured(reserved(), 6, 6, has_prompts=False)
    for contexts in ((1, 40, 7, 8, 9, 64), (3,), (64,) * 6, (16, 1)):
        case = attention_case([(1, context) for context in contexts], seed=len(contexts))
        write(case)
        captured.replay(case)
    assert log.captured == 1


def test_replays_serve_any_lengths_of_chunks(log):
    captured = Captured(reserved(), MAX_ROWS, MAX_SEQS, has_prompts=True, windows=(None, 5))
    for chunks in ([(40, 40)], [(1, 33), (20, 27), (1, 2), (3, 3), (1, 16)], [(2, 60)], [(1, 64)] * 6):
        case = attention_case(chunks)
        write(case)
        captured.replay(case)


def test_captured_steps_of_all_sizes_share_the_lists_of_the_next(log):
    attention = reserved()
    sizes = [Captured(attention, 40, 6, has_prompts=True), Captured(attention, 20, 6, has_prompts=True)]
    sizes += [Captured(attention, rows, rows, has_prompts=False) for rows in (6, 4, 1)]
    for turn in range(2):
        for size in sizes:
            case = attention_case([(1, 9 + turn)] if size.rows < 7 else [(1, 30), (7 + turn, 12)])
            write(case)
            size.replay(case)


def test_a_replay_whose_plan_was_not_renewed_would_be_noticed(log):
    attention = reserved()
    first, second = (Captured(attention, rows, rows, has_prompts=False) for rows in (4, 2))
    case = attention_case([(1, 9)])
    write(case)
    second.replay(case)
    log.replaying = True
    with pytest.raises(AssertionError, match="another wrapper's plan"):
        first.launch(case)


def test_more_rows_than_captured_are_refused(log):
    captured = Captured(reserved(), 20, 4, has_prompts=True)
    with pytest.raises(ValueError, match="number of rows"):
        captured.replay(attention_case([(21, 21)]))


def test_steps_of_other_classes_are_left_to_our_kernels(log, monkeypatch):
    monkeypatch.setattr(PagedAttention, "__call__", lambda *_: "ours")
    attention = FlashInferAttention(steps=frozenset({PROMPTS}))
    attention.reserve(MAX_SEQS, 4, attention_case([(1, 1)]).kv, MAX_ROWS, MAX_CONTEXT)
    decodes, prompts = attention_case([(1, 9)]), attention_case([(3, 9)])
    write(prompts)
    assert attention(decodes.query, decodes.kv, decodes.batch, decodes.scores) == "ours"
    assert_is_reference(attention(prompts.query, prompts.kv, prompts.batch, prompts.scores), prompts)
    assert attention.capture_plans(6, 6, has_prompts=False) is None
    assert attention.capture_plans(40, 6, has_prompts=True) is not None
    assert [step_class(*step) for step in ((32, False), (33, False), (33, True))] == [
        FEW_DECODES,
        MANY_DECODES,
        PROMPTS,
    ]


def test_scales_and_sinks_of_heads_are_refused(log):
    case, sinks = attention_case([(1, 9)]), attention_case([(1, 9)], sinks=True).scores
    with pytest.raises(ValueError, match="no sinks"):
        FlashInferAttention()(case.query, case.kv, case.batch, sinks)
    with pytest.raises(ValueError, match="no scales"):
        FlashInferAttention()(case.query, case.kv, case.batch, case.scores, None, torch.ones(2, 2))


@pytest.mark.parametrize("processors", [16, 132, 160])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8), (28, 4), (64, 8), (71, 1), (32, 32)])
def test_workspaces_hold_what_any_plan_takes(monkeypatch, heads, kv_heads, processors):
    device = Processor(processors, 0, 90)
    monkeypatch.setattr(flashinfer_attention, "find_processor", lambda _: device)
    need, shape = flashinfer_standin.float_need, (heads, kv_heads, 128, processors)
    for seqs, rows in ((1, 1024), (64, 64), (256, 1024), (256, 256), (256, 384)):
        held = float_bytes(CPU, seqs, heads, kv_heads, 128, rows)
        assert held >= need(rows, seqs, *shape, captured=True)
        assert held >= need(seqs, seqs, *shape, captured=True)
        for launched in ((1, 1), (8192, 1), (8192, 256)):
            assert held >= need(*launched, *shape, captured=False)
        assert flashinfer_standin.int_need(rows, seqs, heads) <= INT_BYTES
    assert float_bytes(CPU, 256, 32, 8, 128, 1024) < 200e6


def test_kernels_of_every_window_are_compiled_before_they_are_needed(log):
    compile_kernels(frozenset({None, 4096}), 30.0, CPU, torch.float32, 64)
    assert sorted(log.runs) == ["decode"] * 2 + ["prefill"] * 2


def test_the_stand_in_takes_what_the_real_wrappers_take(log):
    assert find_differences(_module()) == []


def test_another_interface_is_noticed(log, monkeypatch):
    def run(self, query, paged_kv_cache):
        raise AssertionError("not called")

    monkeypatch.setattr(flashinfer_standin.BatchDecodeWithPagedKVCacheWrapper, "run", run)
    name = "BatchDecodeWithPagedKVCacheWrapper.run"
    found = f"{name} takes ('query', 'paged_kv_cache') by position, not ('q', 'paged_kv_cache')"
    assert find_differences(_module()) == [found, f"{name} takes no out"]


def _module() -> ModuleType:
    return flashinfer_standin  # type: ignore[return-value]


KEYS = {steps: record_key("128 bfloat16", steps, "0.7.2") for steps in STEP_CLASSES}
FASTER = {KEYS[FEW_DECODES]: Choice({"flashinfer": 0}, 2.0, 2.0), KEYS[PROMPTS]: Choice({"flashinfer": 1}, 1.0, 2.0)}


def choose(setting="auto", dtype=torch.bfloat16, head_dim=128, choices=None, **wish):
    tunings = Tunings({LIBRARY: FASTER} if choices is None else choices)
    return choose_attention(AttentionWish(setting, **wish), CUDA, dtype, head_dim, tunings, f"{head_dim} bfloat16")


@pytest.fixture
def version(monkeypatch):
    monkeypatch.setattr(attention_choice, "installed_flashinfer", lambda: "0.7.2")


def test_auto_takes_flashinfer_where_it_was_measured_to_be_faster(version, monkeypatch):
    assert (choose().steps, choose().reason) == ({PROMPTS}, "measured on this device")
    assert choose(choices={}).steps == frozenset() and "tune" in choose(choices={}).reason
    monkeypatch.setattr(attention_choice, "installed_flashinfer", lambda: "0.8.0")
    assert choose().steps == frozenset(), "another version was not measured"
    monkeypatch.setattr(attention_choice, "installed_flashinfer", lambda: None)
    assert choose().steps == frozenset() and "not installed" in choose().reason


OBSTACLES = {
    "one scale of FP8": {"has_fp8_kv": True},
    "bfloat16 or float16, not float32": {"dtype": torch.float32},
    "the model has 80": {"head_dim": 80},
    "it knows no sinks": {"sinks": True},
}


@pytest.mark.parametrize(("why", "wish"), OBSTACLES.items())
def test_what_flashinfer_lacks_is_an_error_only_if_it_is_asked_for(version, why, wish):
    assert choose(**wish).steps == frozenset() and why in choose(**wish).reason
    with pytest.raises(ValueError, match=why):
        choose("flashinfer", **wish)
    assert choose("triton", **wish).steps == frozenset()


def test_the_setting_decides(version):
    assert choose("triton").steps == frozenset()
    assert choose("flashinfer").steps == frozenset(STEP_CLASSES)


def test_a_machine_without_flashinfer_or_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(attention_choice, "installed_flashinfer", lambda: None)
    with pytest.raises(ValueError, match=r"pip install 'loralane\[flashinfer\]'"):
        choose("flashinfer")
    for setting in ("triton", "flashinfer"):
        with pytest.raises(ValueError, match=f"engine.attention {setting} .*needs a GPU"):
            require_attention(AttentionWish(setting), CPU, torch.bfloat16, 128)
        with pytest.raises(ValueError, match="needs a GPU"):
            select.select_backend(CPU, torch.float32, wish=AttentionWish(setting))


def load(monkeypatch, setting, compiled):
    """What `load_backend` makes on a pretended GPU, and what it tells of the attention."""
    monkeypatch.setattr(triton_tuned, "device_key", lambda _: None)
    monkeypatch.setattr(triton_tuned, "load_tunings", lambda *_: Tunings({LIBRARY: FASTER}))
    monkeypatch.setattr(triton_tuned, "find_processor", lambda _: Processor(132, 228 << 10, 90))
    monkeypatch.setattr(flashinfer_attention, "compile_kernels", compiled)
    monkeypatch.setattr(triton_tuned.torch, "empty", lambda *size, **_: torch.zeros(size, dtype=torch.bfloat16))
    told = []
    backend = triton_tuned.load_backend(CUDA, torch.bfloat16, 128, None, AttentionWish(setting), told.append)
    return backend, told


def test_auto_goes_on_with_ours_if_flashinfer_does_not_compile(log, version, monkeypatch):
    def fail(*_):
        raise RuntimeError("Could not find nvcc")

    backend, (choice,) = load(monkeypatch, "auto", fail)
    assert (backend.name, choice.name) == ("triton", "triton")
    assert "nvcc at first use" in choice.reason and "Could not find nvcc" in choice.reason
    with pytest.raises(ValueError, match=r"engine\.attention is flashinfer, which cannot be used: .*nvcc"):
        load(monkeypatch, "flashinfer", fail)


def test_what_was_chosen_is_what_the_backend_has(log, version, monkeypatch):
    backend, (choice,) = load(monkeypatch, "auto", lambda *_: None)
    assert (backend.name, choice.name) == ("triton+flashinfer", "flashinfer for prompts")
    assert backend.paged_attention._steps == {PROMPTS}
    assert backend.paged_attention._decode.programs == 396, "our kernels keep their tuning"
