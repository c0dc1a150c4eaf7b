"""Sampling parameters that a model comes with."""

import json

import pytest

from engine.process.generation_config import read_sampling_defaults


def written(folder, given):
    (folder / "generation_config.json").write_text(given if isinstance(given, str) else json.dumps(given))
    return folder


def test_the_values_of_qwen_are_read_and_nothing_else(tmp_path):
    given = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.05,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "min_p": None,
        "transformers_version": "4.37.0",
    }
    expected = {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert read_sampling_defaults(written(tmp_path, given)) == expected


def test_names_and_values_are_those_of_requests(tmp_path):
    assert read_sampling_defaults(tmp_path) == {}
    assert read_sampling_defaults(written(tmp_path, {"max_new_tokens": 100, "top_k": -1})) == {
        "max_tokens": 100,
        "top_k": 0,
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": -1}, "temperature is '-1', not a number from 0 to 2: correct it, or set model."),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0}, "top_p is '0'"),
        ({"top_k": 2.5}, "top_k is '2.5', not an integer"),
        ({"min_p": True}, "min_p is 'True'"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is 'nan'"),
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
    ],
)
def test_what_no_request_may_have_is_refused_by_name(tmp_path, given, words):
    with pytest.raises(ValueError, match=r"generation_config\.json") as refused:
        read_sampling_defaults(written(tmp_path, given))
    assert words in str(refused.value)
