"""ModelRunner: plans in, tokens out, against Hugging Face's greedy generation in fp32."""

import shutil
from dataclasses import replace

import pytest
import torch
from tiny_adapters import save_adapter
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.core.messages.commands import FetchFailed
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import AdapterLoad, AdapterMoves, Admission, PageCopy, ScheduledChunk, StepPlan
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner

BLOCK, NEW_TOKENS = 16, 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
PROMPTS = {"a": (5, 9, 33, 71, 2, 14, 8), "b": (61, 62, 63), "c": tuple(range(20, 43))}


SAMPLED = SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.3, logprobs=3, max_tokens=NEW_TOKENS)
"""With a seed that draws other tokens than the likeliest, and penalties that need the whole history."""


@pytest.fixture
def folder(tiny_llama):
    return tiny_llama


@pytest.fixture
def config(folder):
    return EngineConfig(
        str(folder), dtype="float32", device="cpu", num_pages=40, max_seqs=4, token_budget=64, threads=1
    )


def test_adapters_in_fp8_need_a_gpu(config):
    with pytest.raises(ValueError, match=r"engine\.adapter_dtype fp8 needs device cuda"):
        load(replace(config, adapter_dtype="fp8"))


@pytest.fixture
def runner(config):
    return ModelRunner(load(config))


def reference(folder, prompt, delta=None):
    """Greedy continuation by Hugging Face, with an adapter's `delta` added to the weights it names."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, value in (delta or {}).items():
            model.get_parameter(name).add_(value)
    prompt_ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    return tuple(model.generate(prompt_ids, **options)[0, len(prompt) :].tolist())


def execute(runner, plan):
    runner.submit(plan)
    return runner.collect()


class Driver:
    """A small planner: admits, computes chunks of at most `chunk` tokens, and keeps the pages."""

    def __init__(self, runner, chunk=5, pages=range(1, 40)):
        self.runner, self.size = runner, chunk
        self.free, self.tokens, self.computed, self.pages = list(pages), {}, {}, {}

    def admission(self, name, tokens, num_prompt=None, adapter_hash=None, params=GREEDY):
        self.tokens[name], self.computed[name], self.pages[name] = list(tokens), 0, []
        return Admission(name, tuple(tokens), num_prompt or len(tokens), 0, (), adapter_hash, params)

    def resumption(self, admission, num_computed, pages):
        """The admission of a sequence whose first tokens are computed, in pages taken from the free ones."""
        name, self.free = admission.request_id, [page for page in self.free if page not in pages]
        self.computed[name], self.pages[name] = num_computed, list(pages)
        return replace(admission, num_computed=num_computed, pages=tuple(pages))

    def chunk(self, name):
        start, known = self.computed[name], len(self.tokens[name])
        end = self.computed[name] = min(known, start + self.size)
        new = [self.free.pop(0) for _ in range(-(-end // BLOCK) - len(self.pages[name]))]
        self.pages[name] += new
        return ScheduledChunk(name, start, end - start, tuple(new), samples=end == known)

    def step(self, names, **deltas):
        result = execute(self.runner, StepPlan(chunks=tuple(self.chunk(name) for name in names), **deltas))
        for token in result.sampled:
            self.tokens[token.request_id].append(token.token)
        return result

    def finish(self, prompts, **deltas):
        """Steps until every request has NEW_TOKENS; {name: generated tokens}."""
        while running := [name for name in prompts if len(self.tokens[name]) < len(prompts[name]) + NEW_TOKENS]:
            self.step(running, **deltas)
            deltas = {}
        return {name: tuple(self.tokens[name][len(prompts[name]) :]) for name in prompts}

    def release(self, name):
        self.free = self.pages.pop(name) + self.free


def test_a_mixed_batch_equals_hugging_face(runner, folder):
    driver = Driver(runner)
    outputs = driver.finish(PROMPTS, admitted=tuple(driver.admission(*item) for item in PROMPTS.items()))
    assert outputs == {name: reference(folder, prompt) for name, prompt in PROMPTS.items()}


def test_a_preempted_request_resumes_in_reused_pages(runner, folder):
    """One plan releases `a` and hands its pages to `c`; then `a` starts again elsewhere from all its tokens."""
    prompts = {name: PROMPTS[name] for name in "ac"}
    driver = Driver(runner, chunk=7, pages=(3, 8, 1, 5, 6))
    driver.step(["a"], admitted=(driver.admission("a", PROMPTS["a"]),))
    driver.step(["a"])
    known = tuple(driver.tokens["a"])
    assert len(known) == len(PROMPTS["a"]) + 2
    driver.release("a")
    driver.step(["c"], released=("a",), preempted=("a",), admitted=(driver.admission("c", PROMPTS["c"]),))
    assert driver.pages["c"] == [3]
    resumed = driver.admission("a", known, num_prompt=len(PROMPTS["a"]))
    outputs = driver.finish(prompts, admitted=(resumed,))
    assert outputs == {name: reference(folder, prompt) for name, prompt in prompts.items()}


def test_prefix_cached_pages_are_not_computed_again(runner, folder):
    prompt = tuple(range(40, 76))
    driver = Driver(runner, chunk=64)
    driver.finish({"first": prompt}, admitted=(driver.admission("first", prompt),))
    shared = tuple(driver.pages["first"][:2])
    admission = driver.resumption(driver.admission("second", prompt), 2 * BLOCK, shared)
    outputs = driver.finish({"second": prompt}, released=("first",), admitted=(admission,))
    assert outputs["second"] == reference(folder, prompt)


def collect(driver, name, count, **deltas):
    """`count` SampledTokens of a request that runs alone."""
    sampled = []
    while len(sampled) < count:
        sampled += driver.step([name], **deltas).sampled
        deltas = {}
    return sampled


@pytest.mark.parametrize("saved", ["all it computed", "its full pages"])
def test_a_request_continues_from_pages_that_were_in_host_memory(runner, saved):
    """`c` is saved in the very plan that gives its pages to `a`, and returns to the same pages the other way round."""
    prompt, half = PROMPTS["c"], NEW_TOKENS // 2
    driver = Driver(runner, chunk=64)
    undisturbed = collect(driver, "c", NEW_TOKENS, admitted=(driver.admission("c", prompt, params=SAMPLED),))
    driver = Driver(runner, chunk=64, pages=(3, 8, 1))
    first = driver.admission("c", prompt, params=SAMPLED)
    sampled = collect(driver, "c", half, released=("c",), admitted=(first,))
    known, (low, high) = driver.tokens["c"], driver.pages["c"]
    saves = (PageCopy(low, 5), PageCopy(high, 2)) if saved == "all it computed" else (PageCopy(low, 5),)
    driver.release("c")
    other = driver.admission("a", (*range(40, 57),))
    driver.step(["a"], saves=saves, released=("c",), preempted=("c",), admitted=(other,))
    assert driver.pages["a"] == [low, high]
    driver.release("a")
    restores = tuple(PageCopy({low: high, high: low}[copy.page], copy.host_page) for copy in saves)
    num_computed = len(known) - 1 if len(saves) == 2 else BLOCK
    again = driver.admission("c", known, num_prompt=len(prompt), params=SAMPLED)
    again = driver.resumption(again, num_computed, [copy.page for copy in restores])
    sampled += collect(driver, "c", NEW_TOKENS - half, released=("a",), restores=restores, admitted=(again,))
    assert [item.token for item in sampled] == [item.token for item in undisturbed]
    assert any(item.token != item.logprobs.top[0][0] for item in sampled)
    if saved == "all it computed":  # otherwise the rest is computed again beside other rows, which may round otherwise
        assert sampled[half:] == undisturbed[half:]


def test_adapters_are_loaded_used_evicted_and_loaded_again(runner, folder, tmp_path):
    deltas = {name: save_adapter(tmp_path / name, rank, seed=rank) for name, rank in (("x", 3), ("y", 20))}
    hosts = {name: runner.load_host(str(tmp_path / name), lambda _: True) for name in deltas}
    assert [hosts[name].rank for name in "xy"] == [3, 20]
    assert hosts["x"].target_modules == ("q_proj", "down_proj")
    prompts = {"1": PROMPTS["a"], "2": PROMPTS["a"], "3": PROMPTS["a"]}
    expected = {"x": reference(folder, PROMPTS["a"], deltas["x"]), "y": reference(folder, PROMPTS["a"], deltas["y"])}
    expected["base"] = reference(folder, PROMPTS["a"])
    driver = Driver(runner)

    def plan(names):
        ids = [hosts[name].adapter_hash if name in hosts else None for name in names]
        return tuple(
            driver.admission(key, PROMPTS["a"], adapter_hash=adapter_hash)
            for key, adapter_hash in zip("123", ids, strict=True)
        )

    def load(name, pages):
        return AdapterLoad(hosts[name].adapter_hash, tuple(pages[: hosts[name].num_pages]))

    loads = (load("x", driver.free[::2]), load("y", driver.free[1::2]))
    driver.free = [page for page in driver.free if not any(page in item.pages for item in loads)]
    assert len(execute(runner, StepPlan(adapters=AdapterMoves(loads=loads))).load_seconds) == 2
    assert driver.finish(prompts, admitted=plan(("x", "base", "y"))) == dict(
        zip("123", (expected["x"], expected["base"], expected["y"]), strict=True)
    )
    again = load("x", [page for item in loads[::-1] for page in item.pages])
    moves = AdapterMoves(evicted=tuple(item.adapter_hash for item in loads), loads=(again,))
    execute(runner, StepPlan(released=tuple("123"), adapters=moves))
    outputs = driver.finish(prompts, admitted=plan(("base", "x", "x")))
    assert list(outputs.values()) == [expected["base"], expected["x"], expected["x"]]


def test_a_prompt_of_the_base_model_joins_an_adapter_that_decodes(runner, folder, tmp_path):
    """Its rows come after the adapter's own, which are the same from step to step, and stay the base model's."""
    delta, host = save_adapter(tmp_path / "x", 3, seed=3), runner.load_host(str(tmp_path / "x"), lambda _: True)
    driver = Driver(runner, chunk=64)
    load = AdapterLoad(host.adapter_hash, tuple(driver.free.pop() for _ in range(host.num_pages)))
    execute(runner, StepPlan(adapters=AdapterMoves(loads=(load,))))
    driver.step(["b"], admitted=(driver.admission("b", PROMPTS["b"], adapter_hash=host.adapter_hash),))
    driver.step(["b"])
    prompts = {name: PROMPTS[name] for name in "bc"}
    outputs = driver.finish(prompts, admitted=(driver.admission("c", PROMPTS["c"]),))
    assert outputs == {"b": reference(folder, PROMPTS["b"], delta), "c": reference(folder, PROMPTS["c"])}


def test_an_adapter_is_packed_if_its_claim_is_granted(runner, tmp_path):
    save_adapter(tmp_path / "x", 8, 1)
    answers, asked = [], []
    runner.connect(answers.append)
    host = runner.load_host(str(tmp_path / "x"), lambda adapter: asked.append(adapter))
    assert (asked, answers, runner.loaded.host_adapters.num_bytes) == ([host], [], 0)
    assert runner.load_host(str(tmp_path / "x"), lambda _: True) == host
    layout = runner.loaded.host_adapters.get(host.adapter_hash).layout.num_bytes
    assert runner.loaded.host_adapters.num_bytes == host.num_bytes == host.num_pages * runner.facts.page_bytes + layout
    assert [answer.adapter_hash for answer in answers] == [host.adapter_hash]


def test_a_claim_that_is_granted_is_answered_whatever_happens(runner, tmp_path, monkeypatch):
    save_adapter(tmp_path / "x", 8, 1)
    answers = []
    runner.connect(answers.append)
    monkeypatch.setattr("engine.model.adapters.packing.Packer.pack", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.load_host(str(tmp_path / "x"), lambda _: True)
    assert [type(answer) for answer in answers] == [FetchFailed]


def test_a_load_of_an_unknown_adapter_is_an_error(runner):
    with pytest.raises(KeyError, match="unknown"):
        execute(runner, StepPlan(adapters=AdapterMoves(loads=(AdapterLoad("unknown", (1,)),))))


def test_a_released_request_leaves_nothing_behind(runner):
    driver = Driver(runner)
    driver.step(["a"], admitted=(driver.admission("a", PROMPTS["a"]),))
    execute(runner, StepPlan(released=("a",)))
    assert len(runner._requests.batch) == 0
    with pytest.raises(KeyError):
        runner.loaded.sampler.remove("a")


def test_aborts_of_requests_that_never_ran_are_ignored(runner):
    result = execute(runner, StepPlan(released=("never seen",)))
    assert (result.sampled, result.load_seconds) == ((), ())


def test_describes_itself(runner, config, folder):
    facts = runner.facts
    assert (facts.vocab_size, facts.max_model_len, facts.config.block_size) == (97, 128, BLOCK)
    assert runner.loaded.num_pages == 40
    assert runner.facts.page_bytes == 2 * 2 * BLOCK * 2 * 16 * 4
    assert runner.facts.eos_token_ids == (2, 3)
    assert (runner.facts.device.type, runner.facts.dtype, runner.facts.weights) == ("cpu", torch.float32, "fp32")
    assert runner.facts.model_hash == load(config).facts.model_hash


def test_the_model_hash_follows_the_weights(config, tmp_path):
    shutil.copy(f"{config.model}/config.json", tmp_path)
    dummy = replace(config, model=str(tmp_path), load_format="dummy")
    hashes = {load(replace(dummy, seed=seed)).facts.model_hash for seed in (0, 0, 1)}
    quantised = load(replace(dummy, weights="int8")).facts
    assert quantised.weights == "int8"
    assert len(hashes | {load(config).facts.model_hash, quantised.model_hash}) == 4


def test_progress_is_told(config):
    told = []
    load(config, on_progress=lambda *news: told.append(news))
    assert [call for call in told if call[0] == "loading weights"] == [
        ("loading weights", 1, 2),
        ("loading weights", 2, 2),
    ]


def test_memory_sizes_the_pool(config):
    page_bytes = load(config).facts.page_bytes
    sized = load(replace(config, num_pages=0, memory_gb=10.5 * page_bytes / 2**30))
    assert sized.num_pages == 10
    with pytest.raises(ValueError, match="fewer than two pages"):
        load(replace(config, num_pages=0, memory_gb=1.5 * page_bytes / 2**30))


def test_host_memory_for_pages_is_sized(config, monkeypatch):
    page_bytes = load(config).facts.page_bytes
    assert load(replace(config, swap_gb=7.5 * page_bytes / 2**30)).num_host_pages == 7
    assert load(replace(config, swap_gb=0)).num_host_pages == 0
    monkeypatch.setattr("engine.model.memory.allocation.free_host_bytes", lambda: 20 * page_bytes)
    assert load(config).num_host_pages == 5


def test_eight_bit_kv_is_refused_where_nothing_reads_it(config):
    with pytest.raises(ValueError, match=r"engine\.kv_dtype fp8 needs a GPU"):
        load(replace(config, kv_dtype="fp8"))
    with pytest.raises(ValueError, match=r"engine\.kv_dtype must be one of auto, fp8"):
        replace(config, kv_dtype="int4")


def test_too_long_a_context_is_refused(config):
    with pytest.raises(ValueError, match="max_model_len is 129, the model was made for 128"):
        load(replace(config, max_model_len=129))
