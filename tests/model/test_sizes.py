"""Sizes that an engine derives: on GPUs and models that are not here, and on this CPU."""

from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from tiny_families import save_model

from engine.config import EngineConfig
from engine.core.config import LaneGoals
from engine.model.decode.assembly import build_decoder
from engine.model.memory.allocation import count_pages
from engine.model.memory.arena import page_shape
from engine.model.ranks.shard import Shard
from engine.model.runner import sizes
from engine.model.runner.gpu_facts import count_gpus, describe, find_gpu
from engine.model.runner.sizes import count_weight_bytes, fill_sizes, find_kept_bits, multiplied_share
from engine.model.spec.config import parse_spec, read_spec
from engine.model.steps.graph_plan import row_bytes
from engine.model.steps.rungs import CHUNK_RUNG, chunk_ladder, ladder
from engine.model.weights.reader import open_weights, parameter_shapes
from engine.sizing import (
    GIB,
    LEAST_ADAPTER_BYTES,
    MOST_SEQS,
    MOST_TOKENS,
    SHORT_CONTEXT,
    TOKENS_STEP,
    Chosen,
    Gpu,
    Model,
    adapter_bytes,
    any_step_s,
    gpu_sizes,
    token_s,
    tokens_by_speed,
)
from lab.devices.device import find_device
from lora_kernels.cpu import numba_dense
from lora_kernels.linear import packed_bits

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
GPUS = {  # compute capability, multiprocessors, MHz, MHz of memory, bits, free GiB
    "Tesla T4": ((7, 5), 40, 1590, 5001, 256, 14.5),
    "NVIDIA GeForce RTX 4080": ((8, 9), 76, 2505, 11201, 256, 15.6),
    "NVIDIA A10G": ((8, 6), 80, 1710, 6251, 384, 21.9),
    "NVIDIA L4": ((8, 9), 58, 2040, 6251, 192, 21.9),
    "NVIDIA A100-SXM4-80GB": ((8, 0), 108, 1410, 1593, 5120, 78.8),
    "NVIDIA H100 80GB HBM3": ((9, 0), 132, 1980, 2619, 5120, 78.8),
    "NVIDIA H200": ((9, 0), 132, 1980, 3201, 6144, 139.3),
    "NVIDIA B200": ((10, 0), 148, 1965, 3996, 8192, 178.0),
}
SHAPES = {  # model type, vocabulary, hidden size, intermediate size, layers, heads, KV heads: Qwen2.5 and Llama 3
    "0.5B": ("qwen2", 151_936, 896, 4864, 24, 14, 2),
    "8B": ("llama", 128_256, 4096, 14_336, 32, 32, 8),
    "14B": ("qwen2", 152_064, 5120, 13_824, 48, 40, 8),
    "70B": ("llama", 128_256, 8192, 28_672, 80, 64, 8),
}
FIT = {
    "Tesla T4": ["0.5B"],
    "NVIDIA GeForce RTX 4080": ["0.5B"],
    "NVIDIA A10G": ["0.5B", "8B"],
    "NVIDIA L4": ["0.5B", "8B"],
    "NVIDIA A100-SXM4-80GB": ["0.5B", "8B", "14B"],
    "NVIDIA H100 80GB HBM3": ["0.5B", "8B", "14B"],
    "NVIDIA H200": ["0.5B", "8B", "14B", "70B"],
    "NVIDIA B200": ["0.5B", "8B", "14B", "70B"],
}
PAIRS = [(gpu, model, model in FIT[gpu]) for gpu in GPUS for model in SHAPES]


def spec_of(model):
    names = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    shape = dict(zip(names, SHAPES[model], strict=True))
    return parse_spec(shape | {"max_position_embeddings": 131_072, "tie_word_embeddings": model == "0.5B"}, {})


def properties(name, **changed):
    capability, count, clock, memory_clock, width, _ = GPUS[name]
    facts = {
        "name": name,
        "major": capability[0],
        "minor": capability[1],
        "multi_processor_count": count,
        "clock_rate": 1000 * clock,
        "memory_clock_rate": 1000 * memory_clock,
        "memory_bus_width": width,
        "shared_memory_per_multiprocessor": 228 << 10 if capability[0] >= 9 else 100 << 10,
    }
    return SimpleNamespace(**facts | changed)


@pytest.fixture
def on(monkeypatch):
    """Return a function that sizes an engine on a GPU that is not here, with 512 GiB of host memory."""

    def size(gpu, model, free_gib=None, spec=None, **config):
        free = int((free_gib or GPUS[gpu][-1]) * GIB)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties(gpu))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: GPUS[gpu][0])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, free))
        monkeypatch.setattr(sizes, "free_host_bytes", lambda: 512 * GIB)
        monkeypatch.setattr(sizes, "count_gpus", lambda: 1)
        return fill_sizes(EngineConfig(model, load_format="dummy", **config), spec or spec_of(model), CUDA, BF16)

    return size


def costs_of(model):
    spec = spec_of(model)
    token_bytes = page_shape(spec, 16).elements * 2 // 16
    return Model(count_weight_bytes(spec, lambda name: 16), 2, token_bytes, row_bytes(spec, BF16))


def qwen3_30b(layers=48):
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    sizes = {"hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4}
    ends = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "intermediate_size": 6144}
    return parse_spec({"model_type": "qwen3_moe", **experts, **sizes, **ends}, {})


def test_a_row_is_multiplied_by_its_experts_only():
    """Qwen3-30B-A3B, whose steps on an H100 may have as many tokens as any. With all weights, it would be 896."""
    spec = qwen3_30b()
    share = multiplied_share(spec)
    assert share == pytest.approx(3.35 / 30.53, rel=0.01) and multiplied_share(spec_of("8B")) == 1.0
    assert multiplied_share(spec, Shard(0, 2)) == pytest.approx(share, rel=0.01)
    gpu = Gpu("NVIDIA H100 80GB HBM3", 78 * GIB, 3.35e12, 989e12)
    costs = Model(count_weight_bytes(spec, lambda name: 16), 2, 98_304, row_bytes(spec, BF16), share)
    assert tokens_by_speed(gpu, costs, 0.1).value == MOST_TOKENS
    assert tokens_by_speed(gpu, replace(costs, multiplied=1.0), 0.1).value == 896


@pytest.mark.parametrize(("gpu", "model", "fits"), PAIRS)
def test_a_model_gets_sizes_that_fit_or_is_refused_with_advice(on, gpu, model, fits):
    if not fits:
        advice = rf"{gpu} has .* free, and the weights take .*: serve a smaller model, use a larger GPU, or end"
        with pytest.raises(ValueError, match=advice):
            on(gpu, model)
        return
    sized, costs = on(gpu, model), costs_of(model)
    config, found = sized.config, find_gpu(CUDA, BF16)
    print(f"{gpu}, {model}: {config.max_seqs} sequences, {config.token_budget} tokens\n  {sized.reasons}")
    assert config.max_seqs in ladder(MOST_SEQS) and 16 <= config.max_seqs == 1 << (config.max_seqs.bit_length() - 1)
    assert config.max_seqs <= config.token_budget <= MOST_TOKENS
    assert config.token_budget % CHUNK_RUNG == 0
    assert chunk_ladder(config.token_budget)[-1] in (config.token_budget, 1024)
    step_s = max(any_step_s(found, costs), config.token_budget * token_s(found, costs))
    assert step_s <= max(config.interactive.itl_s, any_step_s(found, costs))

    pool = count_pages(config, 16 * costs.token_bytes, CUDA, costs.weight_bytes + sized.reserved) * 16
    assert pool >= config.max_seqs * SHORT_CONTEXT, "the pool is at least as large as the rule assumed"
    taken = costs.weight_bytes + sized.reserved + pool * costs.token_bytes + config.token_budget * costs.row_bytes
    assert taken <= find_gpu(CUDA, BF16).free_bytes


def test_an_h100_gets_what_the_simulators_device_has_and_others_follow():
    device = find_device("h100-8b")
    cost, costs = device.cost, costs_of("8B")
    gpu = Gpu("H100", 79 * GIB, cost.memory_bytes_per_s, cost.flop_per_s)
    sized = gpu_sizes(gpu, costs, Chosen(), lambda seqs, tokens: GIB)
    assert sized.max_seqs.value == device.engine["max_seqs"]
    assert device.engine["token_budget"] <= sized.token_budget.value <= 2 * device.engine["token_budget"]
    assert "989 TFLOP/s, 3,350 GB/s" in sized.max_seqs.reason


@pytest.mark.parametrize(
    ("name", "changed", "itemsize", "tera", "bandwidth"),
    [  # data sheets
        ("Tesla T4", {}, 2, 65, 320e9),
        ("NVIDIA A10G", {}, 2, 70, 600e9),
        ("NVIDIA L4", {}, 2, 121, 300e9),
        ("NVIDIA A100-SXM4-80GB", {}, 2, 312, 2.039e12),
        ("NVIDIA A100-SXM4-80GB", {}, 4, 19.5, 2.039e12),
        ("NVIDIA H100 80GB HBM3", {"clock_rate": 1_830_000}, 2, 989, 3.35e12),
        ("NVIDIA H100 80GB HBM3", {}, 4, 67, 3.35e12),
        ("NVIDIA B200", {"clock_rate": 1_850_000}, 2, 2250, 8e12),
    ],
)
def test_peak_speeds_are_those_of_the_data_sheets(name, changed, itemsize, tera, bandwidth):
    gpu = describe(properties(name, **changed), 0, itemsize)
    assert gpu.flop_per_s == pytest.approx(tera * 1e12, rel=0.02)
    assert gpu.bytes_per_s == pytest.approx(bandwidth, rel=0.03)
    assert not gpu.assumed


def test_what_is_not_known_of_a_gpu_is_said(on, monkeypatch):
    unknown = properties("NVIDIA H100 80GB HBM3", major=9, minor=9, memory_clock_rate=0)
    gpu = describe(unknown, 70 * GIB, 2)
    assert gpu.assumed == (
        "compute capability 9.9 is assumed to be like 9.0; "
        "the driver reports no memory clock, so that the bandwidth is assumed"
    )
    assert gpu.flop_per_s / gpu.bytes_per_s == pytest.approx(300)
    sized = gpu_sizes(gpu, costs_of("8B"), Chosen(), lambda seqs, tokens: GIB)
    assert gpu.assumed in sized.max_seqs.reason


def test_more_memory_never_lowers_a_size(on):
    found = [on("NVIDIA L4", "8B", free).config for free in (17, 17.5, 18, 19, 20, 22, 30, 40, 80)]
    for name in ("max_seqs", "token_budget"):
        values = [getattr(config, name) for config in found]
        assert values == sorted(values)
    assert found[0].max_seqs < found[-1].max_seqs


def test_a_tighter_goal_makes_steps_shorter(on):
    budgets = [
        on("NVIDIA H100 80GB HBM3", "8B", interactive=LaneGoals(0.5, itl_s)).config.token_budget
        for itl_s in (0.001, 0.02, 0.05, 0.1, 1.0)
    ]
    assert budgets == sorted(budgets)
    assert budgets[0] >= 256, "as many tokens as are computed while the weights are read, and each sequence's"
    assert budgets[-2:] == [budgets[-1]] * 2


def test_what_the_operator_sets_is_kept(on):
    sized = on("NVIDIA H100 80GB HBM3", "8B", max_seqs=600, host_adapter_gb=1.5)
    assert (sized.config.max_seqs, sized.config.host_adapter_gb) == (600, 1.5)
    assert sized.config.token_budget >= 600
    assert sized.reasons["max_seqs"] == sized.reasons["host_adapter_gb"] == "set by the configuration"
    few = on("NVIDIA H100 80GB HBM3", "8B", token_budget=64)
    assert (few.config.max_seqs, few.config.token_budget) == (64, 64)
    assert few.reasons["max_seqs"] == "no more than engine.token_budget"
    many = on("NVIDIA A10G", "8B", max_seqs=400)
    assert (many.config.token_budget, many.reasons["token_budget"]) == (400, "no fewer than engine.max_seqs")


def test_a_pool_that_the_operator_sets_is_what_memory_allows(on):
    small = on("NVIDIA H100 80GB HBM3", "8B", memory_gb=2.0)
    assert small.config.max_seqs == 64 == 2 * GIB // costs_of("8B").token_bytes // SHORT_CONTEXT
    assert on("NVIDIA H100 80GB HBM3", "8B", num_pages=1024).config.max_seqs == 64
    with pytest.raises(ValueError, match=r"leaves no 70.0 GiB for pages: lower engine.memory_gb or num_pages"):
        on("NVIDIA H100 80GB HBM3", "8B", memory_gb=70)


def test_memory_for_steps_is_reserved_without_graphs_too(on):
    with_graphs, without = (on("NVIDIA L4", "8B", graphs=graphs) for graphs in (True, False))
    assert 0 < without.reserved < with_graphs.reserved


def test_no_graphs_are_reserved_where_quantised_experts_prevent_them(on):
    def reserved(**config):
        return on("NVIDIA H100 80GB HBM3", "A3B", spec=qwen3_30b(layers=2), **config).reserved

    assert reserved(weights="int4") == reserved(weights="int4", graphs=False)
    assert reserved() > reserved(graphs=False) + GIB // 4


@pytest.mark.parametrize(("stored", "bits"), [(torch.bfloat16, 16), (torch.float32, 32)])
@pytest.mark.parametrize("family", ["llama_tied", "mixtral"])
def test_weights_are_counted_as_linears_hold_them(family, stored, bits, tmp_path, monkeypatch):
    """Panels and embeddings of bf16 numbers have 16 bits in fp32, too, and tied embeddings have a head of their own."""
    monkeypatch.setattr(numba_dense, "computes_fp32", lambda: True)
    monkeypatch.setattr(sizes, "packed_bits", packed_bits.__wrapped__)
    save_model(family, tmp_path, vocab_size=96)
    file, cpu = tmp_path / "model.safetensors", torch.device("cpu")
    save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    spec = read_spec(tmp_path)
    counted = count_weight_bytes(spec, find_kept_bits(EngineConfig(str(tmp_path)), spec, cpu, torch.float32))
    decoder = build_decoder(spec, open_weights(tmp_path, spec), torch.float32, cpu)
    packed = [one for layer in decoder.layers for one in (layer.qkv, layer.o, *layer.feed_forward.linears)]
    held = sum(one.nbytes for one in [decoder.head.linear, *packed])
    router_pads = 2 * (16 - 3) * 64 * bits // 8 if family == "mixtral" else 0
    matrices = sum(prod(shape) for name, shape in parameter_shapes(spec).items() if len(shape) == 2)
    embedding, norms = 96 * 64, sum(shape[0] for shape in parameter_shapes(spec).values() if len(shape) == 1)
    assert counted == held - router_pads + bits // 8 * embedding + 4 * norms
    assert held - router_pads == bits // 8 * (matrices if spec.tied_embeddings else matrices - embedding)


def test_a_cpu_has_the_measured_sizes(monkeypatch):
    monkeypatch.setattr(sizes, "free_host_bytes", lambda: 16 * GIB)
    sized = fill_sizes(
        EngineConfig("m", load_format="dummy", num_pages=100), spec_of("0.5B"), torch.device("cpu"), torch.float32
    )
    config = sized.config
    assert (config.max_seqs, config.token_budget, config.host_adapter_gb, sized.reserved) == (32, 256, 2.0, 0)
    with capture_logs() as logged:
        sized.tell()
    settings = [(entry["setting"], entry["value"]) for entry in logged]
    assert settings == [("engine.max_seqs", 32), ("engine.token_budget", 256), ("engine.host_adapter_gb", 2.0)]
    assert all(entry["reason"] == sized.reasons[entry["setting"].removeprefix("engine.")] for entry in logged)


@pytest.mark.parametrize(("given", "expected"), [({"max_seqs": 512}, (512, 512)), ({"token_budget": 16}, (16, 16))])
def test_a_cpu_keeps_what_the_operator_sets(given, expected):
    config = EngineConfig("m", load_format="dummy", num_pages=100, **given)
    config = fill_sizes(config, spec_of("0.5B"), torch.device("cpu"), torch.float32).config
    assert (config.max_seqs, config.token_budget) == expected


def test_adapters_get_a_share_of_the_hosts_memory():
    assert adapter_bytes("cuda", 100 * GIB, 20 * GIB, engines=1).value == 20 * GIB
    shared = adapter_bytes("cuda", 100 * GIB, 20 * GIB, engines=8)
    assert shared.value == 2.5 * GIB and shared.reason.endswith("80.0 GiB that the host has left for each of 8 GPUs")
    assert adapter_bytes("cuda", 2000 * GIB, 0, engines=2).value == 64 * GIB
    assert adapter_bytes("cpu", 100 * GIB, 0, engines=1).value == 2 * GIB
    assert adapter_bytes("cpu", 6 * GIB, 0, engines=1, share=0.5).value == 0.75 * GIB
    assert adapter_bytes("cpu", GIB, 2 * GIB, engines=1).value == LEAST_ADAPTER_BYTES


def test_all_gpus_of_the_machine_are_counted(tmp_path, monkeypatch):
    for number in range(3):
        (tmp_path / str(number)).mkdir()
    assert count_gpus(tmp_path) == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert count_gpus(Path("/nowhere")) == 1


def test_steps_are_captured_in_the_multiples_that_budgets_have():
    assert TOKENS_STEP == CHUNK_RUNG


def test_without_sixteen_bits_fewer_rows_are_worth_waiting_for():
    costs, found = costs_of("0.5B"), properties("NVIDIA A100-SXM4-80GB")
    wide = replace(costs, weight_bytes=2 * costs.weight_bytes, itemsize=4)
    floats = gpu_sizes(describe(found, 70 * GIB, 4), wide, Chosen(), lambda *_: 0)
    halves = gpu_sizes(describe(found, 70 * GIB, 2), costs, Chosen(), lambda *_: 0)
    assert floats.max_seqs.value < halves.max_seqs.value


@pytest.mark.parametrize("setting", ["memory_gb", "num_pages"])
def test_a_pool_larger_than_the_machine_is_refused_with_what_to_set(setting):
    config = EngineConfig("x", **{setting: 10**9})
    with pytest.raises(ValueError, match=rf"engine\.{setting}: .* and this machine has .* GiB: lower it, or set 0"):
        count_pages(config, 2**20, torch.device("cpu"))
