"""Every kind of adapter that is served, end to end: the engine's probabilities against PEFT's own forward pass in fp32.

One mixed batch each: the adapter, a plain one beside it and the base model, prefilled in chunks and decoded together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft_folders import CONVERTED, DORA, TARGETS, VARIANTS, VOCAB, base_model, save_adapter
from transformers import LlamaForCausalLM

from engine.config import EngineConfig
from engine.core.config import CoreConfig
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Lane, Request, SamplingParams, TokenLogprobs
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner

NUM_PAGES, NUM_TOKENS = 160, 6
PROMPTS = {"mine": (5, 9, 33, 61, 7, 14, 8), "other": tuple(range(20, 43)), "base": (11, 12)}
GREEDY = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=VOCAB)
OTHER = {"r": 5, "target_modules": ["k_proj", "down_proj"]}
SUBSETS = {f"only {name}": {"target_modules": [name], "r": 3} for name in TARGETS}
MIXED = {"every rank": {"target_modules": list(TARGETS), "rank_pattern": {"q_proj": 1, "k_proj": 31, "o_proj": 256}}}

Stream = list[tuple[int, TokenLogprobs]]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    base_model().save_pretrained(folder)
    return folder


def make_engine(model: Path, num_pages: int = NUM_PAGES, max_seqs: int = 4) -> Engine:
    config = EngineConfig(str(model), dtype="float32", device="cpu", num_pages=num_pages, max_seqs=max_seqs, threads=1)
    runner = ModelRunner(load(config))
    runner.loaded.arena.pages[1:] = 1e4  # what a page held before must not matter
    core = CoreConfig(num_pages, runner.facts.config.block_size, max_seqs=max_seqs, max_model_len=128, token_budget=16)
    return Engine(EngineState.create(core), runner)


def run(engine: Engine, requests: list[Request]) -> dict[str, Stream]:
    """One more of them before every step, and all to the end."""
    streams: dict[str, Stream] = {request.id: [] for request in requests}
    coming = iter(requests)
    while True:
        if (request := next(coming, None)) is not None:
            engine.inbox.put(Submit(request))
        for event in engine.step():
            assert event.refusal is None, event.refusal
            streams[event.request_id] += zip(event.tokens, event.logprobs, strict=True)
        assert violations(engine.state) == []
        if request is None and not engine.state.has_work:
            assert leftovers(engine.state) == []
            return streams


@torch.inference_mode()
def assert_agrees(stream: Stream, peer: LlamaForCausalLM | PeftModel, prompt: tuple[int, ...]) -> None:
    """Every probability of every token, in the context of our own stream."""
    tokens = [token for token, _ in stream]
    logits = peer(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.float(), dim=-1)
    ours = torch.tensor([[value for _, value in sorted(item.top)] for _, item in stream])
    assert ours.shape == (len(tokens), VOCAB)
    assert float((ours - expected).abs().max()) < 1e-3
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float((expected.max(dim=1).values - chosen).max()) < 1e-3


def check(model: Path, folder: Path) -> PeftModel:
    """The adapters `mine` and `other` of a folder, and the base model. Returns PEFT's model with `mine`."""
    engine = make_engine(model)
    adapters = {name: engine.load_adapter(str(folder / name)).adapter_hash for name in ("mine", "other")}
    requests = {**adapters, "base": None}
    streams = run(engine, [Request(name, PROMPTS[name], GREEDY, adapter) for name, adapter in requests.items()])
    peers = {name: PeftModel.from_pretrained(base_model(), folder / name) for name in adapters}
    for name, peer in peers.items():
        assert_agrees(streams[name], peer, PROMPTS[name])
    assert_agrees(streams["base"], base_model(), PROMPTS["base"])
    return peers["mine"]


@torch.inference_mode()
def effect(peer: PeftModel) -> float:
    """How far the adapter moves what the base model says."""
    prompt = torch.tensor([PROMPTS["mine"]])
    return float((base_model()(prompt).logits - peer(prompt).logits).abs().max())


@pytest.mark.parametrize("name", [*VARIANTS, *DORA, *CONVERTED, *SUBSETS, *MIXED])
def test_probabilities_equal_pefts_own(name, model, tmp_path):
    options = {**VARIANTS, **DORA, **CONVERTED, **SUBSETS, **MIXED}[name]
    save_adapter(tmp_path / "mine", **{"size": 0.3, **options})
    save_adapter(tmp_path / "other", seed=2, size=0.3, **OTHER)
    assert effect(check(model, tmp_path)) > 0.1


def test_dora_adapters_side_by_side(model, tmp_path):
    """Two that scale different projections, and a row of neither, share every step."""
    save_adapter(tmp_path / "mine", seed=3, size=0.3, use_dora=True, target_modules=["q_proj", "gate_proj"])
    save_adapter(tmp_path / "other", seed=4, size=0.3, use_dora=True, target_modules=["v_proj", "gate_proj"])
    check(model, tmp_path)


PAGED = {
    "ranks": {"target_modules": list(TARGETS), "rank_pattern": {"q_proj": 1, "k_proj": 31, "up_proj": 70}},
    "wide": {"r": 256, "target_modules": ["v_proj"]},
    "dora": {"use_dora": True, "target_modules": ["q_proj", "gate_proj", "down_proj"]},
    "rslora": {"use_rslora": True, "target_modules": ["k_proj", "o_proj"], "layers_to_transform": [0, 2]},
}


def test_probabilities_hold_while_pages_come_and_go(model, tmp_path):
    """32 tokens each, in a pool so small that sequences are preempted and adapters evicted and loaded again."""
    for seed, (name, options) in enumerate(PAGED.items()):
        save_adapter(tmp_path / name, seed=seed, size=0.3, **options)
    engine = make_engine(model, num_pages=44, max_seqs=4)
    versions = {name: engine.load_adapter(str(tmp_path / name)).adapter_hash for name in PAGED} | {"base": None}
    params = GREEDY._replace(max_tokens=32)
    requests = [
        Request(f"{name}/{index}", (index + 5, *PROMPTS["other"][: 4 * index]), params, versions[name], lane)
        for index, lane in enumerate((Lane.BATCH, Lane.INTERACTIVE, Lane.INTERACTIVE))
        for name in versions
    ]
    streams = run(engine, requests)
    counters = engine.state.counters
    assert min(counters.preemptions, counters.adapters.evictions) > 0
    for name in versions:
        peer = PeftModel.from_pretrained(base_model(), tmp_path / name) if name in PAGED else base_model()
        for request in requests:
            if request.id.startswith(f"{name}/"):
                assert len(streams[request.id]) == 32
                assert_agrees(streams[request.id], peer, request.prompt_ids)
