"""The settings that `loralane plan` writes: the engine accepts each of them."""

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import yaml

from engine.core.config import LaneGoals
from engine.model.ranks.stages import find_shard
from engine.model.spec.config import read_spec
from engine.model.weights.quantize import open_source
from engine.serve.explain import explain
from gateway.config.whole import load_config
from lab.devices.accelerators import FORMS
from lab.devices.links import LINKS
from lab.devices.shapes import find_shape
from lab.plans.planning import Wish, candidates, with_engines
from lab.plans.settings import settings_of
from lab.plans.split import split_candidates
from lab.traffic.analysis import analyze
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import Sizes

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 96,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 32_768,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
MODELS = {
    "llama": LLAMA,
    "phi3": {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 64},
    "qwen3_moe": {**LLAMA, **EXPERTS, "model_type": "qwen3_moe", "intermediate_size": 13},
    "olmoe": {**LLAMA, **EXPERTS, "model_type": "olmoe"},
}
GIB = 1 << 30
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "clock_rate": 1_980_000,
    "memory_clock_rate": 2_619_000, "memory_bus_width": 5120, "shared_memory_per_multiprocessor": 228 << 10,
}  # fmt: skip
SCENARIO = Scenario(rate=10.0, prompt=Sizes(200, 9000), output=Sizes(5, 20), seconds=30.0)


@pytest.fixture
def h100(monkeypatch):
    """A GPU that is not here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H100["name"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**H100))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (78 * GIB, 80 * GIB))


def wish_for(model, folder):
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return Wish(find_shape(str(folder)), analyze(SCENARIO.workload().trace), 10.0, LaneGoals(5.0, 0.5))


def engine_of(candidate, wish, folder):
    """The engine's configuration, as a gateway reads it from the file of a plan."""
    file = folder / "engine.yaml"
    file.write_text(yaml.safe_dump(settings_of(candidate, wish, "auto")))
    return replace(load_config(file, {}).default_model.engine_config(folder), load_format="dummy")


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_starts_with_the_settings_of_each_candidate(model, tmp_path, h100):
    wish = wish_for(model, tmp_path)
    spec, found = read_spec(tmp_path), candidates(wish, ["h100"], list(FORMS), {})
    weights = {}
    for one in [*found, *split_candidates(found, wish, LINKS["nvlink"])]:
        config = engine_of(one, wish, tmp_path)
        assert (config.tensor_parallel, config.pipeline_parallel) == (one.ranks, one.stages)
        assert config.weights == (one.form if one.form != "bf16" else "auto")
        answer = explain(config)  # raises ValueError for what the engine refuses
        assert answer["page_bytes"] * one.ranks == one.device.page_bytes * (4 // one.stages) / 4
        assert answer["capacity"]["max_model_len"] >= wish.traffic.whole.most > 8192
        source = weights.setdefault(one.form, cache(open_source(config, spec, torch.device("cpu"))))
        for shard in find_shard(config, spec, lambda _: 16).everyone if one.stages == 1 else ():
            for name in shard.shapes(spec):
                shard.source(source, spec)(name)  # raises WeightsError for a group of weights that would be divided
    kinds = {(one.form, one.ranks, one.stages) for one in found}
    assert ("fp8", 2, 1) in kinds or model == "olmoe", "olmoe normalises all heads together"
    assert ("int4", 8, 1) not in kinds and {(form, 1, 2) for form in FORMS} <= kinds


def test_kv_is_in_fp8_where_the_engine_has_it(tmp_path):
    def kinds(model):
        wish = wish_for(model, tmp_path)
        found = candidates(wish, ["h100"], ["fp8"], {})
        return {(one.ranks, one.stages) for one in found if engine_of(one, wish, tmp_path).kv_dtype == "fp8"}

    assert kinds("llama") == {(1, 1)}
    assert kinds("phi3") == set(), "it rotates a part of each head"


def test_layers_with_windows_are_counted(tmp_path):
    assert wish_for("gemma2", tmp_path).shape.windowed_layers == 2
    assert wish_for("llama", tmp_path).shape.windowed_layers == 0


def test_requests_of_usual_length_need_no_setting(tmp_path):
    wish = wish_for("llama", tmp_path)
    short = replace(wish, traffic=analyze(replace(SCENARIO, prompt=Sizes(200, 300)).workload().trace))
    one = with_engines(candidates(short, ["h100"], ["bf16"], {})[0], short, 3)
    config = engine_of(one, short, tmp_path)
    assert (config.max_model_len, config.kv_dtype, config.weights) == (0, "auto", "auto")
