"""GGUF files of several families and layouts, made of Hugging Face's folders as llama.cpp's converter makes them: their
logits are Hugging Face's."""

import json
import shutil

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_families import save_model

from engine.config import EngineConfig
from engine.model.gguf.config import read_config
from engine.model.gguf.header import read_tensors
from engine.model.runner.identity import hash_model
from engine.model.spec.config import read_spec
from engine.model.weights.reader import open_weights
from engine.process.model_source import GGUF_NAME, ModelNotFound, find_local
from tests.model.test_decoder import Replay, assert_matches, random_tokens
from tests.model.test_gguf_weights import ggml_rows

ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
OPTIONS = {"gemma2": {"query_pre_attn_scalar": 16}, "gemma3": {"query_pre_attn_scalar": 16}}
STACKS = (("w1", "ffn_gate"), ("w2", "ffn_down"), ("w3", "ffn_up"))


def converted(model, tensors, arch, stacked):
    """Return the tensors of a checkpoint under llama.cpp's names, changed as its converter changes them."""
    names, config, found = gguf.get_tensor_name_map(arch, 2), model.config, {}
    for name, tensor in tensors.items():
        if "experts" not in name:
            data = tensor + 1 if arch is not gguf.MODEL_ARCH.LLAMA and name.endswith("norm.weight") else tensor
            is_turned = arch is gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name)
            data = ggml_rows(data, config.hidden_size // config.num_attention_heads) if is_turned else data
            found[names.get_name(name, (".weight",))] = data.numpy()
    for layer in range(2) if config.model_type == "mixtral" else ():
        for projection, stored in STACKS:
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            each = [tensors[f"{prefix}.{number}.{projection}.weight"].numpy() for number in range(3)]
            if stacked:
                found[f"blk.{layer}.{stored}_exps.weight"] = np.stack(each)
            else:
                found |= {f"blk.{layer}.{stored}.{number}.weight": data for number, data in enumerate(each)}
    return found


def write_values(writer, config):
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(2)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type == "mixtral":
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_file(path, arch, tensors, config=None, split=None):
    """Write a GGUF file, or one part of a model: `split` has its number, that of all parts, and that of all tensors."""
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    if config is not None:
        write_values(writer, config)
    if split is not None:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
        writer.add_int32("split.tensors.count", split[2])
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(folder, family, *, stacked=True, parts=1):
    """Save a tiny model as a GGUF file, or several. Return the model and the path of the first file."""
    model, arch = save_model(family, folder / "hub", **OPTIONS.get(family, {})), ARCHS[family]
    tensors = list(converted(model, load_file(folder / "hub/model.safetensors"), arch, stacked).items())
    shutil.rmtree(folder / "hub")
    if parts == 1:
        write_file(folder / "tiny.gguf", arch, dict(tensors), model.config)
        return model, folder / "tiny.gguf"
    for number in range(parts):
        split = (number, parts, len(tensors))
        path = folder / f"tiny-{number + 1:05}-of-{parts:05}.gguf"
        write_file(path, arch, dict(tensors[number::parts]), None if number else model.config, split)
    return model, folder / f"tiny-00001-of-{parts:05}.gguf"


def prepared(file, folder):
    """Make the folder that the engine reads, without a tokenizer, which this file has not."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(read_config(file)))
    (folder / GGUF_NAME).symlink_to(file)
    return folder


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gemma", {}),
        ("gemma2", {}),
        ("gemma3", {}),
        ("mixtral", {}),
        ("mixtral", {"stacked": False}),
        ("mixtral", {"parts": 3}),
    ],
)
def test_logits_are_those_of_the_folder_that_was_converted(tmp_path, family, layout):
    model, file = write_model(tmp_path, family, **layout)
    sequences = random_tokens(50, 7)
    assert_matches(Replay(prepared(file, tmp_path / "made")).run(sequences), [model] * 2, sequences)


def test_parts_are_one_model_whichever_is_named(tmp_path):
    _, first = write_model(tmp_path, "llama", parts=3)
    second, last = (tmp_path / f"tiny-0000{number}-of-00003.gguf" for number in (2, 3))
    assert {find_local(str(path)) for path in (tmp_path, first, second, last)} == {first}
    folder = prepared(first, tmp_path / "made")
    before = hash_model(EngineConfig(str(folder)))
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    assert hash_model(EngineConfig(str(folder))) != before
    last.unlink()
    with pytest.raises(ModelNotFound, match="tiny-00003-of-00003"):
        find_local(str(tmp_path))
    with pytest.raises(ValueError, match="tiny-00003-of-00003"):
        open_weights(folder, read_spec(folder))


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    _, first = write_model(tmp_path, "llama", parts=2)
    second = tmp_path / "tiny-00002-of-00002.gguf"
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="one of 2 parts"):
        read_tensors(alone)
    kept = second.read_bytes()
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="another part has"):
        read_tensors(first)
    second.write_bytes(kept)
    write_file(second, gguf.MODEL_ARCH.LLAMA, {"output.bias": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="fetch them again"):
        read_tensors(first)
