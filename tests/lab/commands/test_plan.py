"""`loralane plan`: its tables and files, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.config.whole import load_config
from lab.devices.device import FOLDER

SMALL = ("--rate", "2", "--duration", "10", "--prompt", "50-100", "--output", "5-20")


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 96,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


def test_a_plan_with_its_files(tmp_path):
    settings, figures = tmp_path / "engine.yaml", tmp_path / "plan.json"
    done = run(
        "llama-3.1-8b", *SMALL, "--weights", "fp8", "--price", "h100=2", "--settings", settings, "--json", figures
    )
    assert done.exit_code == 0, done.output
    assert "1 x llama-3.1-8b in fp8 on h100" in done.output
    assert "2.00 an hour" in done.output and "simulated: TTFT" in done.output
    document = json.loads(figures.read_text())
    assert document["plan"]["is_enough"] and document["plan"]["cost"] == 2.0
    engine = load_config(settings, {}).default_model.engine
    assert (engine.weights, engine.kv_dtype, engine.max_seqs) == ("fp8", "fp8", 512)


def test_adapters_and_devices_that_share_layers_are_told(tmp_path):
    settings = tmp_path / "engine.yaml"
    done = run("llama-3.1-70b", *SMALL, "--adapters", "20", "--settings", settings)
    assert done.exit_code == 0, done.output
    assert "adapters of rank 25" in done.output
    assert "engine.tensor_parallel: 2 has not run on GPUs" in done.output
    assert load_config(settings, {}).default_model.engine.tensor_parallel == 2


def test_what_steps_read_of_experts_is_told():
    done = run("qwen3-30b-a3b", *SMALL, "--adapters", "5", "--weights", "int4")
    assert done.exit_code == 0, done.output
    assert "of 128 experts, 8 a token" in done.output and "if all are chosen alike" in done.output
    assert "quantised experts are computed one by one" in done.output
    assert "adapters of rank 25" in done.output


def test_engines_for_prompts_and_others_for_answers_are_planned_and_configured(tmp_path):
    settings, figures = tmp_path / "engine.yaml", tmp_path / "plan.json"
    done = run("llama-3.1-8b", *SMALL, "--split", "always", "--settings", settings, "--json", figures)
    assert done.exit_code == 0, done.output
    assert "1 prefill + 1 decode x llama-3.1-8b in bf16 on h100" in done.output
    assert "engine.split has not run on GPUs" in done.output
    plan = json.loads(figures.read_text())["plan"]
    assert plan["is_enough"] and (plan["prefill"], plan["engines"]) == (1, 2)
    assert plan["report"]["split"] == plan["report"]["lanes"]["interactive"]["requests"] > 10
    model = load_config(settings, {}).default_model
    assert (model.engines.replicas, model.engines.roles, model.engines.split) == (2, ("prefill", "decode"), "always")
    assert (model.engine.kv_listen, model.engine.swap_gb) == ("auto", 16)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["llama-9"], "no model 'llama-9'"),
        (["llama-3.1-8b", "--device", "abacus"], "--device: 'abacus' is none of"),
        (["llama-3.1-8b", "--weights", "int3"], "--weights: 'int3' is none of"),
        (
            ["llama-3.1-8b", "--device", "m.json", "--weights", "int8"],
            "m.json is a device that was measured with the weig",
        ),
        (["llama-3.1-8b", "--measure", "m"], "--device: 'm' is none of h200, h100"),
        (["llama-3.1-8b", "--price", "h100=cheap"], "--price must be DEVICE=AMOUNT"),
        (["llama-3.1-8b", "--price", "H100=2"], "--price: 'H100' is none of"),
        (["llama-3.1-8b", "--itl", "0.0001"], "widen the goals"),
        (["llama-3.1-8b", "--split", "often"], "--split: 'often' is none of auto, never, always"),
        (["llama-3.1-8b", "--link", "string"], "--link: 'string' is none of nvlink"),
        (["llama-3.1-70b", "--split", "always"], "needs a model that fits one device"),
        (["llama-3.1-8b", "--rate", "0"], "the rate must be positive"),
        (["llama-3.1-8b", "--rate", "inf"], "the rate must be positive"),
        (["llama-3.1-8b", "--adapters", "1000000000"], "adapters must be at most 100,000"),
        (["llama-3.1-8b", "--json", "nowhere/x.json"], "--json nowhere/x.json"),
    ],
)
def test_what_cannot_be_planned(arguments, reason):
    done = run(*arguments, "--duration", "10")
    assert done.exit_code == 1
    assert reason in " ".join(done.output.split())


def test_weights_that_are_quantised_are_not_quantised_again(tmp_path):
    config = {**LLAMA, "quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run(tmp_path, *SMALL, "--weights", "int8")
    assert done.exit_code == 1 and "are quantised already, and the engine keeps them" in " ".join(done.output.split())
    done = run(tmp_path, *SMALL, "--split", "never")
    assert done.exit_code == 0 and "which the plan counts in 16 bits" in done.output


def test_more_engines_than_a_gateway_has_are_not_written(tmp_path):
    options = ("--device", "l4", *SMALL[2:], "--rate", "20000", "--duration", "1", "--split", "never", "--settings")
    found = run("llama-3.1-8b", *options, tmp_path / "engine.yaml")
    assert found.exit_code == 1 and "serves a base model with 64 at most" in " ".join(found.output.split())
    assert not (tmp_path / "engine.yaml").exists()


def test_a_trace_gives_the_rate_unless_its_requests_arrive_at_once(tmp_path):
    trace = tmp_path / "trace.csv"
    head = "req_time_s,client,prompt_len,output_len\n"
    trace.write_text(head + "0,1,9,9\n0,1,9,9\n")
    done = run("llama-3.1-8b", "--trace", trace)
    assert done.exit_code == 1 and "arrive at once" in " ".join(done.output.split())
    trace.write_text(head + "0,1,9,1\n2,1,9,1\n4,1,9,1\n")
    done = run("llama-3.1-8b", "--trace", trace, "--device", "l4", "--device", "l4")
    assert done.exit_code == 0, done.output
    assert "0.5 requests/s, by arithmetic" in done.output
    assert "100.00%, -" in done.output, "answers of one token have no gaps"
    done = run("llama-3.1-8b", "--trace", trace, "--rate", "nan")
    assert done.exit_code == 1 and "--rate must be positive and finite" in done.output


def test_a_measured_device_is_planned_for(tmp_path):
    """A file of --measure: half as fast as the one that comes with the project."""
    document = json.loads((FOLDER / "cpu-smollm2.json").read_text())
    document["cost"] = {name: value if name == "beyond" else 2 * value for name, value in document["cost"].items()} | {
        "beyond": {knot: 2 * price for knot, price in document["cost"]["beyond"].items()}
    }
    slow, figures, settings = (tmp_path / name for name in ("slow.json", "plan.json", "engine.yaml"))
    slow.write_text(json.dumps(document))
    rates = []
    for device in (FOLDER / "cpu-smollm2.json", slow):
        done = run(
            "smollm2-135m", "--device", device, "--price", "cpu-smollm2=0.1", "--rate", "2", "--duration", "10",
            "--prompt", "30-60", "--output", "5-20", "--ttft", "2", "--json", figures, "--settings", settings,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "as measured" in done.output and "0.10 an hour" in done.output
        rates.append(json.loads(figures.read_text())["plan"]["most"]["rate"])
    assert rates[0] == pytest.approx(2 * rates[1], rel=0.01)
    assert "device" not in settings.read_text()
