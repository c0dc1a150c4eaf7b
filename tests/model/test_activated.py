"""Activated LoRA (aLoRA): before the invocation tokens rows and pages are the base model's; after them, PEFT's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from peft import PeftModel
from peft_folders import TARGETS, base_model, save_adapter
from test_peft_parity import GREEDY, assert_agrees, make_engine, run

from engine.core.messages.commands import Submit
from engine.core.messages.requests import ErrorCode, Lane, Request
from engine.engine import Engine
from engine.model.adapters.peft.config import parse_config
from engine.model.adapters.peft.settings import AdapterError

TALK = tuple(5 + 7 * place % 31 for place in range(53))
"""A conversation without invocation tokens, of which the last page is not full."""
INVOCATIONS = {"judge": [40, 41, 42], "guard": [50, 51], "intent": [40]}
ADAPTERS = {
    "judge": {"target_modules": list(TARGETS), "r": 8},
    "guard": {"target_modules": ["q_proj", "down_proj"], "r": 3},
    "intent": {"target_modules": ["k_proj", "v_proj"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("activated")
    base_model().save_pretrained(folder / "model")
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        tokens = {"alora_invocation_tokens": INVOCATIONS[name], "task_type": "CAUSAL_LM"}
        save_adapter(folder / name, seed=seed, size=0.3, **tokens, **options)
    save_adapter(folder / "plain", seed=9, size=0.3)
    return folder


def load(engine: Engine, folder: Path) -> dict[str, str | None]:
    names = [*ADAPTERS, "plain"]
    return {name: engine.load_adapter(str(folder / name)).adapter_hash for name in names} | {"base": None}


def peer(folder: Path, name: str):
    return base_model() if name == "base" else PeftModel.from_pretrained(base_model(), folder / name)


PROMPTS = {
    "judge": (*TALK, 40, 41, 42),
    "guard": (*TALK, 50, 51, 9, 8),
    "intent": (40, *TALK[:20], 40, 3),
    "plain": TALK,
    "base": TALK,
}


def test_probabilities_equal_pefts_beside_other_requests(folder):
    engine = make_engine(folder / "model", num_pages=60)
    versions = load(engine, folder)
    params = GREEDY._replace(max_tokens=32)
    lanes = (Lane.BATCH, Lane.INTERACTIVE)
    requests = [
        Request(f"{name}/{number}", PROMPTS[name], params, versions[name], lane)
        for number, lane in enumerate(lanes)
        for name in PROMPTS
    ]
    streams = run(engine, requests)
    assert engine.state.counters.preemptions
    for name, prompt in PROMPTS.items():
        for number in range(len(lanes)):
            assert_agrees(streams[f"{name}/{number}"], peer(folder, name), prompt)


def test_adapters_of_one_conversation_share_its_pages(folder):
    """The pages are those of a base model's request; none is the plain adapter's."""
    engine = make_engine(folder / "model")
    versions, size = load(engine, folder), engine.state.config.block_size
    whole = len(TALK) // size * size
    cached = {}
    for name, prompt in {"base": TALK, "judge": PROMPTS["judge"], "guard": PROMPTS["guard"], "plain": TALK}.items():
        before = engine.state.counters.cached_tokens
        [stream] = run(engine, [Request(name, prompt, GREEDY, versions[name])]).values()
        assert_agrees(stream, peer(folder, name), prompt)
        cached[name] = engine.state.counters.cached_tokens - before
    assert cached == {"base": 0, "judge": whole, "guard": whole, "plain": 0}


def test_a_later_invocation_is_another_prefix(folder):
    """The same tokens are the adapter's in the first prompt, and the base model's in the second."""
    engine = make_engine(folder / "model")
    versions = load(engine, folder)
    first = (*TALK[:20], 40, *TALK[20:])
    for number, prompt in enumerate([first, (*first, 40, 3), first]):
        before = engine.state.counters.cached_tokens
        [stream] = run(engine, [Request(str(number), prompt, GREEDY, versions["intent"])]).values()
        assert_agrees(stream, peer(folder, "intent"), prompt)
        cached = engine.state.counters.cached_tokens - before
        assert cached == [0, 16, 48][number], "only whole pages before the first invocation are the base model's"


def test_a_prompt_without_the_invocation_is_refused(folder):
    engine = make_engine(folder / "model")
    versions = load(engine, folder)
    engine.inbox.put(Submit(Request("r", (40, 41, *TALK), GREEDY, versions["judge"])))
    [event] = engine.step()
    assert event.refusal.code is ErrorCode.INVALID_REQUEST
    assert "[40, 41, 42]" in event.refusal.message


@pytest.mark.parametrize("tokens", [[], "40", [1.5], [-1], [True], [[1]], list(range(257)), {"a": 1}, False, 7])
def test_what_is_no_list_of_tokens_is_refused(folder, tmp_path, tokens):
    shutil.copytree(folder / "judge", tmp_path / "judge")
    file = tmp_path / "judge" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alora_invocation_tokens": tokens}))
    with pytest.raises(AdapterError, match="alora_invocation_tokens must be 1 to 256 token ids"):
        parse_config(file.read_bytes())
