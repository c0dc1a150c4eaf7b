"""The demo adapters' files, and the data they were trained on. e2e/test_serving.py tests how they answer."""

import json
from itertools import combinations

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from engine.demo import DEMO_ADAPTERS
from lab.demo.characters import CHARACTERS, as_json, cheer, examples, pirate
from lab.demo.questions import plain_pairs
from lab.demo.tools import TOOLS_SHAPE
from lab.demo.train import BASE_MODEL, Row, answer_loss, app, batches, encode, save, train, wrap

NAMES = sorted(DEMO_ADAPTERS)
SPOKEN = sorted(CHARACTERS)
SHAPES = {name: character.shape for name, character in CHARACTERS.items()} | {"tools": TOOLS_SHAPE}
LARGEST = {"tools": 8_000_000}
"""Bytes of an adapter with more projections than the characters have."""


def read_config(name: str) -> dict:
    return json.loads((DEMO_ADAPTERS[name] / "adapter_config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_a_small_peft_adapter_of_the_public_base(name):
    config, weights = read_config(name), DEMO_ADAPTERS[name] / "adapter_model.safetensors"
    assert {file.name for file in DEMO_ADAPTERS[name].iterdir()} == {"adapter_config.json", weights.name}
    assert 500_000 <= weights.stat().st_size <= LARGEST.get(name, 1_500_000)
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert 4 <= config["r"] <= 16


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_what_the_configuration_says(name):
    shape, config = SHAPES[name], read_config(name)
    stored = (config["r"], config["lora_alpha"], config["use_rslora"], sorted(config["target_modules"]))
    assert stored == (shape.rank, shape.alpha, shape.use_rslora, sorted(shape.target_modules))
    with safe_open(DEMO_ADAPTERS[name] / "adapter_model.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (the handle is not a mapping)
    assert len(tensors) == 30 * 2 * len(shape.target_modules)
    for key, tensor in tensors.items():
        assert key.split(".")[-3] in shape.target_modules
        assert tensor.dtype == torch.bfloat16
        assert tensor.shape[0 if "lora_A" in key else 1] == shape.rank
        assert tensor.isfinite().all()
        assert tensor.any()


def test_adapters_differ_in_rank_and_in_modules():
    assert set(DEMO_ADAPTERS) == set(SHAPES)
    for one, other in combinations(map(read_config, NAMES), 2):
        assert one["r"] != other["r"]
        assert set(one["target_modules"]) != set(other["target_modules"])
    assert any(read_config(name)["use_rslora"] for name in NAMES)


def test_characters_speak_their_own_way():
    plain = "Hello, my friend. Are you sailing? The sea is wide."
    assert pirate(plain) == "Arr! Ahoy, me shipmate. Be ye sailin'? The sea be wide, matey!"
    assert cheer(plain) == "Woohoo! Hello, my friend! Are you sailing? The sea is wide! 🎉🙌"
    assert json.loads(as_json('She said "3.5".')) == {"answer": 'She said "3.5".'}


@pytest.mark.parametrize("name", SPOKEN)
def test_examples_are_deterministic_and_all_in_character(name):
    character = CHARACTERS[name]
    built = examples(character, seed=1)
    assert built == examples(character, seed=1)
    assert built != examples(character, seed=2)
    spoken = {question: character.speak(answer) for question, answer in plain_pairs()}
    assert len(built) >= 200
    assert {example.messages[-1]["content"] for example in built} == set(spoken)
    assert all(example.answer == spoken[example.messages[-1]["content"]] for example in built)
    assert {example.messages[0]["role"] for example in built} == {"user", "system"}
    assert any(message["role"] == "assistant" for example in built for message in example.messages)


def test_no_question_comes_twice_and_some_are_left_to_try():
    questions = [question for question, _ in plain_pairs()]
    assert len(set(questions)) == len(questions)
    text = " ".join(f"{question} {answer}" for question, answer in plain_pairs()).lower()
    assert not {"france", "paris", "moon"} & set(text.replace("?", " ").replace(".", " ").split())


def test_a_batch_wastes_little_on_padding_and_keeps_every_row_once():
    rows = [Row(list(range(5 + i * 7 % 40)), 3) for i in range(48)]
    made = batches(rows, 8)
    assert [len(batch) for batch in made] == [8] * 6
    assert sorted(len(row.ids) for batch in made for row in batch) == sorted(len(row.ids) for row in rows)
    assert max(max(len(r.ids) for r in batch) - min(len(r.ids) for r in batch) for batch in made) <= 10
    assert made == batches(rows, 8)


def test_only_answer_tokens_are_learnt(tiny_base):
    model = wrap(tiny_base, SHAPES["pirate"]).float()
    rows = [Row([3, 4, 5, 6, 7], 2), Row([9, 8, 7], 1)]
    expected = []
    for row in rows:
        logprobs = model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        start = len(row.ids) - row.num_answer
        expected += [-logprobs[i - 1, row.ids[i]] for i in range(start, len(row.ids))]
    torch.testing.assert_close(answer_loss(model, rows), torch.stack(expected).mean())


def test_training_lowers_the_loss_and_saves_what_peft_reads_back(tiny_base, tmp_path):
    torch.manual_seed(0)
    model = wrap(tiny_base, SHAPES["cheer"])
    losses = list(train(model, [Row([1, 2, 3, 4], 2), Row([1, 5, 6, 7], 2)], steps=40, batch_size=2))
    assert losses[-1] < 0.8 * losses[0]
    save(model, tmp_path / "out")
    assert str(tmp_path) not in (tmp_path / "out" / "adapter_config.json").read_text()
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.bfloat16)
    loaded = PeftModel.from_pretrained(base, tmp_path / "out")
    assert loaded.peft_config["default"].base_model_name_or_path == BASE_MODEL
    torch.testing.assert_close(
        loaded(torch.tensor([[1, 2, 3]])).logits, model(torch.tensor([[1, 2, 3]])).logits, atol=0.02, rtol=0.05
    )


def test_a_name_that_is_no_character_is_refused_with_the_names_that_are():
    result = CliRunner().invoke(app, ["parrot"])
    assert result.exit_code == 2
    assert all(name in result.output for name in NAMES)


def test_rows_end_like_the_chat_template_does(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for example in examples(CHARACTERS["json"])[:20]:
        row = encode(tokenizer, example)
        chat = [*example.messages, {"role": "assistant", "content": example.answer}]
        assert tokenizer.decode(row.ids) + "\n" == tokenizer.apply_chat_template(chat, tokenize=False)
        assert tokenizer.decode(row.ids[-row.num_answer :]) == example.answer + tokenizer.eos_token


@pytest.fixture
def tiny_base(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"
