"""Steps on tapes: tokens and logprobs are bitwise what they are when every kernel is started by itself."""

from collections import Counter
from functools import partial

import pytest
import torch
from peft_folders import TARGETS, base_model
from peft_folders import save_adapter as save_peft_adapter
from test_experts import save_old_adapter
from tiny_adapters import Q_PROJ, save_adapter
from tiny_families import save_model
from transformers import AutoModelForCausalLM, MistralConfig

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.steps.forward import Steps
from engine.model.steps.tapes import TapedDecoder
from lora_kernels.cpu.numba_tape import Tape

SIZES = {"block_size": 16, "num_pages": 40, "max_seqs": 4, "max_model_len": 64}
GREEDY = SamplingParams(14, temperature=0.0, ignore_eos=True, logprobs=3)
DRAWN = SamplingParams(9, temperature=1.1, seed=5, ignore_eos=True, logprobs=1)
packs = pytest.mark.usefixtures("packed_linears")


def make_runner(model, threads=1, **options):
    config = {"dtype": "bfloat16", "device": "cpu", "max_resident_adapters": 2, "threads": threads, **SIZES, **options}
    runner = ModelRunner(load(EngineConfig(str(model), **config)))
    runner.loaded.arena.pages[1:] = torch.nan
    return runner


def untaped(runner):
    forward = partial(runner.loaded.decoder.run, arena=runner.loaded.arena, backend=runner.loaded.backend)
    runner._steps = Steps(forward, runner.loaded.sampler.last_tokens)
    return runner


def taped_decoder(runner):
    """Return the decoder that records the runner's steps, or None if they are not recorded."""
    owner = getattr(runner._steps._forward, "__self__", None)
    return owner if isinstance(owner, TapedDecoder) else None


def serve(runner, adapters):
    """{request: its tokens and logprobs}. Requests come and go, at first for the base, then for more adapters than the
    device has slots for."""
    core = CoreConfig(**SIZES, token_budget=16, max_resident_adapters=2)
    ticks = iter(range(10**9))
    engine = Engine(EngineState.create(core), runner, clock=lambda: next(ticks) / 1000)
    versions = [None, *(engine.load_adapter(str(path)).adapter_hash for path in adapters)]
    found = {}
    for wave in range(4):
        for number in range(5):
            name, version = f"{wave}-{number}", versions[(wave + number) % len(versions)] if wave else None
            prompt = tuple(range(5 + number, 12 + 3 * number + wave))
            engine.inbox.put(Submit(Request(name, prompt, DRAWN if number == 2 else GREEDY, version)))
        for _ in range(11):
            _step(engine, found)
    while engine.state.has_work:
        _step(engine, found)
    assert leftovers(engine.state) == [] and engine.state.counters.adapters.evictions > 0
    return found


def _step(engine, found):
    for event in engine.step():
        found.setdefault(event.request_id, []).extend(zip(event.tokens, event.logprobs, strict=True))
    assert violations(engine.state) == []


@pytest.fixture
def adapters(tmp_path):
    for number, rank in enumerate((3, 16, 40)):
        save_adapter(tmp_path / f"adapter-{number}", rank, seed=number)
    return sorted(tmp_path.glob("adapter-*"))


@pytest.fixture
def played(monkeypatch):
    """How often a tape was played, by its number of calls."""
    count, play = Counter(), Tape.play

    def counted(tape):
        count[tape.num_calls] += 1
        play(tape)

    monkeypatch.setattr(Tape, "play", counted)
    return count


@pytest.fixture
def threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@packs
@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("threads", [1, 2])
def test_they_say_what_single_kernels_say(tiny_llama, adapters, played, threads):
    expected = serve(untaped(make_runner(tiny_llama, threads)), adapters)
    assert not played
    assert serve(make_runner(tiny_llama, threads), adapters) == expected
    assert len(played) == 2 and min(played.values()) > 5, "with adapters and without, which are fewer calls"


@packs
@pytest.mark.usefixtures("threads_as_before")
def test_layers_that_see_a_window_have_plans_of_their_own(tmp_path, adapters, played):
    """Both layers see only the last nine tokens, as Mistral's do."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, sliding_window=9,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    expected = serve(untaped(make_runner(tmp_path / "model")), adapters)
    assert serve(make_runner(tmp_path / "model"), adapters) == expected
    assert played


KINDS = {
    "all": {"target_modules": list(TARGETS)},
    "dora": {"use_dora": True},
    "one layer": {"layers_to_transform": 1, "r": 9},
    "two layers": {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": [0, 2]},
}


@packs
@pytest.mark.usefixtures("threads_as_before")
def test_adapters_that_touch_other_parts_and_some_that_cannot_be_recorded(tmp_path, played):
    """Linears with biases, too. Steps with DoRA are launched kernel by kernel, between others that are not."""
    base_model().save_pretrained(tmp_path / "model")
    for name, options in KINDS.items():
        save_peft_adapter(tmp_path / name, size=0.3, **options)
    adapters = [tmp_path / name for name in KINDS]
    expected = serve(untaped(make_runner(tmp_path / "model")), adapters)
    assert serve(make_runner(tmp_path / "model"), adapters) == expected
    assert len(played) == 2


@packs
@pytest.mark.usefixtures("threads_as_before")
def test_tapes_are_as_many_as_there_are_sizes(tiny_llama, adapters, monkeypatch):
    runner = make_runner(tiny_llama)
    serve(runner, adapters)
    decoder = taped_decoder(runner)
    assert 4 < len(decoder._tapes) <= 2 * SIZES["max_seqs"]
    assert len(decoder._workspace._pieces) < 20, "layers use each other's memory"
    monkeypatch.setattr("engine.model.steps.tapes.MAX_TAPES", 2)
    few = make_runner(tiny_llama)
    assert serve(few, adapters) == serve(untaped(make_runner(tiny_llama)), adapters)
    assert len(taped_decoder(few)._tapes) == 2


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("family", ["qwen3", "granite", "olmo2", "gemma2", "gemma3"])
def test_every_family_is_recorded(family, tmp_path, adapters, played):
    """Norms of queries and keys, norms after attention and MLP or no norms before these, and factors and bounds of
    scores, residuals and logits are on tapes, too, or are computed after them."""
    save_model(family, tmp_path / "model", head_dim=16)
    expected = serve(untaped(make_runner(tmp_path / "model", weights="int8")), adapters)
    assert serve(make_runner(tmp_path / "model", weights="int8"), adapters) == expected
    assert sum(played.values()) > 20


@pytest.fixture
def fp32_linears(monkeypatch):
    """Our fp32 linears, also where oneDNN's are preferred."""
    monkeypatch.setattr("lora_kernels.cpu.numba_dense.computes_fp32", lambda: True)


@pytest.mark.usefixtures("threads_as_before", "fp32_linears")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_recorded(family, tmp_path, played):
    """Rows of adapters that change experts, of one that changes attention alone, and of none: three kinds of tapes."""
    save_model(family, tmp_path / "model", head_dim=16)
    for seed in (1, 2):
        save_old_adapter(family, tmp_path / f"adapter-{seed}", seed)
    save_adapter(tmp_path / "adapter-3", 16, 3, [Q_PROJ])
    adapters, options = sorted(tmp_path.glob("adapter-*")), {"threads": 2, "dtype": "float32"}
    expected = serve(untaped(make_runner(tmp_path / "model", **options)), adapters)
    assert not played
    assert serve(make_runner(tmp_path / "model", **options), adapters) == expected
    assert len(played) == 3 and sum(played.values()) > 20


@pytest.mark.usefixtures("threads_as_before", "fp32_linears")
def test_sinks_and_biased_and_bounded_experts_are_recorded(tmp_path, played):
    save_model("gpt_oss", tmp_path / "model")
    for seed in range(3):
        save_adapter(tmp_path / f"adapter-{seed}", 5, seed, [Q_PROJ])
    adapters = sorted(tmp_path.glob("adapter-*"))
    expected = serve(untaped(make_runner(tmp_path / "model", dtype="float32")), adapters)
    assert serve(make_runner(tmp_path / "model", dtype="float32"), adapters) == expected
    assert len(played) == 2


@pytest.mark.usefixtures("threads_as_before")
def test_no_step_is_recorded_in_which_torch_computes(tiny_llama, tmp_path, fp32_linears, monkeypatch):
    """torch adds what Qwen 2's MLP beside experts computes, and computes quantised experts one by one; other linears in
    fp32 are oneDNN's."""
    assert taped_decoder(make_runner(tiny_llama, dtype="float32"))
    save_model("qwen2_moe", tmp_path / "shared")
    assert taped_decoder(make_runner(tmp_path / "shared", dtype="float32")) is None
    save_model("qwen3_moe", tmp_path / "experts", moe_intermediate_size=64)
    assert taped_decoder(make_runner(tmp_path / "experts", dtype="float32", weights="int8")) is None
    monkeypatch.setattr("lora_kernels.cpu.numba_dense.computes_fp32", lambda: False)
    assert taped_decoder(make_runner(tiny_llama, dtype="float32")) is None
