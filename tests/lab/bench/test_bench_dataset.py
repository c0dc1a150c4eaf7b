"""Data sets of prompts: the formats that are read, and the texts that the project writes."""

import json
import random

import pytest

from lab.bench.dataset import OWN_TEXTS, Sample, plain_text, read_samples
from lab.bench.plan import Plan
from lab.bench.prompts import WORDS_PER_TOKEN, write_question, write_text
from lab.bench.spec import SpecError, parse_lane

USER = {"role": "user", "content": "What is it?!"}  # 12 bytes: 3 tokens


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


SHARE_GPT = {
    "id": "a",
    "conversations": [
        {"from": "human", "value": "What is it?!"},
        {"from": "gpt", "value": "It is a bench"},
        {"from": "human", "value": "Thanks"},
    ],
}
BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER]}}


@pytest.mark.parametrize(
    ("text", "sample"),
    [
        (json.dumps([SHARE_GPT]), Sample((USER,), 3, 3)),
        (lines(SHARE_GPT), Sample((USER,), 3, 3)),
        (json.dumps([SHARE_GPT], indent=1), Sample((USER,), 3, 3)),
        (lines({"messages": [USER, {"role": "assistant", "content": "x" * 40}]}), Sample((USER,), 3, 10)),
        (lines({"messages": [USER]}), Sample((USER,), 3, None)),
        (lines(BATCH), Sample((USER,), 3, None)),
        (lines({**BATCH, "body": {"prompt": "What is it?!", "max_tokens": 7}}), Sample((USER,), 3, 7)),
        (lines({"prompt": "What is it?!", "output_tokens": 5}), Sample((USER,), 3, 5)),
        ("req_time_s,client,prompt_len,output_len\n0.5,1,20,30\n", Sample((), 20, 30)),
        (lines({"timestamp": 0, "input_length": 9, "output_length": 2}), Sample((), 9, 2)),
        (
            lines(
                {
                    "event": "request", "timestamp": "2026-01-01T00:00:00Z", "duration_ms": 5.0, "error": None,
                    "prompt_tokens": 11, "completion_tokens": 4, "cached_tokens": 0, "tenant": "acme",
                    "lane": "batch", "adapter": None,
                }
            ),
            Sample((), 11, 4),
        ),
    ],
)  # fmt: skip
def test_formats(tmp_path, text, sample):
    file = tmp_path / "data"
    file.write_text(text)
    assert read_samples(file) == [sample]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "holds no prompts"),
        (json.dumps([{"conversations": [{"from": "gpt", "value": "Hello"}]}]), "holds no prompts"),
        (lines({"prompt": ["a"]}), "a prompt must be a text"),
        (lines({"prompt": "a"}, {"nothing": 1}), "a row has no 'conversations or messages or body or prompt'"),
        ("[1]", "known formats are ShareGPT"),
        ("[{", "known formats are ShareGPT"),
        ("", "known formats are Azure"),
        ("once upon a time\n", "known formats are Azure"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, text, words):
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_samples(file)


def test_texts_have_about_their_lengths_and_depend_on_the_seed_only():
    for tokens in (5, 64, 500):
        text = write_question(tokens, random.Random(tokens))
        assert len(text.split()) == pytest.approx(tokens * WORDS_PER_TOKEN, abs=1.5)
        assert text == write_question(tokens, random.Random(tokens)) != write_question(tokens, random.Random(99))
    assert write_text(30, random.Random(0)).count(".") >= 1


def items(dataset, samples=(), lane="default:n=6,in=8-9,out=2", prompts=0):
    return Plan(("m",), (parse_lane(lane),), dataset=dataset, prompts=prompts).items(samples=samples)


def test_own_texts_are_the_prompts():
    found = items(OWN_TEXTS)
    assert found == items(OWN_TEXTS)
    assert {item.max_tokens for item in found} == {2}
    assert all(6 <= len(plain_text(item.messages).split()) <= 9 and not item.prompt for item in found)
    assert not {plain_text(item.messages) for item in found} & {
        plain_text(item.messages) for item in items(OWN_TEXTS, prompts=1)
    }


def test_each_prompt_of_a_data_set_comes_before_any_comes_again():
    samples = [Sample(({"role": "user", "content": str(index)},), 5, 10 * index or None) for index in range(3)]
    found = items("file", samples, "default:n=6,out=4-15")
    texts = [plain_text(item.messages) for item in found]
    assert sorted(texts[:3]) == sorted(texts[3:]) == ["0", "1", "2"]
    bounds = {text: item.max_tokens for text, item in zip(texts, found, strict=True)}
    assert (bounds["1"], bounds["2"]) == (10, 15)  # `out` bounds what the file says,
    assert 4 <= bounds["0"] <= 15  # and is drawn from where it says nothing


def test_a_lane_takes_prompts_of_its_lengths():
    samples = [Sample((USER,), 3, 1), Sample((), 500, 1)]
    found = items("file", samples, "default:n=4,in=2-4")
    assert {len(plain_text(item.messages).split()) for item in found} == {3}
    assert any("What is it" not in plain_text(item.messages) for item in found)  # 500 tokens of a trace became 4
    with pytest.raises(SpecError, match="no prompt of the data set has 8-9 tokens"):
        items("file", samples[:1])
