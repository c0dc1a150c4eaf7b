"""The number of threads follows affinity and quotas, not the machine."""

import os

import pytest

from engine.process.cores import usable_cores

HERE = len(os.sched_getaffinity(0))


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("150000 100000", 1),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", 8),
        ("1600000 100000", 8),
        ("", 8),
    ],
)
def test_a_quota_of_version_2_is_rounded_down(cgroup, tmp_path, limit, cores):
    write(cgroup, "0::/pod/container\n")
    write(tmp_path / "sys/pod/container/cpu.max", limit)
    assert usable_cores(cgroup, tmp_path / "sys") == cores


def test_a_quota_of_a_group_above_binds_as_well(cgroup, tmp_path):
    write(cgroup, "0::/pod/container\n")
    write(tmp_path / "sys/pod/cpu.max", "300000 100000")
    write(tmp_path / "sys/pod/container/cpu.max", "max 100000")
    assert usable_cores(cgroup, tmp_path / "sys") == 3


@pytest.mark.parametrize(("quota", "cores"), [("400000", 4), ("-1", 8)])
def test_a_quota_of_version_1(cgroup, tmp_path, quota, cores):
    write(cgroup, "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n")
    write(tmp_path / "sys/cpu,cpuacct/docker/x/cpu.cfs_quota_us", quota)
    write(tmp_path / "sys/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000")
    assert usable_cores(cgroup, tmp_path / "sys") == cores


def test_affinity_binds_where_there_is_no_quota(tmp_path):
    assert usable_cores(tmp_path / "none", tmp_path) == HERE
