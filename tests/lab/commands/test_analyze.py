"""`loralane analyze`: what it prints and writes, and that its settings are valid ones."""

import json

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.config.whole import load_config


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "busy.csv"
    rows = "".join(f"2023-11-16 18:15:{second:02}.0000000,{60_000 + second},40\n" for second in range(60))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)], env={"COLUMNS": "200"})


def test_figures_settings_and_their_file(trace, tmp_path):
    settings, figures = tmp_path / "settings.yaml", tmp_path / "figures.json"
    done = run(trace, "--settings", settings, "--json", figures)
    assert done.exit_code == 0, done.output
    assert "Traffic" in done.output and "engine.max_model_len" in done.output
    traffic = json.loads(figures.read_text())["busy"]["traffic"]
    assert (traffic["requests"], traffic["prompt"]["most"]) == (60, 60_059)
    config = load_config(settings, {})
    assert config.default_model.engine.max_model_len == 66_112
    assert config.default_model.lanes.interactive.ttft_s > 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["missing.csv"], "missing.csv"),
        (["{trace}", "{trace}"], "two traces have the same name"),
        (["{trace}", "other.csv", "--settings", "s.yaml"], "--settings is for one trace"),
        (["{trace}", "--device", "abacus"], "no device 'abacus'"),
        (["{trace}", "--json", "nowhere/x.json"], "--json nowhere/x.json"),
        ([], "name traces to read, or give --live"),
        (["{trace}", "--live"], "name traces to read, or give --live"),
        (["--live", "--tune"], "--tune needs lengths of single requests"),
    ],
)
def test_what_is_wrong_is_said(trace, options, reason):
    done = run(*(option.format(trace=trace) for option in options))
    assert done.exit_code == 1
    assert reason in " ".join(done.output.split())
