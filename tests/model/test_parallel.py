"""Several ranks compute what one device does: a tiny model in fp32, with adapters of every kind that is split."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from grammar_model import EOS, byte_tokenizer
from rank_threads import start_rank_threads
from safetensors.torch import load_file, save_file
from tiny_llama import save_llama

from engine.config import EngineConfig, Speculation
from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import AdapterFetched, FetchCancelled, FetchFailed, Submit
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.prompt_logprobs import unpack
from engine.core.messages.requests import Lane, Pooling, PoolingKind, Request, SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk
from engine.core.plan import proposals
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.batch.state import BatchState
from engine.model.checkpoints.stored import WeightsError
from engine.model.decode.pipeline import WEIGHT_ROWS, cut_rows, split_batch
from engine.model.parallel.leader import Leader
from engine.model.parallel.messages import Drop
from engine.model.ranks.shard import Shard
from engine.model.ranks.stages import find_shard, split_layers
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.sizes import count_weights
from engine.model.spec.config import read_spec
from engine.model.weights.reader import open_weights, parameter_shapes
from engine.rpc.target import EngineTarget
from engine.serve.explain import explain
from engine.serve.server import serve
from lora_kernels.quantized import INT8, dense, quantize

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 128, 8, 2, 16, 5, 271
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
RANKS = (1, 2, 5, 8, 16, 17, 3, 4)
DORA, TRAINED_TOKENS, LAST_LAYER = 3, 5, 6
SIZES = {"num_pages": 90, "block_size": 16, "max_seqs": 6, "token_budget": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with biases of which no two KV heads, and no bias, are equal."""
    folder = tmp_path_factory.mktemp("model")
    save_llama(
        folder,
        VOCAB,
        256,
        eos_token_id=EOS,
        intermediate_size=INNER,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=LAYERS,
        head_dim=HEAD_DIM,
        attention_bias=True,
        mlp_bias=True,
    )
    generator, file = torch.Generator().manual_seed(1), folder / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith("bias"):
            weights[name] = torch.randn(weights[name].shape, generator=generator) * 0.3
    save_file(weights, file, {"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Eight adapters of all projections; one of them is a DoRA adapter, one replaces rows of the embedding and the
    head, and one is of the last layer only."""
    folders = []
    for seed, rank in enumerate(RANKS):
        folders.append(tmp_path_factory.mktemp("adapters") / str(seed))
        layers = [LAYERS - 1] if seed == LAST_LAYER else range(LAYERS)
        trained = seed == TRAINED_TOKENS
        _save_adapter(folders[-1], rank, seed, layers, use_dora=seed == DORA, has_tokens=trained)
    return folders


def _save_adapter(folder, rank, seed, layers, use_dora, has_tokens):
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in layers:
        for module, (width, out) in WIDTHS.items():
            path = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, width, generator=generator) / 4
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / 8
            if use_dora:
                tensors[f"{path}.lora_magnitude_vector"] = torch.rand(out, generator=generator) + 1
    targets = [module.split(".")[1] for module in WIDTHS]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "use_dora": use_dora}
    settings["layers_to_transform"] = list(layers)
    if has_tokens:
        settings["trainable_token_indices"] = {"embed_tokens": [*range(0, VOCAB, 8)], "lm_head": [*range(0, VOCAB, 16)]}
        for layer, path in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
            count = len(settings["trainable_token_indices"][layer])
            rows = torch.randn(count, HIDDEN, generator=generator) / 8
            tensors[f"base_model.model.{path}.token_adapter.trainable_tokens_delta"] = rows
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")


class Engines:
    """An engine of one or several ranks, and what it says."""

    def __init__(self, model, adapters, size, stages=1, weights="auto", **core):
        self.config = EngineConfig(
            str(model),
            dtype="float32",
            device="cpu",
            swap_gb=0.004,
            host_adapter_gb=0.05,
            threads=1,
            weights=weights,
            tensor_parallel=size,
            pipeline_parallel=stages,
            **SIZES,
        )
        if self.config.ranks > 1:
            self.loaded, executor = start_rank_threads(self.config)
        else:
            self.loaded = load(self.config)
            executor = ModelRunner(self.loaded)
        settings = CoreConfig(
            max_model_len=256, host_pages=self.loaded.num_host_pages, eos_token_ids=(), **SIZES, **core
        )
        ticks = iter(range(10**9))
        self.engine = Engine(EngineState.create(settings), executor, clock=lambda: next(ticks) / 1000)
        self.versions = [self.engine.load_adapter(str(folder)).adapter_hash for folder in adapters]
        self.tokens, self.logprobs, self.cached = defaultdict(list), defaultdict(list), {}
        self.vectors, self.scored = {}, defaultdict(bytes)

    def ask(self, name, prompt, adapter=None, lane=Lane.INTERACTIVE, pooling=None, **params):
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "logprobs": 0, "ignore_eos": True} | params)
        version = None if adapter is None else self.versions[adapter]
        self.engine.inbox.put(Submit(Request(name, tuple(prompt), params, version, lane, pooling=pooling)))

    def step(self):
        for event in self.engine.step():
            assert event.refusal is None, event.refusal
            self.cached[event.request_id] = event.num_cached
            self.tokens[event.request_id] += event.tokens
            self.logprobs[event.request_id] += [one.logprob for one in event.logprobs]
            self.scored[event.request_id] += event.prompt_logprobs
            if event.vector:
                self.vectors[event.request_id] = np.frombuffer(event.vector, "<f4")
        assert violations(self.engine.state) == []

    def finish(self):
        while self.engine.state.has_work or self.engine.inbox._commands:
            self.step()
            if self.engine.state.steps.in_flight.is_empty:  # a grammar is prepared, or an adapter fetched
                self.engine.inbox.wait(0.01)
                self.engine.inbox.drain_questions()
        assert leftovers(self.engine.state) == []

    def close(self):
        self.engine.executor.close()


def converse(engines):
    """Mixed batches with preemption, prefix hits, and adapters for which there is not room enough at once."""
    generator = torch.Generator().manual_seed(5)

    def prompt(length):
        return torch.randint(4, VOCAB, (length,), generator=generator).tolist()

    shared = prompt(40)
    for number in range(8):
        engines.ask(f"batch-{number}", shared + prompt(9), number, Lane.BATCH, max_tokens=12)
    for _ in range(6):
        engines.step()
    engines.ask("base", prompt(30), temperature=0.8, seed=3)
    for number in range(8):
        drawn = {"temperature": 0.9, "top_p": 0.9, "seed": number, "presence_penalty": 0.5} if number % 2 else {}
        engines.ask(f"first-{number}", shared + prompt(number + 1), number, **drawn)
        engines.step()
    engines.finish()
    for number in reversed(range(8)):
        engines.ask(f"again-{number}", shared + prompt(3), number, prompt_logprobs=1)
    engines.ask("vanilla", shared)
    engines.finish()


@pytest.fixture(scope="module")
def alone(model, adapters):
    engines = Engines(model, adapters, 1, max_adapter_pages=60, scheduling=Scheduling(preemption="swap"))
    converse(engines)
    counters = engines.engine.state.counters
    assert counters.preemptions and counters.kv.restored and counters.adapters.evictions
    assert any(engines.cached.values())
    engines.close()
    return engines


@pytest.mark.parametrize(("size", "stages"), [(4, 1), (1, 2), (2, 2)])
def test_tokens_of_several_ranks_equal_those_of_one_device(model, adapters, alone, size, stages, monkeypatch):
    """Also what vLLM got wrong: adapters that are evicted and loaded again are the same on all ranks (vllm#20873).
    Stages have different numbers of layers, and some steps have three micro-batches."""
    monkeypatch.setitem(WEIGHT_ROWS, "cpu", 4)
    engines = Engines(model, adapters, size, stages, max_adapter_pages=60, scheduling=Scheduling(preemption="swap"))
    converse(engines)
    counters = engines.engine.state.counters
    assert counters.preemptions and counters.kv.restored and counters.adapters.evictions
    assert engines.tokens == alone.tokens
    layers, heads = (5, 2)[stages - 1], max(1, KV_HEADS // size)
    assert engines.loaded.arena.pages.shape == (90, layers * 2 * 16 * heads * HEAD_DIM)
    for name, logprobs in alone.logprobs.items():
        assert engines.logprobs[name] == pytest.approx(logprobs, abs=2e-5)
    engines.close()


def ask_for_the_rest(engines):
    """Vectors, logprobs of prompts, grammars, and answers that are proposed."""
    generator = torch.Generator().manual_seed(6)

    def prompt(length):
        return torch.randint(4, VOCAB, (length,), generator=generator).tolist()

    for number, kind in enumerate(PoolingKind):
        engines.ask(f"vector-{number}", prompt(50), number, pooling=Pooling(kind), max_tokens=0)
    engines.ask("scored", prompt(50), 2, prompt_logprobs=1, max_tokens=0)
    grammar = Grammar(GrammarKind.REGEX, "(yes|no, thanks){2}")
    engines.ask("grammar", prompt(20), 3, grammar=grammar, max_tokens=60, ignore_eos=False)
    engines.ask("repeated", prompt(5) * 3, 4, logit_bias=((7, 50.0),), max_tokens=30)
    engines.finish()
    return engines


@pytest.fixture
def rest(model, adapters, monkeypatch):
    """Return a function that makes engines of several ranks answer `ask_for_the_rest`, with as many proposals as there
    may be."""

    def answer(*options):
        engines = ask_for_the_rest(Engines(model, adapters, *options, speculation=True))
        counters = engines.engine.state.counters
        assert 0 < counters.accepted_tokens < counters.proposed_tokens
        engines.close()
        return engines

    monkeypatch.setattr(
        proposals,
        "_worthwhile",
        lambda state, guesses, budget, tokens: {seq: min(4, len(guess.tokens)) for seq, guess in guesses.items()},
    )
    return answer


CODED = 1e-3
"""Bound of differences where activations are coded in 16 bits: a sum that ranks add in another order may be rounded to
the next code."""


def test_all_that_one_device_does_several_ranks_do(rest):
    """With weights in codes, of which stages have some layers and ranks parts."""
    alone, several = rest(1, 1, "int8"), rest(2, 2, "int8")
    text = byte_tokenizer().decode(alone.tokens["grammar"][:-1])
    assert re.fullmatch("(yes|no, thanks){2}", text) and alone.tokens["grammar"][-1] == EOS
    assert several.tokens == alone.tokens
    assert several.logprobs["repeated"] == pytest.approx(alone.logprobs["repeated"], abs=CODED)
    for name, vector in alone.vectors.items():
        assert several.vectors[name] == pytest.approx(vector, abs=CODED)
    found, expected = (list(unpack(engines.scored["scored"], 1)) for engines in (several, alone))
    assert len(expected) == 49 and [row.rank for row in found] == [row.rank for row in expected]
    both = zip(found, expected, strict=True)
    assert all(one.values.logprob == pytest.approx(other.values.logprob, abs=CODED) for one, other in both)


def test_a_rank_has_its_part_of_the_memory(model, adapters):
    """The parts of all ranks are the model, but for what each rank has: norms, and biases of sums."""
    spec, both = read_spec(model), [Shard(rank, 2) for rank in range(2)]
    repeated = [name for name, shape in parameter_shapes(spec).items() if both[0].shapes(spec)[name] == shape]
    assert all("norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")) for name in repeated)
    source, whole = open_weights(model, spec), sum(map(prod, parameter_shapes(spec).values()))
    held = [sum(shard.source(source, spec)(name).numel() for name in parameter_shapes(spec)) for shard in both]
    once = sum(prod(parameter_shapes(spec)[name]) for name in repeated)
    assert sum(held) == whole + once
    assert held == [count_weights(spec, shard) for shard in both]
    config = EngineConfig(str(model), dtype="float32", device="cpu", tensor_parallel=2, **SIZES)
    alone, part = explain(replace(config, tensor_parallel=1)), explain(config)
    assert part["weight_bytes"] == 4 * held[0]
    assert part["page_bytes"] * 2 == alone["page_bytes"]


def test_a_stage_has_its_layers(model, adapters):
    """The stages' parts are the model, and the first has its ends as well."""
    config = EngineConfig(str(model), dtype="float32", device="cpu", pipeline_parallel=2, **SIZES)
    spec, whole = read_spec(model), explain(replace(config, pipeline_parallel=1))
    both = find_shard(config, spec, lambda name: 32).everyone
    assert [len(shard.layers(spec)) for shard in both] == [2, 3]
    first, second = (shard.shapes(spec) for shard in both)
    assert not first.keys() & second.keys()
    assert first | second == parameter_shapes(spec)
    assert "model.norm.weight" in first
    part = explain(config)
    held = [4 * count_weights(spec, shard) for shard in both]
    assert part["stages"] == [{"layers": 2, "weight_bytes": held[0]}, {"layers": 3, "weight_bytes": held[1]}]
    assert sum(held) == whole["weight_bytes"] and part["weight_bytes"] == max(held)
    assert part["page_bytes"] == whole["page_bytes"] * 3 // 5


@pytest.mark.parametrize(
    ("sizes", "ends", "stages", "lengths"),
    [
        ([1] * 5, 0, 2, [2, 3]),
        ([1] * 5, 2, 2, [2, 3]),
        ([1] * 80, 2.5, 4, [18, 20, 21, 21]),
        ([1, 1, 3, 1], 0, 3, [2, 1, 1]),
    ],
)
def test_the_largest_stage_is_as_small_as_possible(sizes, ends, stages, lengths):
    split = split_layers(sizes, ends, stages)
    assert [layer for layers in split for layer in layers] == list(range(len(sizes)))
    assert sorted(map(len, split)) == sorted(lengths)


def test_micro_batches_have_the_rows_of_a_step():
    """A chunk is cut, but not after its first row."""
    state = BatchState(4, 64, 16)
    chunks = []
    for number, (start, length) in enumerate([(3, 1), (9, 1), (0, 7), (16, 8)]):
        tokens = tuple(range(100 * number, 100 * number + start + length))
        pages = tuple(range(1 + 4 * number, 5 + 4 * number))
        admission = Admission(str(number), tokens, len(tokens), start, pages, None, SamplingParams())
        state.admit(admission, number - 1)
        chunks.append(ScheduledChunk(str(number), start, length, (), samples=True))
    batch = state.gather(chunks)
    cuts = cut_rows(batch, 6)
    assert cuts == [0, 2, 6, 8, 11, 14, 17]
    parts = list(split_batch(batch, cuts))
    for name in ("token_ids", "positions", "kv_slots"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(batch, name).tolist()
    assert [part.query_starts.tolist() for part in parts] == [[0, 1, 2], [0, 4], [0, 2], [0, 1, 3], [0, 3], [0, 3]]
    assert [part.contexts.tolist() for part in parts] == [[4, 10], [4], [6], [7, 18], [21], [24]]
    assert [part.segments.adapter_slots.tolist() for part in parts] == [[0], [1], [1], [1, 2], [2], [2]]
    assert cut_rows(batch, 5) == [0, 2, 7, 9, 14, 17]  # 3 and 10 would end parts with a chunk's first row


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({}, 3, "3 does not divide the model's 8 attention heads"),
        ({"heads": 6, "kv_heads": 3}, 2, "2 does not divide the model's 3 KV heads"),
        ({"intermediate_size": 97}, 2, "2 does not divide the model's intermediate_size, 97"),
    ],
)
def test_what_cannot_be_divided_is_refused(model, changes, size, message):
    with pytest.raises(ValueError, match=message):
        Shard(0, size).spec(replace(read_spec(model), **changes))


def test_more_stages_than_layers_are_refused(model):
    config = EngineConfig(str(model), device="cpu", pipeline_parallel=6)
    with pytest.raises(ValueError, match=r"engine\.pipeline_parallel 6 is more than the model's 5 layers"):
        explain(config)
    with pytest.raises(ValueError, match=r"engine\.pipeline_parallel 2 does not work with a draft model"):
        EngineConfig(str(model), pipeline_parallel=2, speculation=Speculation(model))


def test_a_refusal_at_the_start_is_its_reason_alone(model, monkeypatch):
    def refuse(config, tell):
        Shard(0, 3).spec(read_spec(Path(config.model)))

    monkeypatch.setattr("engine.serve.server.build_real", refuse)
    with pytest.raises(SystemExit, match=r"^error: engine\.tensor_parallel 3 does not divide"):
        serve(EngineConfig(str(model)), EngineTarget("unix:/nowhere"), fake=False, until_stdin_closes=False)


def test_blocks_of_quantised_weights_stay_whole(model):
    spec = replace(read_spec(model), intermediate_size=256)
    weight, name = quantize(torch.randn(HIDDEN, 256), INT8), "model.layers.0.mlp.down_proj.weight"
    parts = [Shard(rank, 4).source(lambda _: weight, spec)(name) for rank in range(4)]
    assert torch.equal(torch.cat([dense(part) for part in parts], 1), dense(weight))
    with pytest.raises(WeightsError, match="blocks of 32 inputs cannot be divided"):
        Shard(0, 16).source(lambda _: weight, spec)(name)
    ordered = replace(weight, order=torch.randperm(256))
    with pytest.raises(WeightsError, match="act-order"):
        Shard(0, 2).source(lambda _: ordered, spec)(name)


class Recorder:
    """A rank that records what it is told."""

    def __init__(self, rank=1):
        self.rank, self.sent, self.dropped = rank, [], []
        self.send, self.drop, self.connect = self.sent.append, self.dropped.append, lambda report: None


@pytest.mark.parametrize(
    ("answers", "reported", "dropped"),
    [
        ((AdapterFetched("a", 1.0), AdapterFetched("a", 2.0)), AdapterFetched, ([], [])),
        ((AdapterFetched("a", 1.0), FetchFailed("a", "gone")), FetchFailed, (["a"], [])),
        ((FetchCancelled("a"), AdapterFetched("a", 1.0)), FetchCancelled, ([], [Drop("a")])),
        ((FetchFailed("a", "gone"), FetchCancelled("a")), FetchFailed, ([], [])),
    ],
)
def test_an_adapter_is_on_all_ranks_or_on_none(answers, reported, dropped):
    """vllm#20873: an adapter that ranks hold differently gives wrong answers."""
    first, other, reports = Recorder(0), Recorder(), []
    leader = Leader(first, [other])
    leader.connect(reports.append)
    for rank in (1, 0):
        assert reports == []
        leader._answer(rank, answers[rank])
    assert [type(report) for report in reports] == [reported]
    assert (first.dropped, other.sent) == dropped
