"""Capacity of a configuration, and the warnings about dangerous ones."""

import json
from dataclasses import replace
from random import Random

import pytest

from engine.core.config import CoreConfig
from engine.core.messages.features import StepFeatures
from engine.core.predict.capacity import Capacity, decode_seconds, prompt_within
from engine.core.predict.step_time import StepTimeModel
from engine.pb import engine_pb2 as pb
from gateway.config.capacity import capacity_of_info, capacity_rows, preloaded_ranks
from gateway.config.whole import demo_config

[SETTINGS] = demo_config().served.values()
GIB = 2**30
SOUND = Capacity(
    num_pages=4096,
    block_size=16,
    page_bytes=2**19,
    max_model_len=8192,
    max_seqs=32,
    host_pages=2048,
    adapter_pages=4096,
    adapter_bytes_per_rank=2**18,
    host_adapter_bytes=GIB,
    free_bytes=8 * GIB,
    decode_s=0.05,
    prompt_tokens=500,
)


def warnings(found=SOUND, ranks=(), **engine):
    settings = replace(SETTINGS, engine=replace(SETTINGS.engine, **engine))
    return [text for topic, text in capacity_rows(settings, found, ranks) if topic == "note"]


def test_a_sound_configuration_has_no_warnings():
    assert warnings(ranks=(8, 16)) == []
    facts = dict(capacity_rows(SETTINGS, SOUND, (8, 16)))
    assert facts["sequences"] == "6 of 8,192 tokens fit with 15% spare; up to 32 at once, of 1,740 tokens each"
    assert facts["adapter memory"] == (
        "2 at the start take 0.3% of the page pool; of rank 16, 512 fill the pool, and 256 fit into host memory"
    )
    assert facts["predicted"] == (
        "a full step of decodes takes 50 ms (ITL goal: 100 ms); prompts of up to 500 tokens meet the TTFT goal alone"
    )


@pytest.mark.parametrize(
    ("change", "engine", "ranks", "words"),
    [
        ({"num_pages": 1536}, {}, (), "holds 2 sequences of engine.max_model_len (8,192) tokens: raise"),
        ({"num_pages": 1536}, {}, (), "to 1.2, or lower max_model_len to 5,216"),
        ({}, {"max_model_len": 100_000}, (), "engine.max_model_len is 100,000, but the pages hold 8,192 tokens"),
        ({}, {}, (64,) * 40, "take 31% of the page pool, if all are in use: raise engine.memory_gb"),
        ({}, {}, (64,) * 70, "take 1.1 GiB, more than engine.host_adapter_gb (1.0)"),
        ({"max_seqs": 256}, {}, (), "engine.prefix_caching has no room: 256 sequences of 256 tokens"),
        ({"host_pages": 512}, {"swap_gb": 64.0}, (), "engine.swap_gb is 64, but only 0.25 GiB are taken"),
        ({"free_bytes": GIB}, {}, (), "may take 4.0 GiB of 1.0 GiB that are free: lower engine.memory_gb"),
        ({"decode_s": 0.2}, {}, (), "take 200 ms, more than lanes.interactive.itl_s (100 ms): lower engine.max_seqs"),
        ({"prompt_tokens": 10}, {}, (), "of more than 10 tokens are predicted to miss lanes.interactive.ttft_s"),
    ],
)  # fmt: skip
def test_each_danger_names_the_setting_and_what_to_do(change, engine, ranks, words):
    assert any(words in text for text in warnings(replace(SOUND, **change), ranks, **engine))


def test_without_prefix_cache_or_predictions_nothing_is_said_of_them():
    assert warnings(replace(SOUND, max_seqs=256), prefix_caching=False) == []
    unknown = replace(SOUND, decode_s=0.0, prompt_tokens=0, free_bytes=0)
    assert warnings(unknown) == []
    assert "predicted" not in dict(capacity_rows(SETTINGS, unknown, ()))


def test_a_running_engine_describes_itself():
    outlook = pb.Outlook(
        host_pages=2048,
        adapter_pages=4096,
        adapter_bytes_per_rank=2**18,
        host_adapter_bytes=GIB,
        free_bytes=8 * GIB,
        decode_seconds=0.05,
        prompt_tokens=500,
    )
    sizes = {"num_pages": 4096, "block_size": 16, "page_bytes": 2**19, "max_model_len": 8192, "max_seqs": 32}
    assert capacity_of_info(pb.EngineInfo(outlook=outlook, **sizes)) == SOUND
    assert capacity_of_info(pb.EngineInfo(**sizes)) is None
    assert capacity_of_info(pb.EngineInfo(outlook=outlook, **{**sizes, "page_bytes": 0})) is None  # a fake engine


def test_ranks_are_read_where_they_can_be(tmp_path):
    configs = {"a": {"r": 8}, "b": {"r": 8, "rank_pattern": {"q_proj": 32}}, "c": {"r": "x"}, "d": []}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
    preload = {name: tmp_path / name for name in (*configs, "missing")}
    assert preloaded_ranks(replace(SETTINGS, preload=preload)) == [8, 32]


def test_predictions_are_those_of_the_learned_steps():
    """Steps take 10 ms, and 1 ms for each token: 32 decodes 42 ms; in 500 ms, a chunk of 256 and one of 214 tokens."""
    core = CoreConfig(num_pages=4097, max_seqs=32, max_model_len=8192, token_budget=256)
    model, rng = StepTimeModel(1.0, (), 1.0, 2.0), Random(0)
    assert (decode_seconds(model, core), prompt_within(model, core, 0.5)) == (0.0, 0)
    for _ in range(200):
        prompt, decodes = rng.randrange(256), rng.randrange(1, 33)
        features = StepFeatures(prefill_tokens=prompt, decode_tokens=decodes, decode_context=rng.randrange(40_000))
        model.observe(features._replace(prefill_attention=prompt**2 / 2), 0.01 + 0.001 * (prompt + decodes))
    assert decode_seconds(model, core) == pytest.approx(0.042, rel=0.02)
    assert prompt_within(model, core, 0.5) == pytest.approx(480, abs=8)
    assert prompt_within(model, core, 1e9) == 8192


def test_ranks_are_told_before_their_sizes():
    engine = replace(SETTINGS.engine, tensor_parallel=2, pipeline_parallel=4)
    rows = list(capacity_rows(replace(SETTINGS, engine=engine), SOUND, ()))
    assert rows[0] == ("ranks", "4 stages of 2: the sizes below are those of each, of the largest stage")


def test_the_pages_of_all_ranks_are_what_swap_gb_asks_for():
    """Each of four ranks has a quarter of the host tier."""
    assert not warnings(replace(SOUND, host_pages=512), swap_gb=1.0, tensor_parallel=4)
    assert warnings(replace(SOUND, host_pages=256), swap_gb=1.0, tensor_parallel=4)
