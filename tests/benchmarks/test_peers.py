"""Benchmarks start servers with settings that these servers have."""

from pathlib import Path

import pytest

from benchmarks.adapters import ours
from benchmarks.peers import PATIENT, loralane
from gateway.config.file import ConfigError


@pytest.mark.parametrize("slots", [0, 8])
def test_the_servers_of_the_benchmark_of_adapters_know_all_of_its_settings(tmp_path: Path, slots: int) -> None:
    peer = ours(tmp_path / "model", {"first": tmp_path / "first"}, slots, tmp_path, frozenset({0}))
    assert peer.command.words[-4] == "--config"


def test_goals_that_no_step_misses_are_valid(tmp_path: Path) -> None:
    loralane(tmp_path / "model", tmp_path, frozenset({0}), {"lanes": PATIENT})


def test_a_setting_that_no_server_has_is_named_before_the_server_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy"):
        loralane(tmp_path / "model", tmp_path, frozenset({0}), {"engine": {"scheduling": {"policy": "fcfs"}}})
