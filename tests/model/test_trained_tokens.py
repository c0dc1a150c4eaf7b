"""Adapters with trained rows of tokens (PEFT's `trainable_token_indices`): their probabilities are PEFT's own, beside
requests of other adapters and of the base model, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft_folders import VOCAB, base_model, save_adapter
from test_peft_loader import SHAPES, edit_config, edit_weights, refusal
from test_peft_parity import GREEDY, assert_agrees, make_engine, run

from engine.core.messages.commands import Submit
from engine.core.messages.prompt_logprobs import unpack
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.model.adapters.peft import tokens as peft_tokens
from engine.model.adapters.peft.loader import load_peft
from engine.model.adapters.peft.tokens import Ends
from lora_kernels.quantized import INT4, INT8, quantize

TOKENS = [60, 5, 33]
ADAPTERS = {
    "embedding": {"trainable_token_indices": TOKENS},
    "both": {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": [7, 60]}, "use_dora": True},
    "head": {"trainable_token_indices": {"lm_head": [9, 4, 61]}},
    "same": {"trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS}},
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved head": {"modules_to_save": ["lm_head"], "trainable_token_indices": TOKENS},
    "plain": {"r": 5, "target_modules": ["k_proj", "down_proj"]},
}
PROMPT = (5, 9, 33, 61, 7, 14, 8, 60, 5, 22, 33, 1, 60, 2, 5, 9, 4, 33, 8)
DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
TIED = ("untied", "tied")
REFUSED = ("saved head", "tied")


@pytest.fixture(scope="module", params=TIED)
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / request.param
    base_model(tied=request.param == "tied").save_pretrained(folder / "model")
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        if (name, request.param) == REFUSED:
            continue
        save_adapter(folder / name, seed=seed, size=0.3, tied=request.param == "tied", **options)
        edit_weights(folder / name, partial(untrain, base_model(tied=request.param == "tied")))
    return folder


def untrain(base, tensors: dict[str, torch.Tensor]) -> None:
    """Gives the base model's rows to all tokens of saved layers but a few, another one in each."""
    for name, tensor in tensors.items():
        if name.endswith(("lm_head.weight", "embed_tokens.weight")):
            path, trained = name.removeprefix("base_model.model.").removesuffix(".weight"), [5, 33, len(name)]
            rows = tensor[trained]
            tensor.copy_(base.get_submodule(path).weight.detach())
            tensor[trained] = rows


def peer(folder: Path, name: str):
    model = base_model(tied=folder.name == "tied")
    return model if name == "base" else PeftModel.from_pretrained(model, folder / name)


def load(engine, folder: Path) -> dict[str, str | None]:
    names = [name for name in ADAPTERS if (folder / name).exists()]
    return {name: engine.load_adapter(str(folder / name)).adapter_hash for name in names} | {"base": None}


def test_probabilities_equal_pefts_beside_other_requests(folder):
    """Two requests each, of which one reuses prefixes of the other's prompt, in so few pages that they are preempted
    and adapters evicted and loaded again."""
    engine = make_engine(folder / "model", num_pages=18)
    versions, params = load(engine, folder), GREEDY._replace(max_tokens=24)
    requests = [
        Request(f"{name}/{number}", PROMPT[: 19 - number], params, version, lane)
        for number, lane in enumerate((Lane.BATCH, Lane.INTERACTIVE))
        for name, version in versions.items()
    ]
    streams = run(engine, requests)
    counters = engine.state.counters
    assert min(counters.preemptions, counters.adapters.evictions, counters.cached_tokens) > 0
    for name in versions:
        model = peer(folder, name)
        for request in requests:
            if request.id.startswith(f"{name}/"):
                assert_agrees(streams[request.id], model, request.prompt_ids)


@torch.inference_mode()
def test_logprobs_of_prompts_are_of_replaced_rows(folder):
    engine = make_engine(folder / "model")
    versions = load(engine, folder)
    for name in ("both", "base"):
        engine.inbox.put(Submit(Request(name, PROMPT, SamplingParams(0, prompt_logprobs=0), versions[name])))
    rows = dict.fromkeys(("both", "base"), b"")
    for event in [*engine.step(), *engine.step(), *engine.step(), *engine.step()]:
        rows[event.request_id] += event.prompt_logprobs or b""
    assert not engine.state.has_work
    for name, found in rows.items():
        expected = peer(folder, name)(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        ours = [values.logprob for _, values in unpack(found, 0)]
        assert ours == pytest.approx([expected[at, token].item() for at, token in enumerate(PROMPT[1:])], abs=1e-3)


def test_a_tied_head_shares_the_rows_of_the_embedding(folder):
    trained = load_peft(folder / "same", shapes(tied=folder.name == "tied")).tokens
    assert trained is not None
    assert trained.ids.num_rows == len(trained.rows) == (3 if folder.name == "tied" else 6)
    assert trained.ids.embedding.tolist() == trained.ids.head.tolist() == sorted(TOKENS)


def shapes(tied: bool = False):
    return replace(SHAPES, ends=Ends(VOCAB, 32, tied))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainable_token_indices": [60, 5, 64]}, ["has 64", "tokens end at 63"]),
        ({"trainable_token_indices": [60, 5]}, ["embed_tokens's trainable_tokens_delta is [3, 32]", "[2, 32]"]),
        ({"trainable_token_indices": {"lm_head": TOKENS}}, ["['embed_tokens']", "['lm_head']", "save the adapter"]),
        ({"trainable_token_indices": None}, ["['embed_tokens']", "of []"]),
        ({"trainable_token_indices": {"v_proj": [1]}}, ["embed_tokens or lm_head", "v_proj"]),
        ({"alora_invocation_tokens": [3]}, ["alora_invocation_tokens and trainable_token_indices"]),
        *(
            ({"trainable_token_indices": bad}, ["1 to 1024 different"])
            for bad in ([1, 1], [-1], ["1"], [*range(1025)], 7)
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_configurations_refused(changes, words, tmp_path):
    save_adapter(tmp_path, trainable_token_indices=TOKENS)
    edit_config(tmp_path, **changes)
    message = refusal(tmp_path, shapes())
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_rows_of_saved_layers_are_those_that_differ(dtype, tmp_path):
    save_adapter(tmp_path, dtype=dtype, modules_to_save=["lm_head", "model.embed_tokens"])
    edit_weights(tmp_path, partial(untrain, base_model()))
    trained = load_peft(tmp_path, shapes()).tokens
    assert trained is not None
    assert (trained.ids.embedding.tolist(), trained.ids.head.tolist()) == ([5, 33, 42], [5, 31, 33])
    edit_weights(tmp_path, lambda tensors: [tensors[name].copy_(weight) for name, weight in saved_of(base_model())])
    assert load_peft(tmp_path, shapes()).tokens is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coding", [INT8, INT4], ids=["8 bits", "4 bits"])
def test_rows_over_a_quantised_base_are_compared_within_its_steps(coding, dtype, tmp_path):
    """Rows that were trained differ from the base; those that quantising alone has changed do not."""

    def train(tensors):
        [embedding] = [tensor for name, tensor in tensors.items() if "embed_tokens" in name]
        embedding.copy_(base_model().model.embed_tokens.weight.detach())
        embedding[[5, 33]] *= 1.4

    save_adapter(tmp_path, dtype=dtype, modules_to_save=["embed_tokens"])
    edit_weights(tmp_path, train)
    quantised = replace(
        shapes(), base_linears=lambda path: (quantize(base_model().get_submodule(path).weight.detach(), coding), None)
    )
    trained = load_peft(tmp_path, quantised).tokens
    assert trained is not None and trained.ids.embedding.tolist() == [5, 33]
    edit_config(tmp_path, modules_to_save=None)
    assert "has embed_tokens whole, of which 2 rows differ" in refusal(tmp_path, quantised)


def test_the_base_models_rows_are_read_once_for_each_content(tmp_path):
    save_adapter(tmp_path, modules_to_save=["embed_tokens"])
    edit_weights(tmp_path, partial(untrain, base_model()))
    read = []
    counted = replace(shapes(), base_linears=lambda path: read.append(path) or SHAPES.base_linears(path))
    first, second = (load_peft(tmp_path, counted).tokens for _ in range(2))
    assert read == ["model.embed_tokens"]
    assert torch.equal(first.rows, second.rows) and first.ids.embedding.tolist() == second.ids.embedding.tolist()
    edit_weights(tmp_path, lambda tensors: [tensor.add_(1) for name, tensor in tensors.items() if "lora_A" in name])
    assert torch.equal(load_peft(tmp_path, counted).tokens.rows, first.rows) and len(read) == 2, "another content"


def saved_of(base):
    yield "base_model.model.lm_head.weight", base.lm_head.weight.detach()
    yield "base_model.model.model.embed_tokens.weight", base.model.embed_tokens.weight.detach()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["64 of 64 rows of lm_head", "0 MiB", "up to 8 rows", "trainable_token_indices"]),
        ({"modules_to_save": ["norm", "lm_head"]}, ["modules_to_save has 'norm'", "retrain without it"]),
        ({"modules_to_save": None}, ["64 of 64 rows of lm_head", "differ from the base model's"]),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, ["['lm_head']", "['embed_tokens', 'lm_head']"]),
        ({"ensure_weight_tying": True}, ["ensure_weight_tying", "retrain"]),
        ({"alora_invocation_tokens": [3]}, ["alora_invocation_tokens and modules_to_save"]),
    ],
    ids=str,
)
def test_saved_layers_refused(changes, words, tmp_path, monkeypatch):
    monkeypatch.setattr(peft_tokens, "MAX_TRAINED_TOKENS", 8)
    save_adapter(tmp_path, modules_to_save=["lm_head"])
    edit_config(tmp_path, **changes)
    message = refusal(tmp_path, shapes())
    assert [word for word in words if word not in message] == []


def test_rows_of_both_kinds_are_refused_where_the_head_is_the_embedding(tmp_path):
    save_adapter(tmp_path, tied=True, **ADAPTERS["saved head"])
    assert "modules_to_save and trainable_token_indices" in refusal(tmp_path, shapes(tied=True))


def test_a_resized_vocabulary_is_refused(tmp_path):
    save_adapter(tmp_path, modules_to_save=["lm_head"])
    edit_weights(tmp_path, lambda tensors: tensors | {"base_model.model.lm_head.weight": torch.ones(66, 32)})
    assert "lm_head is [66, 32], and the model's is [64, 32]" in refusal(tmp_path, shapes())


def test_rows_that_are_not_numbers_are_refused(tmp_path):
    save_adapter(tmp_path, trainable_token_indices=TOKENS)
    edit_weights(tmp_path, lambda tensors: tensors[DELTA][1, 2].fill_(torch.nan))
    assert "trainable_tokens_delta has NaN" in refusal(tmp_path, shapes())
