"""`100k` means the same on command lines, in configuration files and in specifications."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.limits import _number
from gateway.cli.main import app as cli
from gateway.config.file import ConfigError
from gateway.config.whole import parse_config
from gateway.core.counts import MAX_COUNT, parse_count
from lab.bench.spec import Lengths, parse_lane, parse_lengths
from lab.traffic.synthetic import Sizes

HASH = "sha256:" + 64 * "a"


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("600", 600), ("100k", 100_000), ("100K", 100_000), ("1.5m", 1_500_000), ("2M", 2_000_000),
     ("0.001k", 1), (" 1_000 ", 1_000), ("1,000,000", 1_000_000), (str(MAX_COUNT), MAX_COUNT)],
)  # fmt: skip
def test_numbers_as_people_write_them(text, number):
    assert parse_count(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "k", "1.5", "1.0005k", "-5", "1e3", "100 k", "100g", "_1", "1__0", "\u0661", str(MAX_COUNT + 1), 10_000 * "9"],
)  # fmt: skip
def test_what_is_no_whole_number_is_refused(text):
    with pytest.raises(ValueError, match="write one such as 600, 100k") as caught:
        parse_count(text)
    assert len(str(caught.value)) < 200


def test_it_means_the_same_everywhere(tmp_path):
    tenants = {"acme": {"keys": [HASH], "limits": {"tokens_per_minute": "100k", "tokens_per_day": "${DAY}"}}}
    config = parse_config({"tenants": tenants, "engine": {"max_model_len": "8k"}}, {"DAY": "1.5m"}, Path())
    limits = config.tenants["acme"].tenant.limits
    assert (limits.tokens_per_minute, limits.tokens_per_day, config.engine.max_model_len) == (100_000, 1_500_000, 8_000)
    assert _number("100k") == 100_000
    assert Sizes.parse("1k-1.5k") == Sizes(1_000, 1_500)
    assert parse_lengths("1k-1.5k") == Lengths(1_000, 1_500)
    assert parse_lengths("2k~1.5").low == 2_000
    assert parse_lane("interactive:rate=1,in=1k").inputs == Lengths(1_000, 1_000)


def test_options_take_it_too(monkeypatch):
    asked = []
    monkeypatch.setattr("lab.commands.simulate.Scenario", lambda *given, **named: asked.append(named) or sys.exit(0))
    arguments = ["simulate", "--tenants", "1k", "--adapters", "2_000", "--seed", "1.5k"]
    CliRunner().invoke(cli, arguments)
    assert [(one["tenants"], one["adapters"], one["seed"]) for one in asked] == [(1_000, 2_000, 1_500)]
    for option, text, why in (
        ("--tenants", "1 k", "write one such as 600, 100k"),
        ("--jobs", "-1", "at least 0, not -1"),
    ):
        refused = CliRunner().invoke(cli, ["simulate", option, text], env={"COLUMNS": "200"})
        assert refused.exit_code == 2 and why in refused.output
    refused = CliRunner().invoke(cli, ["bench", "serve", "--concurrency", "0"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and "at least 1, not 0" in refused.output
    refused = CliRunner().invoke(cli, ["serve", "--http-port", "100k"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2 and "from 0 to 65535, not 100000" in refused.output


def test_a_configuration_says_what_is_wrong_with_a_number():
    with pytest.raises(ConfigError, match=r"http\.port: Expected int"):
        parse_config({"http": {"port": "80 k"}}, {}, Path())
