"""Adapters of experts in every form in which PEFT has written them, and those that are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from test_families import PROMPTS, continuation, save_adapter
from test_parallel import Engines
from tiny_engine import TinyEngine
from tiny_families import STACKED, save_model

from engine.config import EngineConfig, Speculation
from engine.model.adapters.peft.loader import load_peft
from engine.model.adapters.peft.settings import AdapterError
from engine.model.adapters.peft.targets import target_shapes
from engine.model.decode.assembly import build_decoder
from engine.model.layers.lora import LoraStep, prepare_lora, target_names, target_widths
from engine.model.ranks.shard import Shard
from engine.model.runner.sizes import TABLE_BYTES, fill_sizes, fit_table
from engine.model.spec.config import parse_spec, read_spec
from engine.model.weights.quantize import quantized_source
from engine.model.weights.reader import CPU, open_weights
from lora_kernels.cpu.numba_grouped import PackedExperts
from lora_kernels.grouped import ExpertByExpert
from lora_kernels.layout import TARGET_BYTES, LoraTable, plan_layout
from lora_kernels.quantized import dense
from lora_kernels.reference import ReferenceBackend
from lora_kernels.segments import plan_segments

RANK, HIDDEN = 3, 64
FORMS = {
    "mixtral": ((0, 1), "block_sparse_moe", ("w1", "w3", "w2"), 3, 32),
    "qwen3_moe": ((1,), "mlp", ("gate_proj", "up_proj", "down_proj"), 6, 40),
    "qwen2_moe": ((0, 1), "mlp", ("gate_proj", "up_proj", "down_proj"), 6, 40),
}
"""Layers with experts, how their modules are named, the number of experts and their width."""


def save_old_adapter(family, folder, seed=5, **settings):
    """Saves a random adapter of experts, routers and q_proj, as PEFT writes it with transformers 4."""
    layers, block, (gate, up, down), count, inner = FORMS[family]
    generator, tensors = torch.Generator().manual_seed(seed), {}

    def add(module, inputs, outputs):
        key = f"base_model.model.model.layers.{module}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * 0.2
        tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.2

    for layer in layers:
        add(f"{layer}.{block}.gate", HIDDEN, count)
        for number in range(count):
            for name, inputs, outputs in ((gate, HIDDEN, inner), (up, HIDDEN, inner), (down, inner, HIDDEN)):
                add(f"{layer}.{block}.experts.{number}.{name}", inputs, outputs)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["gate", gate, up, down]}
    if family != "mixtral":  # other MLPs have projections of the same names
        numbers, names = range(count), config["target_modules"][1:]
        config["target_modules"] = ["gate", *(f"experts.{number}.{name}" for number in numbers for name in names)]
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return tensors


def shapes_of(folder):
    spec = read_spec(folder)
    return target_shapes(spec, open_weights(folder, spec), "model")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_adapters_of_transformers_4_equal_pefts(family, tmp_path):
    model = save_model(family, tmp_path / "model")
    save_old_adapter(family, tmp_path / "adapter")
    engine = TinyEngine(tmp_path / "model", tmp_path / "adapter")
    for index, prompt in enumerate(PROMPTS):
        engine.chat(f"{index}", prompt, "adapter" if index % 2 else "base")
    engine.finish()
    for index in (0, 2):
        assert engine.texts[f"{index}"] == continuation(model, PROMPTS[index], engine.texts[f"{index}"])
    peer = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    for index in (1, 3):
        assert engine.texts[f"{index}"] == continuation(peer, PROMPTS[index], engine.texts[f"{index}"])


@pytest.mark.parametrize("parameter", ["mlp.experts.down_proj", "experts.gate_up_proj", "mlp.gate.weight"])
def test_an_adapter_of_one_parameter_equals_pefts(parameter, tmp_path):
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=[], target_parameters=[parameter], init_lora_weights=False)
    peer = get_peft_model(save_model("qwen3_moe", tmp_path / "model"), config).eval()
    for name, weight in peer.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    peer.save_pretrained(tmp_path / "adapter")
    engine = TinyEngine(tmp_path / "model", tmp_path / "adapter")
    engine.chat("base", PROMPTS[3])
    engine.chat("one", PROMPTS[3], "adapter")
    engine.finish()
    assert engine.texts["one"] == continuation(peer, PROMPTS[3], engine.texts["one"])
    assert engine.texts["one"] != engine.texts["base"]


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_ranks_and_stages_divide_experts(family, tmp_path):
    if family in STACKED:
        save_adapter(family, tmp_path)
    else:
        save_model(family, tmp_path / "model")
        save_old_adapter(family, tmp_path / "adapter")
    answers = []
    for size, stages in ((1, 1), (2, 2)):
        engines = Engines(tmp_path / "model", [tmp_path / "adapter"], size, stages)
        for index, prompt in enumerate(PROMPTS[:4]):
            engines.ask(f"{index}", prompt, 0 if index % 2 else None)
        engines.finish()
        engines.close()
        answers.append(engines)
    assert answers[0].tokens == answers[1].tokens
    for name, logprobs in answers[0].logprobs.items():
        assert answers[1].logprobs[name] == pytest.approx(logprobs, abs=2e-5)


def test_quantised_experts_are_computed_as_they_are(tmp_path):
    save_model("qwen2_moe", tmp_path, moe_intermediate_size=64)
    spec, backend = read_spec(tmp_path), ReferenceBackend()
    source = quantized_source(open_weights(tmp_path, spec), "int4", None)
    kept, plain = (
        build_decoder(spec, weights, torch.float32, CPU).layers[1].feed_forward
        for weights in (source, lambda name: dense(source(name)))
    )
    assert isinstance(kept.gate_up, ExpertByExpert) and isinstance(plain.gate_up, PackedExperts)
    x, lora = torch.randn(9, HIDDEN), LoraStep(backend, None)
    expected = plain.compute(x, 1, backend, lora)
    torch.testing.assert_close(kept.compute(x, 1, backend, lora), expected, rtol=1e-4, atol=1e-3)


def test_what_is_no_adapter_of_the_models_experts_is_refused(tmp_path):
    save_model("qwen3_moe", tmp_path / "model")
    shapes, adapter = shapes_of(tmp_path / "model"), tmp_path / "adapter"
    old = save_old_adapter("qwen3_moe", adapter)
    assert load_peft(adapter, shapes).target_modules == ("gate", *(f"experts.{name}" for name in FORMS["qwen3_moe"][2]))
    key = "base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_A.weight"
    save_file({name: tensor for name, tensor in old.items() if name != key}, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"model.layers.1.mlp.experts.2.up_proj has no lora_A"):
        load_peft(adapter, shapes)
    config = json.loads((adapter / "adapter_config.json").read_text())
    magnitudes = {
        f"{name[:-14]}.lora_magnitude_vector.weight": b[:, 0].clone() for name, b in old.items() if "lora_B" in name
    }
    save_file(old | magnitudes, adapter / "adapter_model.safetensors")
    for wrong, match in (
        ({"target_parameters": ["mlp.experts.bias"]}, "names 'mlp.experts.bias', which is no parameter"),
        ({"use_dora": True}, "DoRA and .* on experts"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(config | wrong))
        with pytest.raises(AdapterError, match=match):
            load_peft(adapter, shapes)


@pytest.mark.parametrize(
    ("family", "targets", "settings", "match"),
    [
        ("mixtral", ["q_proj", "w1"], {}, "targets .*experts.0.w1, but there are no weights for it"),
        ("mixtral", ["q_proj", "w1"], {"peft_version": "0.18.1"}, "'w1' did not count when the adapter was trained"),
        (
            "mixtral",
            "model.*(q_proj|w2)",
            {"peft_version": "0.21.0"},
            "w2, .* no weights of experts",
        ),
        ("mixtral", ["q_proj"], {"target_parameters": ["mlp.experts.down_proj"]}, "targets .*experts.0.w2"),
        ("qwen2_moe", ["q_proj", "gate"], {"peft_version": "0.18.0"}, "targets model.layers.0.mlp.gate"),
        ("qwen3_moe", ["q_proj", "gate_proj"], {}, "targets model.layers.1.mlp.experts.0.gate_proj"),
        ("mixtral", ["q_proj"], {}, None),
        ("qwen3_moe", ["q_proj", "gate_proj"], {"peft_version": "0.21.0"}, None),
    ],
    ids=str,
)
def test_an_adapter_without_any_weights_of_the_experts_it_targets(family, targets, settings, match, tmp_path):
    """It has q_proj of both layers and, of Qwen 3's layer without experts, gate_proj."""
    save_model(family, tmp_path / "model")
    modules = {f"{layer}.self_attn.q_proj": HIDDEN for layer in range(2)}
    modules |= {"0.mlp.gate_proj": 96} if family == "qwen3_moe" else {}
    (tmp_path / "adapter").mkdir()
    tensors = {}
    for module, outputs in modules.items():
        outputs = read_spec(tmp_path / "model").query_width if "q_proj" in module else outputs
        key = f"base_model.model.model.layers.{module}"
        tensors |= {f"{key}.lora_A.weight": torch.ones(RANK, HIDDEN), f"{key}.lora_B.weight": torch.ones(outputs, RANK)}
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, **settings}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    if match is None:
        assert len(load_peft(tmp_path / "adapter", shapes_of(tmp_path / "model")).blocks) == len(modules)
        return
    with pytest.raises(AdapterError, match=match):
        load_peft(tmp_path / "adapter", shapes_of(tmp_path / "model"))


def test_a_step_knows_its_largest_rank_on_experts(tmp_path):
    save_model("qwen3_moe", tmp_path)
    spec = read_spec(tmp_path)
    names, page, arena = target_names(spec), 2048, torch.zeros(8 * 2048)
    table, rows = LoraTable(2, spec.layers, len(names), page, CPU), plan_segments(np.array([-1, 1, 1], np.int32))
    for ranks, expected in (
        ({"q_proj": 5, "gate": 7}, None),
        ({"q_proj": 5, "experts.4.up_proj": 3, "experts.0.down_proj": 2}, 3),
        ({"experts.0.gate_proj": 1}, 1),
        ({}, None),
    ):
        of_targets = np.zeros((spec.layers, len(names)), np.int32)
        for name, rank in ranks.items():
            of_targets[1, names.index(name)] = rank
        layout = plan_layout(of_targets, target_widths(spec), page)
        table.set(1, layout, tuple(range(layout.num_pages)))
        work = prepare_lora(ReferenceBackend(), arena, table, rows, 3).of_experts
        assert (work and work.adapters.max_rank) == expected


def test_the_table_of_adapters_stays_small(tmp_path):
    save_model("qwen3_moe", tmp_path)
    config, small = EngineConfig(str(tmp_path)), read_spec(tmp_path)
    assert fit_table(config, small) == config
    experts = replace(small.experts, count=128, layers=(True,) * 48)
    large = replace(small, layers=48, windows=(None,) * 48, ropes=small.ropes[:1] * 48, experts=experts)
    fitting = fit_table(config, large).max_resident_adapters
    assert 100 <= fitting < config.max_resident_adapters
    assert fitting * 48 * len(target_names(large)) * TARGET_BYTES <= TABLE_BYTES
    config = replace(config, load_format="dummy", num_pages=8, max_seqs=2, token_budget=32, host_adapter_gb=0.1)
    sized = fill_sizes(config, large, CPU, torch.float32)
    assert sized.config.max_resident_adapters == fitting
    assert "in place of 1024" in sized.reasons["max_resident_adapters"]
    assert "max_resident_adapters" not in fill_sizes(config, small, CPU, torch.float32).reasons


def test_the_draft_models_table_of_adapters_stays_small_too(tmp_path, monkeypatch):
    save_model("qwen3_moe", tmp_path)
    spec = read_spec(tmp_path)
    config = EngineConfig(str(tmp_path), load_format="dummy", num_pages=8, max_seqs=2, token_budget=32)
    config = replace(config, host_adapter_gb=0.1, speculation=Speculation(tmp_path))
    of_adapter = 2 * spec.layers * len(target_names(spec)) * TARGET_BYTES
    monkeypatch.setattr("engine.model.runner.sizes.TABLE_BYTES", 10 * of_adapter)
    assert fill_sizes(config, spec, CPU, torch.float32).config.max_resident_adapters == 10


def test_only_a_dense_mlp_must_be_divided_between_ranks(tmp_path):
    save_model("qwen3_moe", tmp_path)
    spec = replace(read_spec(tmp_path), intermediate_size=97)
    with pytest.raises(ValueError, match="2 does not divide the model's intermediate_size, 97"):
        Shard(0, 2).spec(spec)
    experts = replace(spec.experts, layers=(True,) * spec.layers)
    part = Shard(0, 2).spec(replace(spec, experts=experts))
    assert part.experts.width == spec.experts.width // 2
    with pytest.raises(ValueError, match="intermediate_size, 97"):
        Shard(0, 2).spec(replace(spec, experts=replace(experts, shared=True)))


def test_what_no_router_can_choose_is_refused(tmp_path):
    save_model("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong, match in (
        ({"num_experts_per_tok": 0}, "must be 1 to the number of experts, 6, not 0"),
        ({"num_experts_per_tok": 7}, "must be 1 to the number of experts, 6, not 7"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be positive, not 0"),
    ):
        with pytest.raises(ValueError, match=match):
            parse_spec(config | wrong, {})


def test_matrices_of_another_number_of_experts_are_refused(tmp_path):
    save_model("qwen3_moe", tmp_path / "model")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_parameters": ["mlp.experts.down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    prefix = "base_model.model.model.layers.1.mlp.experts"
    tensors = {f"{prefix}.lora_A.weight": torch.ones(20, 40), f"{prefix}.lora_B.weight": torch.ones(64, 20)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    shapes = shapes_of(tmp_path / "model")
    with pytest.raises(AdapterError, match=r"is \[.*\], and 6 experts of rank 4 need 24 (rows|columns)"):
        load_peft(adapter, shapes)
    tensors = {f"{prefix}.lora_A.weight": torch.ones(24, 40), f"{prefix}.lora_B.weight": torch.ones(64, 24)}
    one = {f"{prefix}.3.down_proj.lora_A.weight": torch.ones(4, 40)}  # which is in the first matrix, too
    save_file(tensors | one, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"has '.*experts.3.down_proj.lora_A.weight' twice, whole and in parts"):
        load_peft(adapter, shapes)
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": 0}))
    save_file({name: matrix[:0] for name, matrix in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"rank 0 on .*mlp.experts.down_proj: ranks of 1 to 256"):
        load_peft(adapter, shapes)
    save_model("llama", tmp_path / "llama")
    with pytest.raises(AdapterError, match=r"names 'mlp.experts.down_proj', and this model has no experts"):
        load_peft(adapter, shapes_of(tmp_path / "llama"))
