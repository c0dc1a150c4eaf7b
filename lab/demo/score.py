"""Measures how well a model uses tools that it was never trained with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lab.demo.packed import render
from lab.demo.tools.conversations import Conversation, Json, Message, Source, Tree, ask, call_of, plain, source, told
from lab.demo.tools.forms import extraction_tool, made_up_tool
from lab.demo.tools.kinds import Tool, make_tool

SEED = 1
MAX_TOKENS = 96
BATCH_SIZE = 16
CALL = "<tool_call>"


@dataclass(frozen=True, slots=True)
class Question:
    """A test question for the adapter `tools`: a conversation up to an answer of the assistant, with the tools of
    `tree`, and a test of that answer's text."""

    tree: Tree
    messages: tuple[Message, ...]
    is_right: Callable[[str], bool]


def questions(calls: int, abstentions: int, answers: int) -> dict[str, list[Question]]:
    """Return held-out questions by the kind of right answer: tool calls, words if no tool fits, words about a tool
    result. The arguments are the numbers of questions of each kind. The same numbers always give the same questions."""
    drawn = source(SEED, held_out=True)
    return {
        "calls": [_call_question(drawn, _tools(drawn, number)) for number in range(calls)],
        "abstentions": [_plain_question(drawn, _tools(drawn, number)) for number in range(abstentions)],
        "answers to results": [_result_question(drawn, _tools(drawn, number)) for number in range(answers)],
    }


def score(model: Any, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question]) -> float:
    """Return the fraction of the questions `asked` (not empty) that a model answers correctly with greedy decoding."""
    right = [question.is_right(text) for question, text in answered(model, tokenizer, asked)]
    return sum(right) / len(right)


def answered(
    model: Any, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question]
) -> Iterator[tuple[Question, str]]:
    """Yield each question with the model's answer (greedy, at most MAX_TOKENS tokens), the shortest prompts first. Sets
    the tokenizer to pad on the left."""
    tokenizer.padding_side = "left"
    prompts = [(question, render(tokenizer, question.messages, question.tree, generation=True)) for question in asked]
    prompts.sort(key=lambda pair: len(pair[1]))
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[start : start + BATCH_SIZE]
        encoded = tokenizer([text for _, text in batch], return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            output = model.generate(**encoded, max_new_tokens=MAX_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
        yield from zip([question for question, _ in batch], texts, strict=True)


def is_call(text: str, name: str, arguments: Json) -> bool:
    """Return whether an answer's text is a single call of the tool `name` with exactly these arguments."""
    before, _, rest = text.strip().partition(CALL)
    try:
        return not before and json.loads(rest.removesuffix("</tool_call>")) == {"name": name, "arguments": arguments}
    except ValueError:
        return False


def _tools(drawn: Source, number: int) -> list[Tool]:
    """Draw the tool that a question is about, and up to `number` % 3 others after it. The first comes from the held-out
    list if `number` % 3 is 0 or 1, and is made up otherwise."""
    if number % 3 < 2:
        first = make_tool(drawn.kinds[number % len(drawn.kinds)], drawn.rng)
    else:
        make = extraction_tool if number % 2 else made_up_tool
        first = make(drawn.rng, held_out=True)
    others = [tool for tool in drawn.tools(2) if tool.name != first.name and tool.kind is not first.kind]
    return [first, *others[: number % 3]]


def _call_question(drawn: Source, tools: list[Tool]) -> Question:
    messages = ask(drawn, tools[0])
    name, arguments = call_of(messages[1])
    return Question(_tree(drawn, tools), tuple(messages[:1]), lambda text: is_call(text, name, arguments))


def _plain_question(drawn: Source, tools: list[Tool]) -> Question:
    messages = plain(drawn).messages
    return Question(_tree(drawn, tools), messages[:1], lambda text: bool(text.strip()) and CALL not in text)


def _result_question(drawn: Source, tools: list[Tool]) -> Question:
    messages = told(drawn, ask(drawn, tools[0]))
    words = messages[-1]["content"]
    return Question(_tree(drawn, tools), tuple(messages[:-1]), lambda text: text.strip() == words)


def _tree(drawn: Source, tools: list[Tool]) -> Tree:
    """Shuffle `tools` in place. Return a `Tree` of conversations that offers them, with the template's own system
    prompt and one branch without messages."""
    drawn.rng.shuffle(tools)
    return Tree(None, tuple(tool.schema for tool in tools), (Conversation(()),))
