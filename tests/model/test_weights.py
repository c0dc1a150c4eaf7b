"""Weights and the specification: what is stored must be what config.json describes, or be refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from engine.model.spec.config import parse_spec, read_spec
from engine.model.spec.rope import read_rope
from engine.model.weights.reader import WeightsError, open_weights, parameter_shapes

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture
def spec():
    return parse_spec(CONFIG, {})


@pytest.fixture
def tensors(spec):
    return {name: torch.randn(shape) for name, shape in parameter_shapes(spec).items()}


def test_reads_one_file(tmp_path, spec, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_weights(tmp_path, spec)
    assert all(torch.equal(source(name), tensor) for name, tensor in tensors.items())


def test_reads_shards(tmp_path, spec, tensors):
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_weights(tmp_path, spec)
    assert all(torch.equal(source(name), tensor) for name, tensor in tensors.items())
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        open_weights(tmp_path, spec)


def test_redundant_tensors_are_accepted(tmp_path, spec, tensors):
    extra = {"lm_head.weight": torch.zeros(32, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    assert open_weights(tmp_path, spec)("model.norm.weight").shape == (16,)


def test_missing_tensor_is_named(tmp_path, spec, tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"missing tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_weights(tmp_path, spec)


def test_unexpected_tensor_is_named(tmp_path, spec, tensors):
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        open_weights(tmp_path, spec)


def test_wrong_shape_is_named(tmp_path, spec, tensors):
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"k_proj\.weight has shape \[16, 16\], the model needs \[8, 16\]"):
        open_weights(tmp_path, spec)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/outside.safetensors", "deeper/outside.safetensors"])
def test_an_index_names_files_of_its_folder_only(tmp_path, spec, tensors, name):
    folder = tmp_path / "model"
    (folder / "deeper").mkdir(parents=True)
    for outside in (tmp_path, folder / "deeper"):
        save_file(tensors, outside / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with pytest.raises(WeightsError, match="not in its folder"):
        open_weights(folder, spec)


def test_pickles_are_never_read(tmp_path, spec):
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even looked at")
    with pytest.raises(WeightsError, match="pickle"):
        open_weights(tmp_path, spec)


def test_dummy_weights_follow_the_seed(tmp_path, spec):
    name = "model.layers.1.mlp.up_proj.weight"
    one, same, other = (open_weights(tmp_path, spec, "dummy", seed)(name) for seed in (1, 1, 2))
    assert one.shape == (24, 16)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0 < one.std() < 0.05


def test_spec_refuses_what_it_cannot_run():
    with pytest.raises(ValueError, match=r"'mamba' is not supported; supported: .*llama, mistral, .*qwen2, .*qwen3"):
        parse_spec(CONFIG | {"model_type": "mamba"}, {})
    with pytest.raises(ValueError, match=r"'phimoe' is not supported: the engine lacks layers with experts"):
        parse_spec(CONFIG | {"model_type": "phimoe"}, {})
    with pytest.raises(ValueError, match="hidden_act 'gelu'"):
        parse_spec(CONFIG | {"hidden_act": "gelu"}, {})
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        parse_spec(CONFIG | {"rope_scaling": {"type": "dynamic"}}, {})
    with pytest.raises(ValueError, match="long_factor must have 2 positive numbers"):
        parse_spec(CONFIG | {"rope_scaling": {"type": "longrope"}}, {})
    with pytest.raises(ValueError, match="no vocab_size"):
        parse_spec({key: value for key, value in CONFIG.items() if key != "vocab_size"}, {})


def test_spec_needs_a_config(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [({"eos_token_id": 2}, {}, (2,)), ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, (5, 6)), ({}, {}, ())],
)
def test_eos_ids(config, generation, expected):
    base = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
    assert parse_spec(base | config, generation).eos_token_ids == expected


def test_both_ways_of_writing_rope_are_one():
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    assert read_rope(old, 16) == read_rope(new, 16)
    assert read_rope(old, 16) != read_rope({"rope_theta": 5e5}, 16)


def test_tensors_that_automodel_saved_lack_a_prefix(tmp_path, spec, tensors):
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    source = open_weights(tmp_path, spec)
    assert all(torch.equal(source(name), tensor) for name, tensor in tensors.items())


def test_a_checkpoint_without_a_head_gives_vectors_only(tmp_path, tensors):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_spec(tmp_path)
    assert not found.has_head
    open_weights(tmp_path, found)
    save_file(tensors | {"lm_head.weight": torch.zeros(32, 16)}, tmp_path / "model.safetensors")
    assert read_spec(tmp_path).has_head


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: fetch it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n", "git lfs pull"),
        (b"\xff" * 200, "is damaged or incomplete"),
        (None, "is damaged or incomplete"),
    ],
)
def test_a_broken_file_is_named_with_the_remedy(tmp_path, spec, tensors, content, words):
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(WeightsError, match=words) as broken:
        open_weights(tmp_path, spec)
    assert str(broken.value).startswith(str(file))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_named_with_the_remedy(tmp_path, spec, text):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(WeightsError, match="fetch it again") as broken:
        open_weights(tmp_path, spec)
    assert str(broken.value).startswith(str(index))


@pytest.mark.parametrize("text", ["{ not json", "[]", ""])
def test_a_broken_configuration_is_named_with_the_remedy(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="fetch it again"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"type": "yarn"}, "'yarn' must have a number factor"),
        ({"type": "linear", "factor": "2"}, "'linear' must have a number factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            "'llama3' must have a number high_freq_factor",
        ),
        ([1, 2], "rope_scaling must be an object"),
    ],
)
def test_scaling_without_what_it_needs_is_refused_by_name(scaling, words):
    with pytest.raises(ValueError, match=words):
        parse_spec(CONFIG | {"rope_scaling": scaling}, {})


def test_yarn_extends_the_context_as_qwen_documents():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert parse_spec(CONFIG | {"rope_scaling": yarn}, {}).max_position == 256
    assert parse_spec(CONFIG | {"rope_scaling": yarn, "max_position_embeddings": 300}, {}).max_position == 300


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>"}])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "tokenizer.json"])
def test_the_tokenizers_eos_ends_answers_too(tmp_path, eos, place):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    decoder = {"added_tokens_decoder": {"2": {"content": "<|endoftext|>"}, "7": {"content": "<|im_end|>"}}}
    settings = {"eos_token": eos} | (decoder if place == "tokenizer_config.json" else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}))
    assert read_spec(tmp_path).eos_token_ids == (2, 7)
