"""Section A: the engine on the device generates the same tokens as Hugging Face on the CPU in fp32.

A small random model runs with the base and two adapters mixed, in both lanes, every prompt twice, in a page pool so
small that sequences are preempted and adapters are evicted: with CUDA graphs and planning ahead, as in production on a
GPU, and with neither. Hugging Face checks each answer by one forward pass over it: if every token is the most likely
one after those before it, the answer is the greedy one. The same pass checks the logprobs of every second prompt.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu.journal import Journal
from engine.config import EngineConfig
from engine.core.config import PREEMPTIONS, CoreConfig, Scheduling
from engine.core.messages.commands import Submit
from engine.core.messages.prompt_logprobs import unpack
from engine.core.messages.requests import AdapterHash, Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner

TESTS = Path(__file__).parents[1] / "model"
VOCAB, BLOCK, MAX_LEN = 97, 4, 128
RANKS = {"x": 2, "y": 5}
ALTERNATIVES = 3
"""Number of likeliest tokens in the logprobs of prompts."""
MARGIN = 1e-3
"""Logprob difference between the two most likely tokens above which rounding in fp32 cannot change the choice."""
LEAST_S = 5.0


@dataclass(frozen=True)
class Answer:
    prompt: tuple[int, ...]
    adapter: str | None
    tokens: list[int] = field(default_factory=list)
    prompt_rows: bytearray = field(default_factory=bytearray)
    """Logprobs of the prompt, in the format of `engine.core.messages.prompt_logprobs`."""


def run(journal: Journal) -> None:
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="loralane-model-") as scratch:
        model = make_model(Path(scratch) / "model")
        deltas = make_adapters(Path(scratch))
        answers = make_answers(2 if journal.tiny else 6)
        for preemption in PREEMPTIONS[-1:] if journal.tiny else PREEMPTIONS:
            for ahead in (True, False):
                name = f"preemption by {preemption}, {'a step ahead' if ahead else 'in turn, kernel by kernel'}"
                with journal.case(f"engine, {name}", LEAST_S):
                    engine = make_engine(model, journal.device, preemption, ahead)
                    journal.row("engine in fp32", name, **check(Path(scratch), model, deltas, answers, engine))


def make_model(folder: Path) -> Path:
    """Save a random model to `folder`; return `folder`. Its weights are so large that the context decides each
    token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.2,
        eos_token_id=[2, 3],
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def make_adapters(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Write the PEFT adapters of `RANKS` to `folder / name`. Returns adapter name -> weight name -> what it adds."""
    sys.path.insert(0, str(TESTS))
    from tiny_adapters import save_adapter

    return {name: save_adapter(folder / name, rank, seed=rank) for name, rank in RANKS.items()}


def make_answers(prompts: int) -> dict[str, Answer]:
    rng, answers = Random(0), {}
    for index in range(prompts):
        prompt = tuple(rng.randrange(4, VOCAB) for _ in range(rng.randrange(3, 30)))
        for adapter in (None, *RANKS):
            for repeat in range(2):
                answers[f"{index}/{adapter}/{repeat}"] = Answer(prompt, adapter)
    return answers


def check(
    scratch: Path,
    model: Path,
    deltas: Mapping[str, Mapping[str, Tensor]],
    questions: Mapping[str, Answer],
    engine: Engine,
) -> dict[str, int]:
    """Run copies of `questions` on an engine and check the answers by `judge`. `scratch` has the adapters, `deltas` is
    what `make_adapters` returned. Returns counts: of tokens, of those that rounding cannot change, and of the engine's
    events. Raises AssertionError if one of these tokens is wrong, they are not over 90 %, no request was preempted, or
    the engine's state is inconsistent."""
    answers = {name: Answer(answer.prompt, answer.adapter) for name, answer in questions.items()}
    ids = {name: engine.load_adapter(str(scratch / name)).adapter_hash for name in RANKS}
    for name, answer in answers.items():
        engine.inbox.put(Submit(request(name, answer, ids)))
    run_to_end(engine, answers)
    assert leftovers(engine.state) == []
    assert all(bool(answer.prompt_rows) == is_scored(name) for name, answer in answers.items())
    counters = engine.state.counters
    assert counters.preemptions > 0, "the pool was not small enough to preempt anything"
    adapters: tuple[str | None, ...] = (None, *RANKS)
    decided = sum(judge(model, deltas.get(name or "", {}), list(answers.values()), name) for name in adapters)
    total = sum(len(answer.tokens) for answer in answers.values())
    assert decided > 0.9 * total, f"only {decided} of {total} tokens were beyond rounding"
    return {
        "tokens": total,
        "beyond rounding": decided,
        "preemptions": counters.preemptions,
        "pages restored": counters.kv.restored,
        "adapter loads": counters.adapters.loads,
        "adapter evictions": counters.adapters.evictions,
    }


def make_engine(model: Path, device: str, preemption: str, ahead: bool) -> Engine:
    config = EngineConfig(
        str(model), dtype="float32", device=device, block_size=BLOCK, num_pages=32, swap_gb=0.001, max_seqs=4, threads=1
    )
    runner = ModelRunner(load(replace(config, graphs=ahead)))
    runner.overlaps = ahead
    core = CoreConfig(
        num_pages=config.num_pages,
        block_size=BLOCK,
        host_pages=runner.loaded.num_host_pages,
        max_seqs=4,
        max_model_len=64,
        token_budget=24,
        scheduling=Scheduling(preemption=preemption),
    )
    return Engine(EngineState.create(core), runner)


def request(name: str, answer: Answer, ids: Mapping[str, AdapterHash]) -> Request:
    """Return the engine's request for an answer. The second one of each prompt and adapter (its name ends in /1) is
    interactive and arrives later, to preempt batch requests. Those of every second prompt ask for its logprobs. `ids`
    maps an adapter's name to its hash."""
    interactive = name.endswith("/1")
    width = ALTERNATIVES if is_scored(name) else None
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=width)
    lane = Lane.INTERACTIVE if interactive else Lane.BATCH
    return Request(name, answer.prompt, params, ids.get(answer.adapter or ""), lane, arrival=float(interactive))


def is_scored(name: str) -> bool:
    """Return whether an answer's request asks for logprobs of its prompt."""
    return int(name.split("/")[0]) % 2 == 0


def run_to_end(engine: Engine, answers: Mapping[str, Answer]) -> None:
    while True:
        for event in engine.step():
            assert event.refusal is None, event.refusal
            answers[event.request_id].tokens.extend(event.tokens)
            answers[event.request_id].prompt_rows.extend(event.prompt_logprobs)
        assert violations(engine.state) == []
        if not engine.state.has_work:
            return


@torch.inference_mode()
def judge(model: Path, delta: Mapping[str, Tensor], answers: Sequence[Answer], adapter: str | None) -> int:
    """Check the answers of one adapter (None: the base model) against Hugging Face's model with `delta` added to its
    weights. Returns how many tokens rounding cannot have changed. Raises AssertionError if one of those is not Hugging
    Face's."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name, value in delta.items():
        reference.get_parameter(name).add_(value)
    decided = 0
    for answer in (answer for answer in answers if answer.adapter == adapter):
        logprobs = reference(torch.tensor([[*answer.prompt, *answer.tokens]])).logits[0].log_softmax(-1)
        if answer.prompt_rows:
            judge_prompt(answer, logprobs)
        top = logprobs[len(answer.prompt) - 1 : -1].topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > MARGIN
        ours = torch.tensor(answer.tokens)
        assert torch.equal(top.indices[clear, 0], ours[clear]), f"adapter {adapter}: other tokens than Hugging Face's"
        decided += int(clear.sum())
    return decided


def judge_prompt(answer: Answer, logprobs: Tensor) -> None:
    """Raise AssertionError unless the logprobs of a prompt are those of Hugging Face, fp32 [num_tokens, VOCAB]."""
    rows = list(unpack(bytes(answer.prompt_rows), ALTERNATIVES))
    assert len(rows) == len(answer.prompt) - 1, f"{len(rows)} rows for a prompt of {len(answer.prompt)} tokens"
    for token, row, wanted in zip(answer.prompt[1:], rows, logprobs, strict=False):
        ours = torch.tensor([row.values.logprob, *(logprob for _, logprob in row.values.top)])
        theirs = torch.cat((wanted[token : token + 1], wanted.topk(ALTERNATIVES).values))
        assert (ours - theirs).abs().max() < MARGIN, f"adapter {answer.adapter}: other logprobs than Hugging Face's"
