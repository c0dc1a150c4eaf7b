"""A model folder whose tokenizer is in the format of SentencePiece or of Mistral is served as others are."""

import json

import pytest
from loralane import LLM, SamplingParams

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(params=["llama", "tekken"])
def folder(request, tmp_path):
    from tiny_llama import save_llama
    from tokenizer_files import MODELS, tekken, write_model

    config = tekken()["config"]
    tokens = config["default_vocab_size"] if request.param == "tekken" else len(MODELS["llama"][0])
    save_llama(tmp_path / "tiny", tokens, 512, eos_token_id=2)
    (tmp_path / "tiny" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    if request.param == "tekken":
        (tmp_path / "tiny" / "tekken.json").write_text(json.dumps(tekken()))
    else:
        write_model(tmp_path / "tiny" / "tokenizer.model", *MODELS["llama"])
    return tmp_path / "tiny"


def test_a_chat_is_answered_and_follows_a_grammar(folder, options, tmp_path, monkeypatch):
    monkeypatch.setenv("LORALANE_DATA_DIR", str(tmp_path / "data"))
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": [{"the": ["world", 10]}]}}}
    chat = [{"role": "user", "content": "Hello \u65e5\u672c"}]
    with LLM(folder, **options) as llm:
        [answer] = llm.chat(chat, SamplingParams(response_format=schema, max_tokens=100))
        [free] = llm.chat(chat, SamplingParams(max_tokens=5, ignore_eos=True))
    assert json.loads(answer.text) == {"the": ["world", 10]}
    assert answer.prompt_token_ids[0] == 1
    assert free.usage.completion == 5
    assert [path.name.startswith("tiny-") for path in (tmp_path / "data" / "models").iterdir()] == [True]
