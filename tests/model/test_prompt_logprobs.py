"""Logprobs of prompt tokens against Hugging Face: of the base and of an adapter, beside chats whose answers stay the
same, with prompts in several chunks, cached prefixes and preemption."""

import pytest
import torch
from tiny_adapters import save_adapter
from tiny_engine import TinyEngine
from transformers import AutoModelForCausalLM

from engine.core.config import Scheduling
from engine.core.messages.prompt_logprobs import row_bytes, unpack
from engine.core.messages.requests import Lane, SamplingParams
from engine.model.batch.rows import ScoredChunk
from engine.model.sample import scorer
from engine.model.sample.scorer import PromptScorer

PROMPTS = ([5], [7, 8, 9], list(range(10, 30)), list(range(4, 90)))
"""Prompts of one token, of one chunk, and of several chunks."""
MODELS = ("base", "adapter")
WIDTHS = (0, 1, 20)


class Run(TinyEngine):
    """An engine and the rows of prompt logprobs that it returned."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rows = {}

    def score(self, name, prompt, model="base", lane=Lane.INTERACTIVE, *, max_tokens, width):
        self.rows[name] = b""
        self.ask(name, prompt, SamplingParams(max_tokens, temperature=0.0, prompt_logprobs=width), model, lane)

    def finish(self):
        super().finish()
        assert not self.runner.loaded.scorer._prompts and not self.runner._requests.batch._scored
        return self

    def step(self):
        events = super().step()
        for event in events:
            if event.prompt_logprobs:
                self.rows[event.request_id] += event.prompt_logprobs
        return events


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter") / "one"
    return folder, save_adapter(folder, 3, seed=1)


@torch.inference_mode()
def logprobs(model, prompt):
    return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def wanted(tiny_llama, adapter):
    """Logprobs [num_tokens, vocab_size] of Hugging Face, by model and number of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    found = {"base": [logprobs(model, prompt) for prompt in PROMPTS]}
    with torch.no_grad():
        for name, change in adapter[1].items():
            model.get_parameter(name).add_(change)
    return found | {"adapter": [logprobs(model, prompt) for prompt in PROMPTS]}


def check(rows, prompt, want, width):
    assert len(rows) == (len(prompt) - 1) * row_bytes(width)
    for token, expected, (rank, values) in zip(prompt[1:], want, unpack(rows, width), strict=False):
        assert values.logprob == pytest.approx(expected[token].item(), abs=1e-3)
        assert rank == pytest.approx(1 + (expected > expected[token]).sum().item(), abs=1)
        top = expected.topk(width).values.tolist()
        assert [logprob for _, logprob in values.top] == pytest.approx(top, abs=1e-3)
        assert [logprob for _, logprob in values.top] == pytest.approx(
            [expected[other].item() for other, _ in values.top], abs=1e-3
        )


def ask_everything(run):
    for number, prompt in enumerate(PROMPTS):
        for model in MODELS:
            for width in WIDTHS:
                run.score(
                    f"{number}/{model}/{width}", prompt, model, Lane(number % 2), max_tokens=width % 3, width=width
                )


def check_everything(run, wanted):
    for name in (f"{number}/{model}/{width}" for number in range(4) for model in MODELS for width in WIDTHS):
        number, model, width = name.split("/")
        check(run.rows[name], PROMPTS[int(number)], wanted[model][int(number)], int(width))
        assert len(run.texts[name]) == int(width) % 3


def chat(run):
    for number, prompt in enumerate(PROMPTS):
        run.chat(f"chat {number}", prompt, MODELS[number % 2], Lane(number // 2))


@pytest.fixture(scope="module")
def alone(tiny_llama, adapter):
    run = Run(tiny_llama, adapter[0])
    chat(run)
    return run.finish().texts


def test_logprobs_are_those_of_hugging_face_beside_chats_whose_texts_stay(
    tiny_llama, adapter, wanted, alone, monkeypatch
):
    monkeypatch.setattr(scorer, "SLICE_ROWS", 5)
    run = Run(tiny_llama, adapter[0])
    chat(run)
    run.step()
    ask_everything(run)
    run.finish()
    check_everything(run, wanted)
    assert {name: run.texts[name] for name in alone} == alone


def test_pages_in_the_prefix_cache_are_not_taken_but_filled(tiny_llama, adapter, wanted):
    run = Run(tiny_llama, adapter[0])
    run.chat("chat", PROMPTS[3])
    run.finish()
    run.score("scored", PROMPTS[3], max_tokens=4, width=3)
    run.score("first of the adapter", PROMPTS[3], "adapter", max_tokens=0, width=3)
    run.finish()
    run.chat("after it", PROMPTS[3], "adapter")
    run.chat("again", PROMPTS[3], max_tokens=4)
    run.finish()
    check(run.rows["scored"], PROMPTS[3], wanted["base"][3], 3)
    check(run.rows["first of the adapter"], PROMPTS[3], wanted["adapter"][3], 3)
    assert run.texts["scored"] == run.texts["again"] == run.texts["chat"][:4]
    cached = [run.cached[name] for name in ("scored", "first of the adapter", "after it", "again")]
    assert cached == [0, 0, 84, 84]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_get_every_row_once(tiny_llama, adapter, wanted, preemption):
    run = Run(tiny_llama, adapter[0], Scheduling(preemption=preemption), num_pages=40)
    run.score("base", PROMPTS[3], "base", Lane.BATCH, max_tokens=2, width=5)
    run.score("adapter", PROMPTS[3], "adapter", Lane.BATCH, max_tokens=0, width=5)
    while sum(seq.num_computed > 8 for seq in run.engine.state.running.values()) < 1:
        run.step()
    run.chat("chat", list(range(60)))
    run.chat("another", list(range(1, 61)))
    run.finish()
    assert run.engine.state.counters.preemptions > 0
    for model in MODELS:
        check(run.rows[model], PROMPTS[3], wanted[model][3], 5)


def test_only_rows_that_predict_prompt_tokens_have_logits():
    seen = []

    def logits(rows, *_):
        seen.append(len(rows))
        return rows

    scores = PromptScorer(logits, 8, torch.device("cpu"))
    scores.add("part", SamplingParams(prompt_logprobs=2), [1, 2, 3, 4, 5, 6], 1)
    scores.add("decode", SamplingParams(prompt_logprobs=20), [1, 2])
    chunks = (ScoredChunk("decode", 0, 1, 5, True), ScoredChunk("part", 1, 5, 0, False))
    [part] = scores.start(torch.randn(5, 8), chunks).read().values()
    assert (part.request_id, part.start, len(part.rows), seen) == ("part", 1, 3 * row_bytes(2), [3])
    assert scores.start(torch.randn(1, 8), chunks[:1]) is None
    scores.add("one", SamplingParams(0, prompt_logprobs=2), [1])
    [one] = scores.start(torch.randn(1, 8), (ScoredChunk("one", 0, 1, 0, True),)).read().values()
    assert (one.start, one.rows, seen) == (0, b"", [3])
