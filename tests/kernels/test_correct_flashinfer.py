"""The GPU suite's checks of FlashInfer and the tuner's choice of a library, over a stand-in for FlashInfer."""

import time

import correct_flashinfer
import pytest
import torch
from correct_flashinfer import flashinfer_checks

from benchmarks.gpu import flashinfer_steps, tunables
from benchmarks.gpu.journal import Journal, read_journal
from benchmarks.gpu.tuner import tune
from lora_kernels import attention_choice
from lora_kernels.attention_choice import FEW_DECODES, LIBRARY, PROMPTS, AttentionWish, choose_attention
from lora_kernels.gpu.flashinfer_attention import FlashInferAttention
from lora_kernels.gpu.flashinfer_plans import list_pages
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_tuned import DEFAULTS
from lora_kernels.tuning import DeviceKey, load_tunings, save_choices
from tests.kernels import flashinfer_standin

CPU, DEVICE = torch.device("cpu"), DeviceKey("NVIDIA H100 80GB HBM3", 90, "3.9.0")


class Replays:
    """A recorder that calls what it recorded again, while the host checks and plans nothing."""

    def record(self, launch):
        launch()

        def again():
            flashinfer_standin.LOG.replaying = True
            launch()
            flashinfer_standin.LOG.replaying = False

        return again


@pytest.fixture
def log(monkeypatch):
    for module in (attention_choice, tunables, correct_flashinfer, flashinfer_steps):
        monkeypatch.setattr(module, "installed_flashinfer", lambda: "0.7.2")
    monkeypatch.setattr(PagedAttention, "__call__", by_stand_in)
    with flashinfer_standin.installed() as found:
        yield found


def by_stand_in(self, query, kv, batch, scores, window=None, kv_scales=None):
    """Our kernels, which cannot run here, give the same bits as those that they are compared with."""
    lists, out = list_pages(batch, kv.shape[2]), torch.empty_like(query)
    parts = (part.tolist() for part in (lists.query_starts, lists.starts, lists.last))
    flashinfer_standin._attend(query, kv, out, *parts, lists.pages, -1, scores.scale, scores.cap or 0.0)
    return out


def test_every_check_of_flashinfer_passes_on_right_kernels(log):
    checks = dict(flashinfer_checks(True, CPU, Replays()))
    assert [name for name in checks if "replayed" in name] == [
        f"{kind}, replayed, window {window}" for kind in ("decodes", "prompts beside decodes") for window in (None, 6)
    ]
    for check in checks.values():
        assert check() < 1e-5


def test_every_check_of_flashinfer_fails_on_wrong_kernels(log, monkeypatch):
    """Here they see one token of a context too few."""
    attend = flashinfer_standin._attend
    monkeypatch.setattr(
        flashinfer_standin,
        "_attend",
        lambda q, kv, out, rows, starts, last, *rest: attend(
            q, kv, out, rows, starts, [count - (count > 1) for count in last], *rest
        ),
    )
    for _, check in flashinfer_checks(True, CPU, Replays()):
        with pytest.raises(AssertionError, match="relative error"):
            check()


def test_a_plan_that_is_not_renewed_is_found(log, monkeypatch):
    monkeypatch.setattr("lora_kernels.gpu.flashinfer_plans.StepWrappers.plan_all", lambda self: None)
    for name, check in flashinfer_checks(True, CPU, Replays()):
        if "replayed" in name:
            with pytest.raises(RuntimeError, match="plans nothing"):
                check()


def test_rows_of_section_c(log, tmp_path):
    journal = Journal(tmp_path / "j", time.monotonic() + 600, True, "cpu")
    flashinfer_steps.run(journal)
    found = read_journal(journal.path)
    assert found.failures == []
    rows = found.rows["FlashInfer as a backend"]
    assert [name for name, _ in rows] == ["2 of 20", "chunk of 4 at 12"]
    assert all(row["plan us"] > 0 < row["times faster"] for _, row in rows)


def test_without_flashinfer_it_is_left_out(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j", time.monotonic() + 600, True, "cpu")
    for module in (correct_flashinfer, flashinfer_steps):
        monkeypatch.setattr(module, "installed_flashinfer", lambda: None)
        module.run(journal)
    assert read_journal(journal.path).notes == ["left out: flashinfer is not installed"] * 2
    monkeypatch.setattr(tunables, "installed_flashinfer", lambda: None)
    assert list(tunables.all_subjects([LIBRARY], CPU)) == []


def test_the_tuner_chooses_the_library_that_auto_takes(log, tmp_path):
    """FlashInfer is faster here, except for a few decodes."""

    def us(runs):
        is_fast = isinstance(runs[0].func, FlashInferAttention) and len(runs[0].args[0]) > 2
        return 1.0 if is_fast else 2.0

    told = []
    for subject in tunables.all_subjects([LIBRARY], CPU):
        choice = tune(subject, us, told.append)
        save_choices(DEVICE, {subject.kernel: {subject.shape: choice}}, tmp_path, DEFAULTS)
    assert len(log.runs) > 0 and not any("WRONG" in text or "not usable" in text for text in told)
    tunings = load_tunings(DEVICE, DEFAULTS, tmp_path)
    chosen = choose_attention(AttentionWish(), torch.device("cuda"), torch.bfloat16, 128, tunings, "16 float32")
    assert chosen.steps == set(attention_choice.STEP_CLASSES) - {FEW_DECODES}
    assert PROMPTS in chosen.steps
