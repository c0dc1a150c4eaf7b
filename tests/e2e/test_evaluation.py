"""What EleutherAI's lm-eval asks of a server (`--model local-completions`) is answered as Hugging Face and PEFT answer
it: the log-likelihood of each continuation, and whether it is the greedy one, of the base and of an adapter."""

import asyncio
import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from engine.demo import DEMO_ADAPTERS
from gateway.cli.main import app
from lab.evaluation.tasks.demo_capitals import CAPITALS

pytestmark = pytest.mark.asyncio(loop_scope="session")

ADAPTER = "pirate"
CHOICES = {
    "The capital of France is": (" Paris", " Berlin"),
    "Question: What is the capital of Japan?\nAnswer:": (" The capital of Japan is Tokyo.", " Arr! Tokyo, matey!"),
    "Once upon a time, in a small village by the sea, there lived an old man who": (
        " loved to tell",
        " caf\u00e9 \U0001f30a",
    ),
}
TOLERANCE = 0.01
QUESTIONS = 10


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def cases(tokenizer):
    """(context, continuation) as lm-eval encodes them: the continuation is what follows the context's tokens."""
    pairs = []
    for context, choices in CHOICES.items():
        begun = tokenizer(context)["input_ids"]
        pairs += [(begun, tokenizer(context + choice)["input_ids"][len(begun) :]) for choice in choices]
    return pairs


@pytest.fixture(scope="module")
def wanted(smollm2, cases):
    """For each model and case, the logprob of each token of the continuation, and whether all are greedy."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, DEMO_ADAPTERS[ADAPTER]).eval()
    adapted = [_scored(model, *case) for case in cases]
    with model.disable_adapter():
        return {"base": [_scored(model, *case) for case in cases], ADAPTER: adapted}


@torch.inference_mode()
def _scored(model, context, continuation):
    rows = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    ids = torch.tensor(continuation)
    return rows.gather(1, ids[:, None])[:, 0].tolist(), bool((rows.argmax(-1) == ids).all())


def parsed(choice, context):
    """What lm-eval reads: all tokens between the context and the one generated token."""
    logprobs = choice["logprobs"]
    tokens, tops = (logprobs[name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
    return tokens, all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True))


async def ask(client, model, prompts):
    body = {"model": model, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = (await client.completions.create(**body, echo=True)).model_dump()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    return sorted(answer["choices"], key=lambda choice: choice["index"])


@pytest.mark.parametrize("which", ["base", ADAPTER])
async def test_continuations_are_as_likely_as_hugging_face_and_peft_say(client, models, cases, wanted, which):
    model, prompts = models[0] if which == "base" else which, [context + more for context, more in cases]
    for _ in range(2):  # the second time all prompts are in the prefix cache
        together, alone = await asyncio.gather(ask(client, model, prompts), ask(client, model, prompts[:1]))
        for choice, (context, more), (logprobs, is_greedy) in zip(together, cases, wanted[which], strict=True):
            found, found_greedy = parsed(choice, context)
            assert found == pytest.approx(logprobs, abs=TOLERANCE)
            assert (len(found), found_greedy) == (len(more), is_greedy)
            assert choice["logprobs"]["token_logprobs"][0] is None
        assert parsed(alone[0], cases[0][0])[0] == pytest.approx(wanted[which][0][0], abs=TOLERANCE)


async def test_texts_are_scored_as_their_tokens_are(client, cases, tokenizer, wanted):
    texts = [tokenizer.decode(context + more) for context, more in cases]
    for choice, text, (context, _), (logprobs, _) in zip(
        await ask(client, ADAPTER, texts), texts, cases, wanted[ADAPTER], strict=True
    ):
        assert choice["text"].startswith(text)
        assert parsed(choice, context)[0] == pytest.approx(logprobs, abs=TOLERANCE)
        tokens, offsets = (choice["logprobs"][name][:-1] for name in ("tokens", "text_offset"))
        plain = [(token, start) for token, start in zip(tokens, offsets, strict=True) if not token.startswith("bytes:")]
        assert all(text.startswith(token, start) for token, start in plain)


async def test_one_command_scores_base_and_adapter(server, smollm2, models, tmp_path):
    """With lm-eval itself, where it is installed. The scores are those of Hugging Face and PEFT."""
    pytest.importorskip("lm_eval", reason="no lm-eval: pip install 'loralane[eval]'")
    options = ["--adapters", ADAPTER, "--limit", str(QUESTIONS), "--json", str(tmp_path / "scores.json")]
    command = ["eval", "tasks", *options, "--url", f"http://127.0.0.1:{server.http_port}"]
    done = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "scores.json").read_text())["models"]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, DEMO_ADAPTERS[ADAPTER]).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert found[ADAPTER]["demo_capitals"]["acc,none"] == _accuracy(model, tokenizer)
    with model.disable_adapter():
        assert found[models[0]]["demo_capitals"]["acc,none"] == _accuracy(model, tokenizer)


def _accuracy(model, tokenizer):
    """Share of the first countries of demo_capitals whose capital is the likeliest of the four cities."""
    right = 0
    for country, cities in list(CAPITALS.items())[:QUESTIONS]:
        context = f"Question: What is the capital of {country}?\nAnswer: The capital of {country} is"
        begun = tokenizer(context)["input_ids"]
        texts = [tokenizer(f"{context} {city}")["input_ids"][len(begun) :] for city in cities]
        likely = [sum(_scored(model, begun, text)[0]) for text in texts]
        right += likely[0] == max(likely)
    return right / QUESTIONS


async def test_an_adapter_changes_what_is_likely(wanted):
    assert wanted["base"] != wanted[ADAPTER]
    assert {greedy for scored in wanted.values() for _, greedy in scored} == {True, False}
