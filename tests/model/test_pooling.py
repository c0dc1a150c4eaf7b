"""Vectors against Hugging Face and PEFT: the hidden states after the final norm, of base and adapters, beside chats
whose answers stay the same, with prompts in several chunks and requests that are preempted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tiny_adapters import save_adapter
from tiny_engine import TinyEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.core.config import Scheduling
from engine.core.messages.commands import Abort
from engine.core.messages.requests import FinishReason, Lane, Pooling, PoolingKind, SamplingParams
from engine.demo import DEMO_ADAPTERS
from engine.model.batch.rows import PooledChunk
from engine.model.sample.pooler import Pooler
from lab.demo.characters import CHARACTERS

ASKS = {
    "last": Pooling(normalize=False),
    "mean": Pooling(PoolingKind.MEAN, normalize=False),
    "unit": Pooling(),
    "short": Pooling(PoolingKind.MEAN, dimensions=32),
}
PROMPTS = ([5], [7, 8, 9], list(range(10, 30)), list(range(4, 90)))
"""Prompts for the tiny model: of one token, of one chunk, and of several chunks."""
LANES = (Lane.INTERACTIVE, Lane.BATCH)


class Run(TinyEngine):
    """An engine and the vectors that it returned."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.vectors = {}

    def embed(self, name, prompt, pooling, model="base", lane=Lane.INTERACTIVE):
        self.ask(name, prompt, SamplingParams(max_tokens=0), model, lane, pooling)

    def step(self):
        events = super().step()
        for event in events:
            if event.finish_reason is FinishReason.POOLED:
                assert event.request_id not in self.vectors and not event.tokens
                self.vectors[event.request_id] = np.frombuffer(event.vector, "<f4")
        return events


@torch.inference_mode()
def states(model, prompt):
    """Hidden states [num_tokens, hidden_size] after the final norm."""
    return model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].numpy()


def check(vector, hidden, pooling, what):
    want = hidden[-1] if pooling.kind is PoolingKind.LAST else hidden.mean(axis=0, dtype=np.float64)
    want = want[: pooling.dimensions or None]
    length = 1.0 if pooling.normalize else np.linalg.norm(want)
    assert vector.shape == want.shape
    assert vector @ want / (np.linalg.norm(vector) * np.linalg.norm(want)) > 0.99999, what
    np.testing.assert_allclose(np.linalg.norm(vector), length, rtol=1e-3)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "one"
    return folder, save_adapter(folder, 3, seed=1)


@pytest.fixture(scope="module")
def hidden(tiny_llama, adapter):
    """Hidden states of the tiny model by model and number of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    found = {"base": [states(model, prompt) for prompt in PROMPTS]}
    with torch.no_grad():
        for name, change in adapter[1].items():
            model.get_parameter(name).add_(change)
    return found | {"adapter": [states(model, prompt) for prompt in PROMPTS]}


def ask_everything(run):
    for index, prompt in enumerate(PROMPTS):
        for model in run.adapters:
            for name, pooling in ASKS.items():
                run.embed(f"{index}/{model}/{name}", prompt, pooling, model, LANES[index % 2])


def check_everything(run, hidden):
    assert len(run.vectors) == len(PROMPTS) * len(run.adapters) * len(ASKS)
    for name, vector in run.vectors.items():
        index, model, ask = name.split("/")
        check(vector, hidden[model][int(index)], ASKS[ask], name)


def chat(run):
    for index, prompt in enumerate(PROMPTS):
        run.chat(f"chat {index}", prompt, ("base", "adapter")[index % 2], LANES[index // 2])


@pytest.fixture(scope="module")
def alone(tiny_llama, adapter):
    run = Run(tiny_llama, adapter[0])
    chat(run)
    return run.finish().texts


def test_vectors_are_those_of_hugging_face_beside_chats_whose_texts_stay(tiny_llama, adapter, hidden, alone):
    run = Run(tiny_llama, adapter[0])
    chat(run)
    run.step()
    ask_everything(run)
    run.finish()
    check_everything(run, hidden)
    assert run.texts == alone


@pytest.mark.parametrize("preemption", ["recompute", "swap", "checkpoint"])
def test_preempted_requests_for_vectors_begin_anew(tiny_llama, adapter, hidden, preemption):
    run = Run(tiny_llama, adapter[0], Scheduling(preemption=preemption), num_pages=40)
    run.embed("mean", PROMPTS[3], ASKS["mean"], lane=Lane.BATCH)
    run.embed("last", PROMPTS[3], ASKS["last"], "adapter", lane=Lane.BATCH)
    while sum(seq.num_computed > 8 for seq in run.engine.state.running.values()) < 1:
        run.step()
    run.chat("chat", list(range(60)))
    run.chat("another", list(range(1, 61)))
    run.finish()
    assert run.engine.state.counters.preemptions > 0
    check(run.vectors["mean"], hidden["base"][3], ASKS["mean"], "mean")
    check(run.vectors["last"], hidden["adapter"][3], ASKS["last"], "last")


def test_no_kv_is_kept_or_shared(tiny_llama, adapter):
    run = Run(tiny_llama, adapter[0])
    run.chat("chat", PROMPTS[3])
    cached = set(run.finish().engine.state.prefix.key_of.values())
    assert cached
    run.embed("mean", PROMPTS[3], ASKS["mean"])
    run.embed("last", PROMPTS[3][::-1], ASKS["last"], lane=Lane.BATCH)
    run.chat("not after the mean", PROMPTS[3][::-1])  # which would promise its pages
    run.finish()
    run.chat("again", PROMPTS[3])
    run.finish()
    assert not run.cached["mean"] and not run.cached["last"] and not run.cached["not after the mean"]
    assert run.cached["again"] == 84, "chats share as before"
    pooler = run.runner.loaded.pooler
    pooler.warm_up(torch.float32)
    assert not pooler._sums and not pooler._entries


def test_an_abort_in_the_middle_of_a_mean_leaves_nothing(tiny_llama, adapter, hidden):
    run = Run(tiny_llama, adapter[0])
    run.embed("mean", PROMPTS[3], ASKS["mean"])
    for _ in range(3):
        run.step()
    assert run.runner.loaded.pooler._sums
    run.engine.inbox.put(Abort("mean"))
    run.finish()
    run.embed("mean", PROMPTS[3], ASKS["mean"])
    run.finish()
    check(run.vectors["mean"], hidden["base"][3], ASKS["mean"], "the same id again")


def test_a_sum_keeps_no_memory_of_the_other_requests_of_its_step():
    pooler = Pooler(lambda rows: rows, 8, 4, torch.device("cpu"))
    pooler.add("part", Pooling(PoolingKind.MEAN, normalize=False), 4)
    pooler.add("whole", Pooling(), 1)
    pooler.start(torch.ones(4, 8), (PooledChunk("whole", 0, 1, True), PooledChunk("part", 1, 4, False)))
    [kept] = pooler._sums.values()
    assert kept.untyped_storage().nbytes() == kept.nbytes == 8 * 4
    [vector] = pooler.start(torch.full((1, 8), 5.0), (PooledChunk("part", 0, 1, True),)).read().values()
    assert np.frombuffer(vector.vector, "<f4").tolist() == [2.0] * 8 and not pooler._sums


def test_a_prompt_may_fill_the_whole_context(tiny_llama, adapter):
    run = Run(tiny_llama, adapter[0])
    run.embed("fits", range(64), ASKS["unit"])
    run.embed("fills", [5] * 128, ASKS["unit"])
    run.finish()
    assert {name: len(vector) for name, vector in run.vectors.items()} == {"fits": 64, "fills": 64}
    run.embed("more", [5] * 129, ASKS["unit"])
    with pytest.raises(AssertionError, match="129 tokens asked for, at most 128"):
        run.step()


@pytest.mark.slow
def test_vectors_of_a_real_model_with_a_real_adapter(smollm2):
    folder = Path(DEMO_ADAPTERS[next(iter(CHARACTERS))])
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = ("Tea", "The capital of France is Paris. " * 3)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    run = Run(smollm2, folder, block_size=16, token_budget=16)
    run.chat("chat", prompts[1], "adapter")
    for index, prompt in enumerate(prompts):
        for model in run.adapters:
            for ask in ("last", "mean"):
                run.embed(f"{index}/{model}/{ask}", prompt, ASKS[ask], model)
    run.finish()
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, folder).eval()
    found = {"adapter": [states(model, prompt) for prompt in prompts]}
    with model.disable_adapter():
        found["base"] = [states(model, prompt) for prompt in prompts]
    for name, vector in run.vectors.items():
        index, which, ask = name.split("/")
        check(vector, found[which][int(index)], ASKS[ask], name)
