"""An engine of two stages of two ranks, as processes: a stream outlives a rank, and no rank outlives the engine."""

from __future__ import annotations

import json
import re

import httpx
import psutil
import pytest
import yaml

from tests.e2e.test_hangup import KEYS, SECONDS, heard, started
from tests.e2e.test_interrupt import command, family

TOKENS = 120
STAGE_1 = 1
"""Index of the first rank of the second stage among the ranks other than 0."""


@pytest.fixture
def config(tmp_path, tiny_model):
    """Return a configuration file of a small random model on four ranks."""
    sizes = {"num_pages": 200, "swap_gb": 0, "host_adapter_gb": 0.1, "max_seqs": 4, "token_budget": 64}
    engine = {"tensor_parallel": 2, "pipeline_parallel": 2, "threads": 1, "dtype": "float32", "device": "cpu", **sizes}
    ports = {"http": {"port": 0}, "grpc": {"port": 0}}
    file = tmp_path / "config.yaml"
    tenants = {"acme": {"keys": ["${ACME}"]}}
    document = {"model": {"source": str(tiny_model)}, "engine": engine, "tenants": tenants}
    file.write_text(yaml.safe_dump(document | ports))
    return file


def stream(url, on_chunk):
    """Return the text of a greedy answer; `on_chunk` is called with the number of chunks after each."""
    body = {"model": "tiny", "prompt": "Once upon", "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 0}
    headers, texts, usage = {"authorization": f"Bearer {KEYS['ACME']}"}, [], None
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body | options, headers=headers, timeout=SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            texts += [
                token for choice in event["choices"] for token in (choice["logprobs"] or {"tokens": []})["tokens"]
            ]
            usage = event.get("usage") or usage
            on_chunk(len(texts))
    assert usage["completion_tokens"] == len(texts) == TOKENS
    return texts


def ranks_of(process):
    """Return the processes of ranks 1 to 3."""
    ranks = [child for child in family(process, "follower") if any("follower" in word for word in command(child))]
    return sorted(ranks, key=lambda child: int(child.cmdline()[-2]))


def test_a_stream_outlives_a_rank_and_no_rank_outlives_the_engine(config, tmp_path):
    with started(tmp_path, "--config", str(config)) as (process, log):
        url = re.search(r"http://127\.0\.0\.1:\d+", heard(process, log, "Ctrl-C stops it"))[0]
        first = ranks_of(process)[STAGE_1]

        def kill(count):
            if count >= 10 and first.is_running():
                first.kill()
                first.wait(SECONDS)

        disturbed = stream(url, kill)
        others = ranks_of(process)
        assert len(others) == 3 and first not in others
        assert stream(url, lambda count: None) == disturbed
        assert "rank 2 of 4 was ended by SIGKILL" in log.read_text()
        [engine] = [child for child in family(process) if "engine.serve.server" in command(child)]
        process.kill()  # which would start another engine
        engine.kill()
        assert psutil.wait_procs(others, timeout=SECONDS)[1] == []
