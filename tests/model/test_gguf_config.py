"""What a GGUF file's metadata say of its model: as the configuration of the model that it was made of."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.gguf.config import ROPE_FACTORS, read_config
from engine.model.spec.families import FAMILIES

HEADS, HEAD_DIM, CONTEXT = 4, 16, 8192
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}


def write(folder, arch="llama", tensors=None, **values):
    """Write a file with the shape of a tiny model, and `values` (with _ for the dots of a key) of the architecture."""
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HEADS * HEAD_DIM)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((260, HEADS * HEAD_DIM), np.float32))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    for key, value in values.items():
        name = key.replace("__", ".") if "__" in key else f"{arch}.{key}"
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def frequencies(rope, kind=transformers.LlamaConfig):
    """Return Hugging Face's frequencies, and the factor of cos and sin, of a tiny model."""
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    config = kind(**sizes, max_position_embeddings=CONTEXT, rope_parameters=dict(rope))
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))


def check(path, rope):
    config = read_config(path)
    spec = FAMILIES[config["model_type"]](config).served(CONTEXT)
    expected, factor = frequencies(rope)
    torch.testing.assert_close(torch.tensor(spec.ropes[0].inv_freq), expected, rtol=1e-6, atol=0)
    assert spec.ropes[0].attention_factor == pytest.approx(factor)


def divisors(rope):
    plain = 1.0 / (rope["rope_theta"] ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    return (plain / frequencies(rope)[0]).numpy().astype(np.float32)


def test_the_divisors_of_llama_3_1_scale_its_frequencies(tmp_path):
    path = write(tmp_path, tensors={ROPE_FACTORS: divisors(LLAMA3)}, **{"rope.freq_base": 500_000.0})
    check(path, LLAMA3)


def test_the_divisors_apply_beside_a_linear_scaling(tmp_path):
    values = {"rope.freq_base": 5e5, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    config = read_config(write(tmp_path, tensors={ROPE_FACTORS: divisors(LLAMA3)}, **values))
    assert config["rope_parameters"]["long_factor"] == pytest.approx([2 * float(one) for one in divisors(LLAMA3)])


def test_yarn_is_read(tmp_path):
    values = {"rope.freq_base": 1e6, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    check(write(tmp_path, "qwen2", **values, **{"rope.scaling.original_context_length": 2048}), YARN)


@pytest.mark.parametrize(
    "values", [{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}]
)
def test_linear_scaling_is_read_by_its_new_key_and_its_old_one(tmp_path, values):
    check(write(tmp_path, **{"rope.freq_base": 1e5}, **values), LINEAR)


def test_no_scaling_is_none(tmp_path):
    plain = {"rope_type": "default", "rope_theta": 1e4}
    assert read_config(write(tmp_path))["rope_parameters"] == plain
    values = {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}
    assert read_config(write(tmp_path, **values))["rope_parameters"] == plain


def test_heads_have_the_size_that_the_file_says(tmp_path):
    values = {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}
    assert read_config(write(tmp_path, "qwen3", **values))["head_dim"] == 32


def test_an_answer_ends_at_the_end_of_the_text_and_of_a_turn(tmp_path):
    ids = {"tokenizer__ggml__eos_token_id": 7, "tokenizer__ggml__eot_token_id": 9}
    assert read_config(write(tmp_path, **ids))["eos_token_id"] == [7, 9]


@pytest.mark.parametrize(
    ("arch", "values", "words"),
    [
        ("falcon", {}, "architecture 'falcon'"),
        ("llama", {"attention.temperature_scale": 0.5}, "llama.attention.temperature_scale = 0.5"),
        ("qwen2", {"expert_count": 8}, "qwen2.expert_count = 8"),
        ("llama", {"logit_scale": 8.0}, "llama.logit_scale = 8.0"),
        ("llama", {"attention.sliding_window": 4096}, "llama.attention.sliding_window = 4096"),
        ("llama", {"attention.causal": False}, "llama.attention.causal = False"),
        ("llama", {"rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ("llama", {"rope.scaling.type": "longrope"}, "llama.rope.scaling.type = longrope"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ("qwen2", {"something_new": 1}, "qwen2.something_new = 1"),
    ],
)
def test_what_would_change_results_and_is_not_understood_is_refused_by_name(tmp_path, arch, values, words):
    with pytest.raises(ValueError, match=r"tiny\.gguf") as refused:
        read_config(write(tmp_path, arch, **values))
    assert words in str(refused.value)


def test_keys_that_change_nothing_are_fine(tmp_path):
    values = {"attention.sliding_window": CONTEXT, "expert_count": 0, "attention.causal": True, "pooling_type": 3}
    assert read_config(write(tmp_path, **values))["max_position_embeddings"] == CONTEXT


@pytest.mark.parametrize("data", [np.ones(7, np.float32), np.ones(8, np.float16), np.zeros(8, np.float32)])
def test_divisors_that_cannot_be_used_are_refused(tmp_path, data):
    with pytest.raises(ValueError, match=ROPE_FACTORS):
        read_config(write(tmp_path, tensors={ROPE_FACTORS: data}))
