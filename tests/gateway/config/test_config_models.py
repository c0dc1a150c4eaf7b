"""The section `models`: several base models, each with its engines, lanes and adapters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.cli.serve import _with_adapters, _with_engine, _with_model
from gateway.config.changes import changes, leftovers, merge_live_sections, need_restart
from gateway.config.explain import explain
from gateway.config.file import ConfigError
from gateway.config.lanes import LanesConfig
from gateway.config.models import EMBEDDED_NAME, ModelConfig
from gateway.config.whole import Config, load_config
from gateway.serve.launch import Launch, share_of

TWO = """
models:
  large:
    source: /models/large
    chat_template: large.jinja
    tool_parser: llama3
    engine: {memory_gb: 48, replicas: 2, scheduling: {batch_floor: 0.2, advanced: {min_chunk: 8}}}
    lanes: {interactive: {ttft_s: 0.5}}
    adapters: {preload: {support: loras/support}}
  org/small:
    source: acme/small
    engine: {device: cpu, addresses: ["127.0.0.1:7001"]}
lanes: {interactive: {ttft_s: 3, itl_s: 0.2}, batch: {max_requests: 50}}
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text: str) -> Config:
        (tmp_path / "loralane.yaml").write_text(text)
        return load_config(tmp_path / "loralane.yaml", {})

    return load_text


def test_each_model_has_its_own_settings_and_the_common_lanes_where_it_sets_none(load, tmp_path):
    config = load(TWO)
    large, small = config.served.values()
    assert list(config.served) == ["large", "org/small"] and config.default_model is large
    assert (large.model.name, large.model.source, large.model.tool_parser) == ("large", "/models/large", "llama3")
    assert large.model.chat_template == tmp_path / "large.jinja"
    assert (large.engine.memory_gb, large.engines.replicas, small.engines.addresses) == (48, 2, ("127.0.0.1:7001",))
    assert (large.engine.scheduling.batch_floor, large.engine.scheduling.min_chunk) == (0.2, 8)
    assert (large.lanes.interactive.ttft_s, large.lanes.interactive.itl_s) == (0.5, 0.2)
    assert (small.lanes.interactive.ttft_s, small.lanes.batch.max_requests) == (3, 50)
    assert (large.preload, small.preload) == ({"support": tmp_path / "loras/support"}, {})
    assert small.engine_config(Path("/prepared")).interactive.ttft_s == 3


def test_a_model_may_take_settings_of_another_by_an_anchor(load):
    large, small = "large: &settings {source: x, tool_parser: none}", "small: {<<: *settings, source: y}"
    config = load(f"models:\n  {large}\n  {small}\n")
    assert [one.model.tool_parser for one in config.served.values()] == ["none", "none"]
    assert config.served["small"].model.source == "y"


def test_one_model_has_the_short_form():
    config = Config()
    assert list(config.served) == [EMBEDDED_NAME]
    assert config.default_model.lanes == config.lanes == LanesConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO + "model: {source: x}\n", "model: a file has either model or models"),
        (TWO + "engine: {threads: 2}\n", "engine: a file has either engine or models"),
        (TWO + "adapters: {preload: {a: /a}}\n", "adapters.preload: with models, it belongs into models.NAME"),
        ("models: {}\n", "models: names no model"),
        ("models: {a: {engine: {threads: 2}}}\n", "models.a.source: is required"),
        ("models: {a: {source: x, sauce: y}}\n", "models.a.sauce: unknown key; did you mean source"),
        ("models: {a: {source: x, name: y}}\n", "models.a.name: unknown key"),
        ("models: {a: {source: x, engine: {threads: much}}}\n", "models.a.engine.threads: "),
        ("models: {a: {source: x, engine: {scheduling: {min_chunk: 1}}}}\n", "min_chunk: belongs into models.a.engine"),
        ("models: {a: {source: x, engine: {replicas: 0}}}\n", "models.a.engine: replicas must be from 1"),
        ("models: {a: {source: x, lanes: {batch: {ttft: 1}}}}\n", "models.a.lanes.batch.ttft: unknown key"),
        ("models: {a: {source: x, adapters: {roots: [/a]}}}\n", "models.a.adapters.roots: unknown key"),
        ("models: {a: {source: x, engine: {memory_gb: -1}}}\n", "models.a.engine.memory_gb must be finite"),
        (
            "models: {a: {source: x, adapters: {preload: {t: /t}}}, b: {source: y, adapters: {preload: {t: /u}}}}\n",
            "models.b.adapters.preload.t: is also an adapter of a",
        ),
        (
            "models: {a: {source: x, adapters: {preload: {b: /b}}}, b: {source: y}}\n",
            "models.a.adapters.preload.b: is the name of a base model",
        ),
    ],
)
def test_contradictions_are_refused_by_name(load, text, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load(text)


@pytest.mark.parametrize("lanes", ["{interactive: {ttft: 1}}", "{fast: {}}", "{batch: {itl_s: -1}}", "{batch: 3}"])
def test_a_problem_of_the_common_lanes_is_reported_once_at_its_own_place(load, lanes):
    with pytest.raises(ConfigError) as caught:
        load(f"models: {{a: {{source: x}}, b: {{source: y}}}}\nlanes: {lanes}\n")
    [problem] = str(caught.value).splitlines()
    assert problem.startswith("lanes")


@pytest.mark.parametrize(
    "name", ["", " ", "my model", "../up", "a/../b", "org//name", "/a", "a/", ".hidden", "a" * 129]
)
def test_a_name_that_no_model_can_have_is_refused_with_the_rule(load, name):
    for text in (f'models: {{"{name}": {{source: x}}}}\n', f'model: {{source: x, name: "{name}"}}\n'):
        if name or "models" in text:
            with pytest.raises(ConfigError, match=f"^model.*{re.escape(repr(name))}.*letters, digits") as caught:
                load(text)
            assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["large", "org/name", "Org/Name-1.5_b", "llama3:8b", "0"])
def test_usual_names_of_models_are_taken(load, name):
    assert list(load(f'models: {{"{name}": {{source: x}}}}\n').served) == [name]
    assert list(load(f'model: {{source: x, name: "{name}"}}\n').served) == [name]


@pytest.mark.parametrize(
    ("source", "name"),
    [("/models/My Model (v2)", "my-model-v2"), ("acme/Small", "small"), ("/", "model"), ("a/..", "model")],
)
def test_a_source_gives_a_name_that_a_model_may_have(source, name):
    assert list(Config(model=ModelConfig(source=source)).served) == [name]


def test_options_that_are_about_the_only_model_are_refused(load):
    config = load(TWO)
    for change in (
        lambda: _with_model(config, "./other", demo=False),
        lambda: _with_adapters(config, ["a=/a"], []),
        lambda: _with_engine(config, "float32", None),
    ):
        with pytest.raises(ConfigError, match="the file names its base models in models"):
            change()
    assert _with_engine(_with_adapters(_with_model(config, None, demo=False), [], []), None, None) == config


def test_a_reload_applies_lanes_and_adapters_of_each_model_and_names_the_rest(load):
    before, after = load(TWO), load(TWO.replace("ttft_s: 0.5", "ttft_s: 0.25").replace("support: ", "other: "))
    assert need_restart(before, after) == []
    assert changes(before, after) == [
        f"+ models.large.adapters.preload.other: {after.preloaded()['other']}",
        f"- models.large.adapters.preload.support: {before.preloaded()['support']}",
        "  models.large.lanes.interactive.ttft_s: 0.5 -> 0.25",
    ]
    assert leftovers(before, after) == ["! models.large.adapters.preload.support: is served until it is unloaded"]
    assert merge_live_sections(before, after) == after
    other = load(TWO.replace("memory_gb: 48", "memory_gb: 40"))
    assert need_restart(before, other) == ["models.large"]
    assert merge_live_sections(before, other) == before


def test_a_reload_tells_that_models_in_another_order_or_with_other_names_need_a_restart(load):
    config = load(TWO)
    large, small = config.models.items()
    swapped = replace(config, models=dict([small, large]))
    assert need_restart(config, swapped) == ["the order of models"]
    assert list(merge_live_sections(config, swapped).models) == list(config.models)
    renamed = replace(config, models={"large": large[1], "tiny": small[1]})
    assert need_restart(config, renamed) == ["models.org/small", "models.tiny"]
    assert need_restart(config, replace(config, models=dict([large]))) == ["models.org/small"]


def test_an_adapter_that_is_named_for_another_model_is_no_leftover(load):
    moved = load(
        TWO.replace("adapters: {preload: {support: loras/support}}", "").replace(
            "    source: acme/small\n", "    source: acme/small\n    adapters: {preload: {support: loras/support}}\n"
        )
    )
    assert leftovers(load(TWO), moved) == []


def test_gateway_processes_share_the_lanes_of_each_model(load):
    shared = share_of(load(TWO), 4)
    assert [settings.lanes.batch.max_requests for settings in shared.served.values()] == [13, 13]
    alone = share_of(Config(), 4)
    assert alone.default_model.lanes.batch.max_requests == alone.lanes.batch.max_requests == 2500
    launch = Launch(load(TWO), None, Path("data")).preloading({"support": Path("/a")})
    assert launch.config.models["large"].preload == {"support": Path("/a")}
    assert launch.preloading({}).config.preloaded() == {}


def test_check_explains_each_model_and_the_memory_that_they_share(load):
    config, report = load(TWO), {"device": "cpu", "dtype": "float32", "threads": 2}
    told = [*explain(config, Path("/data"), dict.fromkeys(config.served, report))]
    assert [text for topic, text in told if topic == "base model"] == ["large", "org/small"]
    assert ("note", "Engines on one device share its memory: set engine.memory_gb of each base model.") in told
    sized = {
        name: replace(settings, engine=replace(settings.engine, memory_gb=1.0))
        for name, settings in config.models.items()
    }
    told = [*explain(replace(config, models=sized), Path("/data"), dict.fromkeys(config.served, report))]
    assert not [text for _, text in told if "share its memory" in text]


def test_ray_runs_the_engines_of_models_without_addresses_each_as_it_needs(load):
    ray = "cluster: {ray: {address: 'head:6379', min: 2, max: 8, resources: {GPU: 1}}}"
    small = TWO.replace("replicas: 2, ", "").replace("{device: cpu, addresses", "{ray: {max: 9}, addresses")
    config = load(small + ray)
    assert config.ray_of("org/small") is None
    runs = config.ray_of("large")
    assert (runs.address, runs.min, runs.max, runs.resources) == ("head:6379", 2, 8, {"GPU": 1.0})
    config = load(TWO.replace("replicas: 2, ", "ray: {min: 1, resources: {CPU: 2}}, ") + ray)
    runs = config.ray_of("large")
    assert (runs.min, runs.max, runs.resources) == (1, 8, {"CPU": 2.0})
    assert load(TWO).ray_of("large") is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", "models.large.engine.replicas: Ray starts the engines"),
        ("replicas: 2", "ray: {min: 9}", "models.large.engine.ray: min and max must be"),
        ("min: 2, max: 8", "min: 3, max: 2", "cluster.ray: min and max must be"),
        ("{GPU: 1}", "{GPU: 0}", "cluster.ray: resources must name"),
        ("{GPU: 1}", "{GPU: 1}, nodes: 3", "cluster.ray.nodes: unknown key"),
    ],
)
def test_problems_of_the_section_cluster_name_their_place(load, old, new, message):
    text = TWO + "cluster: {ray: {min: 2, max: 8, resources: {GPU: 1}}}"
    with pytest.raises(ConfigError, match=message):
        load(text.replace(old, new) if old else text)


def test_a_models_engines_on_ray_need_the_cluster(load):
    with pytest.raises(ConfigError, match=r"models\.large\.engine\.ray: needs the section cluster\.ray"):
        load(TWO.replace("replicas: 2", "ray: {min: 1}"))
