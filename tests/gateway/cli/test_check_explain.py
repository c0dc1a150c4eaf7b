"""`loralane check --explain`: what a configuration comes to on this machine."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.config.explain import explain
from gateway.config.sections import AdminConfig, HttpConfig, RedisConfig
from gateway.config.whole import demo_config

ENGINE = {"device": "cpu", "dtype": "float32", "threads": 2}
MODEL = {
    "architecture": "llama",
    "sampling_defaults": {"temperature": 0.7, "top_k": 20},
    "weights": "bf16",
    "weight_bytes": 2**30,
    "weight_bits": 16.0,
    "ranks": 1,
    "stages": [{"layers": 30, "weight_bytes": 2**30}],
    "capacity": {
        "num_pages": 1024,
        "block_size": 16,
        "page_bytes": 2**20,
        "max_model_len": 2048,
        "max_seqs": 16,
        "host_pages": 1024,
        "adapter_pages": 1000,
        "adapter_bytes_per_rank": 2**18,
        "host_adapter_bytes": 2**30,
    },
    "token_budget": 640,
    "host_adapter_gb": 1.5,
    "reasons": {"max_seqs": "so fast", "token_budget": "so short", "host_adapter_gb": "a quarter"},
}


def explained(config=None, **engine):
    config = config or demo_config()
    rows = [*explain(config, Path("/data"), dict.fromkeys(config.served, ENGINE | engine))]
    return {name: text for name, text in rows if name != "note"}, [text for name, text in rows if name == "note"]


def test_sizes_of_the_pool_are_given_in_tokens():
    facts, _ = explained(**MODEL)
    assert facts["page pool"] == (
        "1,024 pages of 16 tokens, 1.00 GiB: KV of 16,384 tokens (64.0 KiB each), less resident adapters"
    )
    assert facts["sequences"] == "6 of 2,048 tokens fit with 15% spare; up to 16 at once, of 870 tokens each"
    assert facts["host tier"] == "1,024 pages, 1.00 GiB: KV of 16,384 tokens, preempted or evicted"
    assert facts["adapter memory"].endswith("of rank 16, 250 fill the pool, and 256 fit into host memory")
    assert facts["engine.max_seqs"] == "16: so fast"
    assert facts["engine.token_budget"] == "640: so short"
    assert facts["engine.host_adapter_gb"] == "1.5: a quarter; others are read from disk on demand"
    assert facts["tenant globex"].startswith("600 requests a minute, 200,000 tokens a minute; 50% of")


def test_defaults_of_the_model_are_told():
    facts, _ = explained(**MODEL)
    assert facts["sampling"].endswith("the model's own defaults: temperature 0.7, top_k 20 (generation_config.json)")
    config = demo_config()
    config = replace(config, model=replace(config.model, generation_config="none"))
    facts, _ = explained(config, **MODEL)
    assert (
        facts["sampling"]
        == "the model's own defaults (temperature 0.7, top_k 20) are not used (model.generation_config)"
    )
    facts, _ = explained(**MODEL | {"sampling_defaults": {}})
    assert facts["sampling"].startswith("requests that set no sampling parameters get those of OpenAI's API")


def test_stages_are_told_with_their_weights():
    stages = [{"layers": 14, "weight_bytes": 2**29}, {"layers": 16, "weight_bytes": 2**30}]
    facts, _ = explained(**MODEL | {"ranks": 4, "stages": stages})
    assert facts["model"].endswith(
        "on each rank of the largest stage; a rank's layers and weights by stage: 14 and 0.50 GiB, 16 and 1.00 GiB"
    )


def test_a_model_that_is_not_there_yet_has_no_sizes():
    facts, notes = explained()
    assert facts["model"] == "embedded: fetched or read at the start; then its memory and sizes are known"
    assert "page pool" not in facts
    assert notes == ["The demo's public keys are accepted, on loopback only."]


def test_what_is_dangerous_on_a_network_is_noted():
    config = replace(demo_config(), tenants={}, http=HttpConfig(host="0.0.0.0"), admin=AdminConfig(open_metrics=True))
    _, notes = explained(config)
    assert [note.split()[0] for note in notes] == ["There", "http", "The", "/metrics"]


def test_ports_of_administration_are_shown_and_judged():
    admin = AdminConfig(keys=("0" * 64,), host="0.0.0.0", port=9000, grpc_port=9001)
    facts, notes = explained(replace(demo_config(), tenants={}, admin=admin, gateways=4))
    assert (facts["admin HTTP"], facts["admin gRPC"]) == ("0.0.0.0:9000, no TLS", "0.0.0.0:9001, no TLS")
    assert facts["Redis away"] == "limits: degraded, each process as one of 4"
    assert [note.split()[0] for note in notes] == ["admin"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0?password=s3cret", "redis://host:6379/0"),
        ("rediss://user:s3cret@host:6380/0?ssl_password=s3cret", "rediss://host:6380/0"),
        ("redis+sentinel://:s3cret@a:1,b/main/2?sentinel_password=s3cret", "redis+sentinel://a:1,b/main/2"),
        ("unix:///run/redis.sock?password=s3cret&db=1", "unix:///run/redis.sock"),
    ],
)
def test_passwords_of_redis_are_not_shown(url, shown):
    facts, _ = explained(replace(demo_config(), redis=RedisConfig(url=url)))
    assert facts["Redis"] == shown


def test_the_command_asks_the_engine(smollm2, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        json.dumps(
            {"model": {"source": str(smollm2)}, "engine": {"device": "cpu", "dtype": "float32", "weights": "int4"}}
        )
    )
    done = CliRunner().invoke(app, ["check", str(file), "--explain"], env={**os.environ, "COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "32: the default of every CPU, measured" in done.output
    assert "256: the default of every CPU, measured" in done.output
    assert "22.5 KiB each" in done.output or "45.0 KiB each" in done.output
    assert "0.09 GiB of weights (int4), 5.74 bits each" in done.output


@pytest.fixture
def answered_here(monkeypatch):
    """Run what the command runs in a process of its own in this one, which has imported torch already."""

    def run(command, **_):
        monkeypatch.setattr(sys, "argv", command[2:])
        with redirect_stdout(io.StringIO()) as printed:
            status = import_module(command[2]).main()
        return subprocess.CompletedProcess(command, status, printed.getvalue(), "")

    monkeypatch.setattr("gateway.cli.check.subprocess.run", run)


@pytest.mark.usefixtures("answered_here")
@pytest.mark.parametrize(
    ("source", "engine", "reason"),
    [
        ("smollm2", {"kv_dtype": "fp8"}, "this machine cannot serve it: engine.kv_dtype"),
        ("owner/name", {"adapter_dtype": "fp8"}, "this machine cannot serve it: engine.adapter_dtype"),
        ("empty", {}, "this machine cannot serve it: "),
        ("./modles/llama-typo", {}, "model.source: ./modles/llama-typo is neither an existing file or folder"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(smollm2, tmp_path, source, engine, reason):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text((smollm2 / "config.json").read_text())
    paths = {"smollm2": str(smollm2), "empty": str(empty)}
    file = tmp_path / "my.yaml"
    file.write_text(json.dumps({"model": {"source": paths.get(source, source)}, "engine": {"device": "cpu", **engine}}))
    arguments = ["check", str(file), "--explain", "--data-dir", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, env={**os.environ, "COLUMNS": "300"})
    assert done.exit_code == 1
    assert reason in done.output
