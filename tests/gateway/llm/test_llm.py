"""`LLM` and `AsyncLLM` on a tiny model: the tokens of Hugging Face, and the pages and threads that they give back."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from loralane import LLM, ApiError, AsyncLLM, EngineFailed, SamplingParams
from transformers import AutoModelForCausalLM

from engine.core.plan import proposals
from engine.serve.build import build_fake
from engine.serve.local import LocalEngine
from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.llm import async_llm, setup

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPTS = ["The sea", "A much longer prompt about the moon", "x"]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CHAT = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def llm(tiny_chat, tiny_adapter, options):
    with LLM(tiny_chat, adapters={"first": tiny_adapter[0]}, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(tiny_chat):
    return AutoModelForCausalLM.from_pretrained(tiny_chat, dtype=torch.float32)


@torch.inference_mode()
def greedy(model, ids, count=12):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[-count:])


def stats(llm):
    """Return the engine's statistics, which include what its integrity check finds."""
    return llm._loop.run(llm._llm._parts.engine.stats(check=True))


def assert_idle(figures):
    assert not figures.violations
    assert [(lane.running, lane.waiting) for lane in figures.lanes] == [(0, 0), (0, 0)]


def test_texts_and_token_ids_are_continued_as_by_hugging_face(llm, reference):
    results = llm.generate(PROMPTS, GREEDY)
    assert [result.outputs[0].token_ids for result in results] == [
        greedy(reference, result.prompt_token_ids) for result in results
    ]
    again = llm.generate([result.prompt_token_ids for result in results], GREEDY)
    assert [result.text for result in again] == [result.text for result in results]
    assert (results[0].usage.prompt, results[0].usage.completion) == (len(results[0].prompt_token_ids), 12)
    assert results[0].outputs[0].finish_reason == "length"
    assert_idle(stats(llm))


def test_sampling_parameters_of_the_folder_apply_where_none_is_given(tiny_chat, options, tmp_path):
    """With the likeliest token alone, there is one answer."""
    folder = shutil.copytree(tiny_chat, tmp_path / "own")
    given = {"do_sample": True, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 8}
    (folder / "generation_config.json").write_text(json.dumps(given))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(folder, **options) as own, LLM(folder, generation_config="none", **options) as plain:
        result = own.generate("The sea", SamplingParams(max_tokens=20, ignore_eos=True))[0]
        expected = model.generate(torch.tensor([result.prompt_token_ids]), min_new_tokens=8, pad_token_id=0)
        assert result.outputs[0].token_ids == tuple(expected[0, -8:].tolist())
        drawn = plain.generate("The sea", SamplingParams(max_tokens=20, ignore_eos=True, seed=1))[0].outputs[0]
        assert len(drawn.token_ids) == 20 and drawn.token_ids[:8] != result.outputs[0].token_ids


def test_adapters_are_named_or_given_as_folders(llm, reference, tiny_chat, tiny_adapter):
    folder, delta = tiny_adapter
    merged = AutoModelForCausalLM.from_pretrained(tiny_chat, dtype=torch.float32)
    for name, weight in merged.named_parameters():
        weight.data += delta.get(name, 0)
    base, named, given = llm.generate(["The sea"] * 3, GREEDY, adapter=[None, "first", folder])
    assert named.outputs[0].token_ids == given.outputs[0].token_ids == greedy(merged, named.prompt_token_ids)
    assert base.outputs[0].token_ids != named.outputs[0].token_ids
    assert len(llm.adapters()) == 2
    llm.add_adapter("second", folder)
    assert llm.generate("The sea", GREEDY, adapter="second")[0].text == named.text
    assert [llm.remove_adapter(adapter) for adapter in ("second", folder)] == [0, 0]
    with pytest.raises(ApiError, match="neither the name of an adapter nor a folder"):
        llm.generate("The sea", adapter="second")


def test_a_stream_has_the_pieces_of_the_whole(llm):
    whole = llm.chat(CHAT, GREEDY)[0]
    pieces = list(llm.stream_chat(CHAT, GREEDY))
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == whole.text
    assert (pieces[-1].finish_reason, pieces[-1].usage.completion) == ("length", 12)


def test_answers_follow_grammars_and_call_tools(llm):
    choice = llm.generate("Red or blue?", SamplingParams(guided_choice=["red", "blue"], max_tokens=30))[0]
    assert choice.text in ("red", "blue")
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": [[1, 2]]}}}
    [told] = llm.chat(CHAT, SamplingParams(response_format=schema), tools=[TOOL], tool_choice="none")
    assert json.loads(told.text) == [1, 2]
    [called] = llm.chat(CHAT, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [call] = called.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert called.outputs[0].finish_reason == "tool_calls"


def test_logprobs_of_prompts_are_those_of_hugging_face(llm, reference):
    [result] = llm.generate("The sea", SamplingParams(max_tokens=0, prompt_logprobs=2))
    ids = torch.tensor([result.prompt_token_ids])
    with torch.inference_mode():
        wanted = reference(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    first, *others = result.prompt_logprobs
    assert first is None
    assert [values.logprob for _, values in others] == pytest.approx(wanted, abs=1e-3)
    assert [len(values.top) for _, values in others] == [2] * len(wanted)
    assert result.text == ""


def test_logprobs_and_several_answers(llm):
    [result] = llm.chat(CHAT, SamplingParams(n=2, logprobs=3, max_tokens=4, seed=1, ignore_eos=True))
    assert [output.index for output in result.outputs] == [0, 1]
    assert [len(output.logprobs) for output in result.outputs] == [4, 4]
    assert len(result.outputs[0].logprobs[0].top) == 3


@torch.inference_mode()
def test_vectors_are_those_of_hugging_face(llm, reference):
    vectors = [found.vector for found in llm.embed(PROMPTS)]
    for text, vector in zip(PROMPTS, vectors, strict=True):
        [result] = llm.generate(text, GREEDY)
        state = reference.model(torch.tensor([result.prompt_token_ids])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-4)
    assert len(llm.embed("one text", dimensions=8)[0].vector) == 8
    assert llm.embed([]) == llm.generate([]) == []


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"params": SamplingParams(temperature=9)}, "temperature"),
        ({"params": SamplingParams(guided_regex="(")}, "guided_regex"),
        ({"lane": "fast"}, "lane"),
        ({"params": [GREEDY, GREEDY]}, "params"),
        ({"prompts": [1, 10**6]}, "prompt"),
        ({"prompts": ["a", [1]]}, "prompts"),
    ],
)
def test_errors_name_what_cannot_be_used(llm, arguments, param):
    with pytest.raises(ApiError) as caught:
        llm.generate(**{"prompts": "Hello"} | arguments)
    assert caught.value.param == param


def test_a_prediction_changes_no_answer_and_is_in_its_usage(tiny_chat, options):
    """Its tokens are computed whatever that costs, since it depends on the machine."""
    engine = options["engine"] | {"speculation": "auto"}
    chat, params = [{"role": "user", "content": "hi"}], {"temperature": 0, "max_tokens": 40, "ignore_eos": True}

    def everything(state, guesses, *_):
        return {seq: min(4, len(guess.tokens)) for seq, guess in guesses.items()}

    with LLM(tiny_chat, **options | {"engine": engine}) as llm, patch.object(proposals, "_worthwhile", everything):
        [plain] = llm.chat(chat, SamplingParams(speculation="off", **params))
        predicted = {"type": "content", "content": plain.text}
        [answer] = llm.chat(chat, SamplingParams(**params), prediction=predicted)
        [off] = llm.chat(chat, SamplingParams(speculation="off", **params), prediction=predicted)
    assert answer.outputs[0].token_ids == plain.outputs[0].token_ids == off.outputs[0].token_ids
    assert answer.usage.completion == 40 > answer.usage.accepted_prediction > 0
    assert plain.usage.accepted_prediction == off.usage.accepted_prediction == off.usage.rejected_prediction == 0


def test_messages_among_conversations_are_refused(llm):
    with pytest.raises(ApiError) as caught:
        llm.chat([CHAT[0], CHAT])
    assert caught.value.param == "messages"


def test_parameters_are_fields_of_the_http_api():
    fields = set(SamplingParams.__struct_fields__)
    assert fields <= set(CompletionRequest.__struct_fields__)
    assert fields <= set(ChatRequest.__struct_fields__)


async def test_requests_that_are_left_give_their_pages_back(tiny_chat, options):
    async with AsyncLLM(tiny_chat, **options) as llm:
        engine = llm._parts.engine

        async def idle():
            while any(lane.running + lane.waiting for lane in (await engine.stats()).lanes):
                await asyncio.sleep(0.01)
            assert_idle(await engine.stats(check=True))

        async with llm.generate("Closed", ENDLESS) as stream:
            assert (await anext(stream)).token_ids
        await idle()
        async for _ in llm.generate("Dropped", ENDLESS, lane="batch"):
            break
        await idle()
        task = asyncio.create_task(llm.chat(CHAT, ENDLESS)._whole())
        while not (await engine.stats()).lanes[0].running:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        await idle()
        both = await asyncio.gather(llm.generate("x", GREEDY), llm.generate("x", GREEDY, lane="batch"))
        assert both[0].text == both[1].text
        stream = llm.generate("Closed with the model", ENDLESS)
        await anext(stream)
    with pytest.raises(ApiError, match="stopping"):
        async for _ in stream:
            pass
    with pytest.raises(RuntimeError, match="closed"):
        await llm.generate("x")


def test_threads_end_with_the_model(tiny_chat, options):
    before = set(threading.enumerate())
    llm = LLM(tiny_chat, **options)
    llm.generate("x", GREEDY)
    executor = weakref.ref(llm._llm._parts.engine._engine.executor)
    llm.close()
    llm.close()
    assert executor() is None  # with the weights and the pages
    begun = set(threading.enumerate()) - before
    for thread in begun:
        thread.join(30)  # a timer that was cancelled ends within milliseconds
    assert not [thread.name for thread in begun if thread.is_alive()]
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


PROGRAM = """
import sys
from loralane import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", engine={"num_pages": 200, "threads": 1})
pieces = llm.stream("x", SamplingParams(max_tokens=400, ignore_eos=True))
next(pieces)
"""


def test_a_program_may_end_without_closing_its_model(tiny_chat):
    paths = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "gateway" / "python")))}
    command = [sys.executable, "-c", PROGRAM, str(tiny_chat)]
    ended = subprocess.run(command, capture_output=True, text=True, env=paths, timeout=120)
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False), ended.stderr


def failing_build(config, on_progress):
    core, executor, info = build_fake(config, on_progress)

    def submit(plan):
        raise ZeroDivisionError("the device is gone")

    executor.submit = submit
    info.vocab_size = 260
    return core, executor, info


async def test_an_exception_in_the_engine_reaches_all_callers(tiny_chat, monkeypatch):
    monkeypatch.setattr(setup, "LocalEngine", partial(LocalEngine, build=failing_build))
    async with AsyncLLM(tiny_chat) as llm:
        calls = [llm.generate("a"), llm.chat(CHAT), llm.generate("b", lane="batch")]
        for outcome in await asyncio.gather(*calls, llm.embed(["c"]), return_exceptions=True):
            assert isinstance(outcome, EngineFailed)
            assert isinstance(outcome.__cause__, ZeroDivisionError)
        with pytest.raises(EngineFailed, match="the device is gone"):
            await llm.generate("later")


def test_a_model_that_cannot_be_loaded_leaves_nothing(tmp_path):
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"neither a config.json nor a GGUF file"):
        LLM(tmp_path)
    assert threading.active_count() == before


def test_importing_the_package_is_cheap():
    check = "import sys, loralane; print(sorted({'torch', 'grpc', 'httpx', 'gateway', 'engine'} & sys.modules.keys()))"
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "gateway" / "python")))}
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, env=paths)
    assert found.stdout.strip() == "[]"


async def test_a_model_that_is_closed_while_it_is_loaded_is_freed(monkeypatch):
    steps, loaded = [], asyncio.Event()

    @asynccontextmanager
    async def slowly(source, options):
        steps.append("loads")
        await loaded.wait()
        try:
            yield
        finally:
            steps.append("freed")

    monkeypatch.setattr(async_llm, "opened", slowly)
    llm = AsyncLLM("any")
    starting = asyncio.create_task(llm.start())
    await asyncio.sleep(0)
    closing = asyncio.create_task(llm.close())
    await asyncio.sleep(0)
    loaded.set()
    await asyncio.gather(starting, closing)
    assert steps == ["loads", "freed"]
