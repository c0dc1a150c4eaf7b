"""The store of tuned configurations, and the tuner with a clock that is told what to say."""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import tunables
from benchmarks.gpu.tuner import Subject, tune
from lora_kernels.gpu import triton_attention, triton_tuned
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.tuning import Choice, DeviceKey, TuningError, Tunings, load_tunings, save_choices, tuned_path

DEVICE = DeviceKey("NVIDIA H100 80GB HBM3", 90, "3.6.0")
ROOT, CPU = Path(__file__).parents[2], torch.device("cpu")
DEFAULTS_OF = triton_tuned.DEFAULTS
DEFAULTS = {"shrink": {"block": 128, "warps": 4}, "decode": {"splits": 8}}
FAST = Choice({"block": 256, "warps": 8}, us=3.0, default_us=4.5)


@dataclass(frozen=True)
class ShrinkTuning:
    block: int = 128
    warps: int = 4


def test_what_is_saved_is_found_again(tmp_path):
    save_choices(DEVICE, {"shrink": {"4096x16": FAST}}, tmp_path, DEFAULTS)
    save_choices(DEVICE, {"decode": {"128": Choice({"splits": 16}, 1.0, 2.0)}}, tmp_path, DEFAULTS)
    tunings = load_tunings(DEVICE, DEFAULTS, tmp_path)
    assert tunings.find("shrink", "4096x16", DEFAULTS["shrink"]) == {"block": 256, "warps": 8}
    assert tunings.find("decode", "128", DEFAULTS["decode"]) == {"splits": 16}
    assert tunings.apply("shrink", "4096x16", ShrinkTuning()) == ShrinkTuning(256, 8)
    assert tunings.apply("shrink", "other", ShrinkTuning()) == ShrinkTuning()


def test_without_any_file_the_default_holds(tmp_path):
    assert load_tunings(DEVICE, DEFAULTS, tmp_path) == Tunings()
    assert Tunings().find("decode", "128", {"splits": 8}) == {"splits": 8}


def test_this_machines_measurements_come_before_shipped_ones(tmp_path):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    slow = Choice({"block": 64, "warps": 2}, 4.0, 4.5)
    path = save_choices(DEVICE, {"shrink": {"a": slow, "b": slow}}, tmp_path, DEFAULTS)
    shipped.mkdir()
    path.rename(shipped / path.name)
    save_choices(DEVICE, {"shrink": {"a": FAST}}, own, DEFAULTS)
    tunings = load_tunings(DEVICE, DEFAULTS, own, shipped)
    assert tunings.choices["shrink"] == {"a": FAST, "b": slow}
    assert load_tunings(DEVICE, DEFAULTS, None, shipped).choices["shrink"] == {"a": slow, "b": slow}


@pytest.mark.parametrize("other", [DeviceKey("NVIDIA H200", 90, "3.6.0"), DeviceKey(DEVICE.name, 90, "3.9.0")])
def test_another_device_or_triton_has_a_file_of_its_own(tmp_path, other):
    save_choices(DEVICE, {"shrink": {"a": FAST}}, tmp_path, DEFAULTS)
    assert load_tunings(other, DEFAULTS, tmp_path) == Tunings()
    tuned_path(tmp_path, DEVICE).rename(tuned_path(tmp_path, other))
    with pytest.raises(TuningError, match=f"{other.file_name} is of"):
        load_tunings(other, DEFAULTS, tmp_path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda d: d["kernels"].update(bogus={}), "unknown kernel 'bogus'"),
        (lambda d: d.update(extra=1), "the file must have exactly"),
        (lambda d: d["kernels"]["shrink"]["a"]["config"].update(tile=8), r"shrink at a must have exactly"),
        (lambda d: d["kernels"]["shrink"]["a"]["config"].pop("warps"), r"shrink at a must have exactly"),
        (lambda d: d["kernels"]["shrink"]["a"].update(note="x"), r"shrink at a must have exactly"),
        (lambda d: d["kernels"]["shrink"]["a"]["config"].update(warps="8"), "must be a whole number, not '8'"),
        (lambda d: d["kernels"]["shrink"]["a"]["config"].update(warps=True), "must be a whole number, not True"),
        (lambda d: d["kernels"]["shrink"].update(a=[1]), r"shrink at a must have exactly"),
    ],
)
def test_a_spoiled_file_is_refused_by_name(tmp_path, spoil, reason):
    path = save_choices(DEVICE, {"shrink": {"a": FAST}}, tmp_path, DEFAULTS)
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(TuningError, match=reason) as caught:
        load_tunings(DEVICE, DEFAULTS, tmp_path)
    assert str(path) in str(caught.value)
    with pytest.raises(TuningError):
        save_choices(DEVICE, {"decode": {"x": Choice({"splits": 2}, 1, 1)}}, tmp_path, DEFAULTS)


def test_a_damaged_file_is_refused_and_nothing_unknown_is_written(tmp_path):
    with pytest.raises(TuningError, match="unknown kernel"):
        save_choices(DEVICE, {"bogus": {"a": FAST}}, tmp_path, DEFAULTS)
    assert not tuned_path(tmp_path, DEVICE).exists()
    path = save_choices(DEVICE, {"shrink": {"a": FAST}}, tmp_path, DEFAULTS)
    path.write_text(path.read_text()[:40])
    with pytest.raises(TuningError, match="is not JSON"):
        load_tunings(DEVICE, DEFAULTS, tmp_path)


class Bench:
    """A kernel that adds one, in as many microseconds as `us` says; wrong, or not to be launched, where it says so."""

    def __init__(self, us):
        self.us, self.launched = us, []

    def subject(self, **variants):
        return Subject("shrink", "a", {"block": 128, "warps": 4}, variants, self.prepare)

    def prepare(self, config):
        if config["block"] == 3:
            raise ValueError("block must be a power of two, not 3")
        return [lambda: self.launch(config)]

    def launch(self, config):
        if config["block"] == 4096:
            raise RuntimeError("out of resource: shared memory")
        self.launched.append(config)
        return torch.ones(4) + (2 if config["warps"] == 16 else 1)

    def time(self, runs):
        runs[0]()
        return self.us(**self.launched[-1])


def tuned(us, **variants):
    told, bench = [], Bench(us)
    return tune(bench.subject(**variants), bench.time, told.append), told


def test_each_parameter_is_chosen_given_those_before_it():
    def us(block, warps):
        return {(128, 4): 10.0, (256, 4): 8.0, (256, 8): 5.0, (128, 8): 4.0}[block, warps]

    choice, told = tuned(us, block=(128, 256), warps=(4, 8))
    assert choice == Choice({"block": 256, "warps": 8}, 5.0, 10.0)
    assert told[0] == "shrink at a: default 10.0 us"
    assert told[-1].startswith("shrink at a: 2.00 times as fast")


def test_a_gain_within_noise_changes_nothing():
    choice, _ = tuned(lambda block, warps: 9.9 if block == 256 else 10.0, block=(256,))
    assert choice == Choice({"block": 128, "warps": 4}, 10.0, 10.0)


def test_what_is_wrong_or_does_not_run_never_wins():
    choice, told = tuned(lambda block, warps: 10.0 if (block, warps) == (128, 4) else 1.0, block=(3, 4096), warps=(16,))
    assert choice == Choice({"block": 128, "warps": 4}, 10.0, 10.0)
    assert any("block must be a power of two" in text for text in told)
    assert any("shared memory" in text for text in told)
    assert any("WRONG" in text for text in told)


def test_a_default_that_does_not_run_is_an_error():
    bench = Bench(lambda **_: 1.0)
    with pytest.raises(RuntimeError, match="shared memory"):
        tune(Subject("shrink", "a", {"block": 4096, "warps": 4}, {}, bench.prepare), bench.time, print)


def test_what_was_tuned_is_what_kernels_are_launched_with():
    processor = triton_attention.find_processor(CPU)
    own = asdict(triton_attention.decode_tuning(128, torch.bfloat16, processor))
    choices = {
        triton_tuned.LORA_SHORT: {"bfloat16": Choice({**DEFAULTS_OF[triton_tuned.LORA_SHORT], "tile_k": 32}, 1, 2)},
        triton_tuned.LORA_LONG: {"bfloat16": Choice({**DEFAULTS_OF[triton_tuned.LORA_LONG], "long_k": 128}, 1, 2)},
        triton_tuned.DECODE: {"128 bfloat16": Choice({**own, "num_stages": 2}, 1, 2)},
    }
    backend = triton_tuned.tuned_backend(Tunings(choices), CPU, torch.bfloat16, 128, torch.bfloat16)
    assert backend.lora_tuning == replace(LoraTuning(), tile_k=32, long_k=128)
    kv = torch.empty(1, 2, 16, 8, 128, dtype=torch.bfloat16)
    assert asdict(backend.paged_attention.decode_tuning(kv)) == {**own, "num_stages": 2}
    assert triton_tuned.lora_tuning(Tunings(choices), torch.float16, processor) == LoraTuning()
    hopper = replace(processor, capability=90)
    assert triton_tuned.lora_tuning(Tunings(), torch.float16, hopper) == LoraTuning(early=1)


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_attention_is_launched_with_what_was_tuned_for_the_dtype_of_its_kv(monkeypatch, fp8_kv):
    """An engine with FP8 KV once launched what was tuned for KV in the model's dtype."""
    hopper = triton_attention.Processor(132, 228 << 10, 90)
    dtypes = {torch.bfloat16: 2, torch.float8_e4m3fn: 8}
    own = {dtype: triton_attention.decode_tuning(128, dtype, hopper) for dtype in dtypes}
    tuned = {dtype: replace(own[dtype], num_warps=warps) for dtype, warps in dtypes.items()}
    shapes = {f"128 {str(dtype)[6:]}": Choice(asdict(tuning), 1, 2) for dtype, tuning in tuned.items()}
    monkeypatch.setattr(triton_tuned, "device_key", lambda _: DEVICE)
    monkeypatch.setattr(triton_tuned, "load_tunings", lambda *_: Tunings({triton_tuned.DECODE: shapes}))
    monkeypatch.setattr(triton_tuned, "find_processor", lambda _: hopper)
    attention = triton_tuned.load_backend(torch.device("cuda"), torch.bfloat16, 128, None, fp8_kv).paged_attention
    stored = list(dtypes)[fp8_kv]
    kv = torch.empty(1, 2, 16, 8, 128, dtype=stored)
    assert own[torch.bfloat16] != own[torch.float8_e4m3fn]
    assert attention.decode_tuning(kv) == tuned[stored]
    assert attention.prefill_tuning(kv) == triton_attention.prefill_tuning(128, stored, hopper)


@pytest.mark.parametrize("kernel", [triton_tuned.DECODE, triton_tuned.PREFILL])
def test_attention_is_tuned_for_both_dtypes_of_kv(kernel):
    subjects = tunables.all_subjects([kernel], CPU)
    assert [subject.shape for subject in subjects] == ["16 float32", "16 float8_e4m3fn"]


@pytest.mark.parametrize("kernel", tunables.VARIANTS)
def test_everything_the_tuner_varies_can_be_stored(kernel):
    assert set(tunables.VARIANTS[kernel]) <= set(DEFAULTS_OF[kernel])
    assert set(tunables.VARIANTS) == set(DEFAULTS_OF)


def test_without_cuda_there_is_nothing_to_tune_for():
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu.tune"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "no CUDA device" in done.stderr) == (2, True)
