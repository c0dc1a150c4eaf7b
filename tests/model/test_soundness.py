"""Requests whose logits or vectors are NaN end with an error of their own; those beside them notice nothing."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import save_adapter
from tiny_engine import TinyEngine
from tiny_llama import save_llama

from engine.core.messages.requests import ErrorCode, FinishReason, Pooling, PoolingKind, SamplingParams

BROKEN = 7
"""Token whose embedding is NaN, and with it every output for a prompt that has it."""
GREEDY = SamplingParams(4, temperature=0.0)
ASKS = {
    "greedy": (GREEDY, None),
    "drawn": (SamplingParams(4, seed=1), None),
    "filtered": (SamplingParams(4, seed=1, top_p=0.5, repetition_penalty=1.2), None),
    "logprobs": (GREEDY._replace(logprobs=2), None),
    "prompt": (SamplingParams(0, temperature=0.0, prompt_logprobs=1), None),
    "prompt and one token": (SamplingParams(1, temperature=0.0, prompt_logprobs=0), None),
    "last": (SamplingParams(0), Pooling()),
    "mean": (SamplingParams(0), Pooling(PoolingKind.MEAN, normalize=False)),
}


class Run(TinyEngine):
    def __init__(self, *args):
        super().__init__(*args)
        self.ends = {}

    def step(self):
        events = self.engine.step()
        for event in events:
            self.texts[event.request_id] += event.tokens
            if event.finish_reason:
                self.ends[event.request_id] = event
        return events


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with a broken embedding, and an adapter of it."""
    model, adapter = (tmp_path_factory.mktemp("unsound") / name for name in ("model", "adapter"))
    save_llama(model, 97, 128)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    save_adapter(adapter, 3, seed=1)
    return model, adapter


def test_what_is_nan_ends_its_request_and_no_other(folders):
    alone, beside = Run(*folders), Run(*folders)
    for run in (alone, beside):
        run.chat("neighbour", [5, 6, 8], "adapter", max_tokens=12)
    for name, (params, pooling) in ASKS.items():
        for model in ("base", "adapter"):
            beside.ask(f"{model} {name}", [5, BROKEN, 9, 10], params, model, pooling=pooling)
    wanted, found = alone.finish(), beside.finish()
    assert found.texts.pop("neighbour") == wanted.texts["neighbour"] and not any(found.texts.values())
    ends = [found.ends[f"{model} {name}"] for name in ASKS for model in ("base", "adapter")]
    assert {end.finish_reason for end in ends} == {FinishReason.ERROR}
    assert {end.refusal.code for end in ends} == {ErrorCode.MODEL_OUTPUT_INVALID}


def test_tokens_before_the_output_became_nan_are_kept(folders):
    """The draw of the broken token is forced after two others."""
    run = Run(*folders)
    run.chat("free", [5, 6, 8], max_tokens=2)
    first, second = run.finish().texts["free"]
    bias = ((BROKEN, 200.0),)
    run.ask("biased", [5, 6, 8, first, second], GREEDY._replace(logit_bias=bias))
    run.finish()
    assert run.texts["biased"] == [BROKEN]
    assert run.ends["biased"].refusal.code is ErrorCode.MODEL_OUTPUT_INVALID
