"""What the demo adapter `tools` learns from, and what it is measured by."""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.demo import CHAT_TEMPLATE
from lab.demo.packed import SHARED, PackedRow, pack, packed_loss, render
from lab.demo.score import is_call, questions
from lab.demo.tools import TOOLS_SHAPE
from lab.demo.tools.conversations import call_of, source, trees
from lab.demo.train import train_tools, wrap
from tests.schemas import check

LEARNT = trees(60, seed=0)


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    loaded = AutoTokenizer.from_pretrained(smollm2)
    loaded.chat_template = CHAT_TEMPLATE.read_text()
    return loaded


def calls_of(branch):
    return [call_of(message) for message in branch.messages if "tool_calls" in message]


def test_conversations_depend_on_the_seed_alone():
    assert trees(60, seed=0) == LEARNT
    assert trees(60, seed=1) != LEARNT


def test_every_call_follows_the_schema_of_its_tool():
    for tree in LEARNT:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tree.tools}
        assert len(schemas) == len(tree.tools)
        for name, arguments in (call for branch in tree.branches for call in calls_of(branch)):
            check(json.dumps(arguments), schemas[name] | {"additionalProperties": False})


def test_conversations_differ_in_what_the_assistant_has_to_do():
    branches = [branch.messages for tree in LEARNT for branch in tree.branches]
    last = [messages[-1] for messages in branches]
    assert 0.3 < sum("tool_calls" in message for message in last) / len(last) < 0.9
    assert sum(messages[-2]["role"] == "tool" for messages in branches) > 40, "answers to results"
    assert sum(len(messages) == 2 and "tool_calls" not in messages[-1] for messages in branches) > 40, "no tool fits"
    assert any(len(calls_of(branch)) == 2 for tree in LEARNT for branch in tree.branches)
    assert len({tool["function"]["name"] for tree in LEARNT for tool in tree.tools}) > 70


def test_no_tool_no_phrasing_and_no_question_is_trained_and_measured():
    trained, held_out = source(0), source(0, held_out=True)
    for side in ("names", "requests"):
        sides = [{one for kind in drawn.kinds for one in getattr(kind, side)} for drawn in (trained, held_out)]
        assert not sides[0] & sides[1]
    assert not set(trained.plain) & set(held_out.plain)
    asked = {message["content"] for tree in trees(300, seed=0) for b in tree.branches for message in b.messages}
    measured = [question for group in questions(90, 30, 0).values() for question in group]
    assert not asked & {question.messages[-1]["content"] for question in measured}


def test_a_row_has_every_conversation_as_the_server_renders_it(tokenizer):
    for tree in LEARNT[:8]:
        row = pack(tokenizer, tree)
        opening = [] if tree.system is None else [{"role": "system", "content": tree.system}]
        for owner, branch in enumerate(tree.branches, start=1):
            own = [at for at, of in enumerate(row.owners) if of in (SHARED, owner)]
            assert [row.positions[at] for at in own] == list(range(len(own)))
            text = render(tokenizer, [*opening, *branch.messages], tree)
            assert tokenizer.decode([row.ids[at] for at in own]) + "\n" == text
            learnt = tokenizer.decode([row.ids[at] for at in own if row.learnt[at]])
            assert learnt.count("<|im_end|>") == sum(m["role"] == "assistant" for m in branch.messages)
            assert learnt.count("<tool_call>") == len(calls_of(branch))
            assert "<|im_start|>" not in learnt


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, initializer_range=0.3, **shape))


ROW = PackedRow(
    ids=[3, 4, 5, 6, 7, 8, 9],
    positions=[0, 1, 2, 3, 2, 3, 4],
    owners=[0, 0, 1, 1, 2, 2, 2],
    learnt=[False, False, False, True, False, True, True],
)


def test_no_conversation_of_a_row_sees_another(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    model = wrap(tmp_path, TOOLS_SHAPE).float()
    expected = []
    for ids, learnt in (([3, 4, 5, 6], 1), ([3, 4, 7, 8, 9], 2)):
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected += [-logprobs[at - 1, ids[at]] for at in range(len(ids) - learnt, len(ids))]
    padded = PackedRow([3, 4, 5], [0, 1, 2], [0, 0, 1], [False, False, False])
    torch.testing.assert_close(packed_loss(model, [ROW, padded]), torch.stack(expected).mean())


def test_training_lowers_the_loss(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    losses = list(train_tools(wrap(tmp_path, TOOLS_SHAPE), [ROW] * 12))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', True),
        ('<tool_call>{"arguments": {"a": 1.0}, "name": "f"}', True),
        ('Sure. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "1"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1', False),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{}</tool_call>', False),
        ("I cannot.", False),
    ],
)
def test_only_the_exact_call_counts(text, right):
    assert is_call(text, "f", {"a": 1}) is right
