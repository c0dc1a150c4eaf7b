"""Every family with adapters, end to end: the engine's tokens against Hugging Face's and PEFT's own, in fp32.

All requests run in one mixed batch, in a pool of pages so small that sequences are preempted.
"""

import json
import random
from dataclasses import replace
from math import prod

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_decoder import Replay, one_thread, random_tokens  # noqa: F401
from tiny_engine import TinyEngine
from tiny_families import BASE, STACKED, VOCAB, save_model
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.config import EngineConfig
from engine.core.messages.requests import SamplingParams
from engine.model.adapters.peft.loader import load_peft
from engine.model.adapters.peft.settings import AdapterError
from engine.model.adapters.peft.targets import target_shapes
from engine.model.ranks.shard import Shard
from engine.model.runner.kernels import require_kv
from engine.model.spec.config import parse_spec, read_spec
from engine.model.spec.families import FAMILIES
from engine.model.weights.gguf import ARCHITECTURES, GgufFile
from engine.model.weights.reader import open_weights, parameter_shapes
from lab.devices.shapes import find_shape

NUM_TOKENS, NUM_PROMPTS, NUM_PAGES = 32, 8, 60
DENSE = ("qwen2_window", "qwen3", "smollm3", "granite", "olmo2", "phi3", "gemma2", "gemma3")
CASES = (*DENSE, "mixtral", "granitemoe", "gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe")
PROMPTS = [[random.Random(seed).randrange(VOCAB) for _ in range(5 + 2 * seed)] for seed in range(NUM_PROMPTS)]


def save_adapter(family, folder, kind=LoraConfig, **options):
    """Saves a random adapter of all linear layers, as PEFT does, and returns the model that has it."""
    torch.manual_seed(1)
    if family in STACKED:
        options["target_parameters"] = list(STACKED[family])
    plain = {"r": 4, "lora_alpha": 8, "init_lora_weights": False} if kind is LoraConfig else {}
    config = kind(target_modules="all-linear", **plain, **options)
    model = get_peft_model(save_model(family, folder / "model"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, mean=float(kind is IA3Config), std=0.15)
    model.save_pretrained(folder / "adapter")
    return model.eval()


@torch.inference_mode()
def continuation(model, prompt, tokens):
    """Returns the tokens that the model finds likeliest after the prompt and each part of `tokens`."""
    return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("family", CASES)
def test_tokens_equal_hugging_faces_and_pefts(family, tmp_path):
    peer = save_adapter(family, tmp_path)
    engine = TinyEngine(tmp_path / "model", tmp_path / "adapter", num_pages=NUM_PAGES)
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.ask(f"{index}", prompt, greedy, "adapter" if index % 2 else "base")
    engine.finish()
    assert engine.engine.state.counters.preemptions > 0
    for index, prompt in enumerate(PROMPTS):
        tokens = engine.texts[f"{index}"]
        assert len(tokens) == NUM_TOKENS
        if index % 2:
            assert tokens == continuation(peer, prompt, tokens)
        else:
            with peer.disable_adapter():
                assert tokens == continuation(peer, prompt, tokens)


@pytest.mark.parametrize("family", [*DENSE, "granitemoe", "gpt_oss"])
def test_bf16_is_as_near_as_hugging_faces_own(family, tmp_path):
    ours, its = bf16_errors(family, tmp_path)
    assert ours.mean() <= 1.1 * its.mean()


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_bf16_of_experts_is_as_near_as_hugging_faces_own(family, tmp_path):
    """In about one row of a hundred, rounding chooses another expert, in which of both implementations is chance: most
    rows are compared."""
    ours, its = bf16_errors(family, tmp_path)
    assert ours.mean(1).median() <= 1.1 * its.mean(1).median()


def bf16_errors(family, folder):
    """How far logits in bf16, [rows, vocab_size], are from those in fp32 over some 50 rows: ours and Hugging Face's."""
    exact, sequences = save_model(family, folder), random_tokens(60, 60, 50, 50, 40, 40, 30, 20)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.inference_mode():
        truth, theirs = ([model(torch.tensor([one])).logits[0].float() for one in sequences] for model in (exact, peer))
    found = Replay(folder, torch.bfloat16).run(sequences)
    ours = torch.stack([(row.float() - truth[index][position]).abs() for (index, position), row in found.items()])
    its = torch.stack([(theirs[index][position] - truth[index][position]).abs() for index, position in found])
    print(f"bf16 |delta logit| of {family}: ours mean {ours.mean():.4f} max {ours.max():.4f}; ", end="")
    print(f"Hugging Face mean {its.mean():.4f} max {its.max():.4f}, {len(found)} rows")
    return ours, its


@pytest.mark.parametrize("length", [128, 129])
def test_longrope_is_hugging_faces_for_the_longest_sequence(length, tmp_path):
    config = save_model("phi3_longrope", tmp_path).config
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    for rope in read_spec(tmp_path).served(length).ropes:
        assert rope.attention_factor == pytest.approx(factor)
        torch.testing.assert_close(torch.tensor(rope.inv_freq), expected)


def test_ranks_have_parts_of_fused_projections(tmp_path):
    model = save_model("phi3", tmp_path)
    spec = read_spec(tmp_path)
    sources = [Shard(rank, 2).source(open_weights(tmp_path, spec), spec) for rank in range(2)]
    stored = model.model.layers[1].self_attn.qkv_proj.weight
    for name, rows in (("q", stored[:64]), ("k", stored[64:96]), ("v", stored[96:])):
        parts = [source(f"model.layers.1.self_attn.{name}_proj.weight") for source in sources]
        assert torch.equal(torch.cat(parts), rows)


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"kind": LoHaConfig, "r": 2}, {"kind": IA3Config, "feedforward_modules": ["down_proj"]}],
    ids=str,
)
def test_adapters_of_fused_projections_equal_pefts(options, tmp_path):
    peer = save_adapter("phi3", tmp_path, **options)
    engine = TinyEngine(tmp_path / "model", tmp_path / "adapter")
    engine.chat("one", PROMPTS[3], "adapter")
    engine.finish()
    assert engine.texts["one"] == continuation(peer, PROMPTS[3], engine.texts["one"])


def test_an_adapter_of_other_fused_widths_is_refused(tmp_path):
    save_adapter("phi3", tmp_path)
    spec, file = read_spec(tmp_path / "model"), tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if "qkv_proj.lora_B" in key)
    save_file(tensors | {key: tensors[key][:-1].contiguous()}, file)
    shapes = target_shapes(spec, open_weights(tmp_path / "model", spec), "model")
    with pytest.raises(AdapterError, match=r"qkv_proj.lora_B.weight' is \[127, 4\], and the model needs 128 rows"):
        load_peft(tmp_path / "adapter", shapes)


def test_what_a_family_cannot_is_refused_by_name(tmp_path):
    save_model("olmo2", tmp_path / "olmo2")
    olmo2 = read_spec(tmp_path / "olmo2")
    with pytest.raises(ValueError, match="olmo2 normalises queries and keys of all heads together"):
        Shard(0, 2).spec(olmo2)
    for kind in FAMILIES.keys() - ARCHITECTURES.keys():
        with pytest.raises(ValueError, match=rf"model.gguf: {kind} models are not read from GGUF files"):
            GgufFile(tmp_path / "model.gguf", replace(olmo2, model_type=kind))
    gemma2 = {**BASE, "model_type": "gemma2", "head_dim": 16}
    assert (parse_spec(gemma2, {}).attention_cap, parse_spec(gemma2, {}).logits_cap) == (50.0, 30.0)
    with pytest.raises(ValueError, match="final_logit_softcapping must be positive or null, not 0"):
        parse_spec({**gemma2, "final_logit_softcapping": 0}, {})
    save_model("phi3", tmp_path / "phi3")
    with pytest.raises(ValueError, match="kv_dtype fp8 does not work with phi3, which rotates a part of each head"):
        require_kv(EngineConfig(str(tmp_path), kv_dtype="fp8"), read_spec(tmp_path / "phi3"))


@pytest.mark.parametrize("family", CASES)
def test_plans_count_what_the_engine_has(family, tmp_path):
    model = save_model(family, tmp_path)
    spec, shape = read_spec(tmp_path), find_shape(str(tmp_path))
    matrices = [prod(size) for size in parameter_shapes(spec).values() if len(size) == 2]
    theirs = (p.numel() for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith("_bias"))
    assert shape.weights == sum(matrices) == sum(theirs)
    assert shape.kv_bytes(2) == 4 * spec.layers * spec.kv_width


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "smollm3"])
def test_embeddings_are_tied_unless_config_json_says_otherwise(kind, tmp_path):
    config = {**BASE, "model_type": kind, "head_dim": 16}
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_spec(tmp_path).tied_embeddings
    assert find_shape(str(tmp_path)).is_tied
