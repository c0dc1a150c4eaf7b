"""An engine whose attention is FlashInfer's, here a stand-in, generates what an engine on the reference does:
steps that are captured and replayed ahead, and others that are launched, while requests are preempted and restored."""

from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from engine.config import EngineConfig
from engine.core.config import CoreConfig, Scheduling
from engine.core.messages.commands import Submit
from engine.core.messages.requests import Lane, Request, SamplingParams
from engine.core.state.engine_state import EngineState
from engine.core.watch.check import leftovers, violations
from engine.engine import Engine
from engine.model.decode.decoder import Decoder
from engine.model.runner import kernels
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.spec.config import read_spec
from engine.model.steps import rungs
from engine.model.steps.forward import Steps, forward_over
from engine.model.steps.graphs import StepGraphs, StepParts
from lora_kernels.attention_choice import PROMPTS, STEP_CLASSES, AttentionChoice, AttentionWish
from lora_kernels.gpu.flashinfer_attention import FlashInferAttention
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.reference import ReferenceBackend
from tests.kernels import flashinfer_standin

BLOCK, NUM_PAGES, MAX_SEQS, MAX_LEN, BUDGET, WINDOW = 4, 26, 4, 64, 40, 9
CAPTURED_ROWS, RUNG = 20, 10
"""Rows of the largest captured step with prompts, and between two sizes: larger steps are launched."""


class PlainTriton(TritonBackend):
    """`TritonBackend` whose kernels are torch's, so that they run here, except for attention. It has no adapters."""

    def __init__(self) -> None:
        super().__init__(attention=FlashInferAttention(steps=frozenset(STEP_CLASSES)))
        self._torch = ReferenceBackend()
        self.pointwise = self._torch.pointwise

    def rotate_and_write(self, qkv, kv, batch, cos, sin, norms, kv_coding=None):
        kv_heads, head_dim = kv.shape[3:]
        heads = qkv.view(len(qkv), -1, head_dim)
        rotated = heads[:, : heads.shape[1] - kv_heads]
        self.pointwise.rotate(rotated, cos, sin)
        is_row = batch.kv_slots >= 0
        key, value = (heads[:, -count:][:, :kv_heads][is_row] for count in (2 * kv_heads, kv_heads))
        self._torch.write_kv(kv, key, value, replace(batch, kv_slots=batch.kv_slots[is_row]))
        return heads[:, : heads.shape[1] - 2 * kv_heads]

    def prepare_lora(self, arena, table, plan):
        return None

    def add_lora(self, out, x, prepared, layer, group):
        raise AssertionError("only steps without adapters are replayed here")


class Replays:
    """A recorder that calls what it recorded again. Graphs for steps with adapters are not recorded."""

    def __init__(self, log):
        self.log, self.count = log, 0

    def record(self, launch):
        if launch.args[2].prepared is not None:
            return lambda: pytest.fail("a step has no adapters")
        launch()

        def again():
            self.count, self.log.replaying = self.count + 1, True
            launch()
            self.log.replaying = False

        return again


def make_engine(model, log=None):
    """With a log of the stand-in, an engine that replays steps ahead with it; otherwise one as it is on a CPU."""
    sizes = {"block_size": BLOCK, "num_pages": NUM_PAGES, "max_seqs": MAX_SEQS, "max_model_len": MAX_LEN}
    config = EngineConfig(str(model), dtype="float32", device="cpu", swap_gb=0.001, threads=1, **sizes)
    runner = ModelRunner(load(config))
    runner.loaded.arena.pages[1:] = torch.nan
    if log is not None:
        replays = compute_with_flashinfer(runner, log)
        runner.overlaps = True
    core = CoreConfig(
        **sizes,
        token_budget=BUDGET,
        host_pages=6,
        eos_token_ids=(2, 3),
        prefix_caching=False,
        scheduling=Scheduling(preemption="swap"),
    )
    ticks = iter(range(10**9))
    engine = Engine(EngineState.create(core), runner, clock=lambda: next(ticks) / 1000)
    return engine, replays if log is not None else None


def compute_with_flashinfer(runner, log):
    replays = Replays(log)
    parts = StepParts(runner.loaded.decoder, runner.loaded.arena, PlainTriton(), runner.loaded.sampler)
    graphs = StepGraphs(parts, replays, MAX_SEQS, MAX_LEN, BUDGET)
    assert graphs.chunk_rungs == (RUNG, CAPTURED_ROWS)
    forward = forward_over(parts.decoder, parts.arena, parts.backend)
    runner._steps = Steps(forward, parts.sampler.last_tokens, graphs)
    return replays


def run(engine):
    texts = {}
    arrivals = {0: range(4), 5: range(4, 7), 9: range(7, 9)}
    step = 0
    while step < 12 or engine.state.has_work:
        for number in arrivals.get(step, ()):
            lane = Lane.INTERACTIVE if number > 3 else Lane.BATCH
            prompt = tuple(5 + (7 * number + position) % 90 for position in range(3 + 5 * number))
            params = SamplingParams(14, temperature=0.0, ignore_eos=True)
            engine.inbox.put(Submit(Request(str(number), prompt, params, None, lane)))
        for event in engine.step():
            assert event.refusal is None
            texts.setdefault(event.request_id, []).extend(event.tokens)
        assert violations(engine.state) == []
        step += 1
    assert leftovers(engine.state) == []
    return texts


def test_what_computes_attention_is_logged_with_the_reason(tiny_llama, monkeypatch):
    """The kernels of a GPU tell it when they are loaded."""
    told = AttentionChoice(frozenset({PROMPTS}), "measured on this device")
    asked = []

    def load(*arguments, sums, experts):
        *_, wish, on_attention = arguments
        asked.append(wish)
        on_attention(told)

    monkeypatch.setattr(kernels, "select_backend", load)
    config, spec = EngineConfig(str(tiny_llama), attention="flashinfer", kv_dtype="fp8"), read_spec(tiny_llama)
    with capture_logs() as logs:
        kernels.load_kernels(config, spec, torch.device("cuda"), torch.bfloat16, lambda *_: None)
    assert asked == [AttentionWish("flashinfer", has_fp8_kv=True, windows=frozenset({None}))]
    (line,) = logs
    assert (line["kernels"], line["reason"]) == ("flashinfer for prompts", "measured on this device")


def test_texts_are_those_of_the_reference(tiny_llama, monkeypatch):
    monkeypatch.setattr(rungs, "CHUNK_RUNG", RUNG)
    monkeypatch.setattr(rungs, "LARGEST_CHUNKS", CAPTURED_ROWS)
    as_they_are = Decoder.compute

    def windowed(decoder, *args):
        first, *others = decoder.layers
        return as_they_are(replace(decoder, layers=(replace(first, window=WINDOW), *others)), *args)

    monkeypatch.setattr(kernels, "select_backend", lambda *_, **__: ReferenceBackend())
    monkeypatch.setattr(Decoder, "compute", windowed)
    expected = run(make_engine(tiny_llama)[0])
    with flashinfer_standin.installed() as log:
        engine, replays = make_engine(tiny_llama, log)
        captured = log.captured
        texts = run(engine)
    assert texts == expected
    assert all(len(text) == 14 for text in texts.values()) and len(texts) == 9
    counters = engine.state.counters
    assert counters.preemptions > 0 and counters.pages_restored > 0
    assert replays.count > 20
    assert captured == log.captured == 2 * (len((1, 2, 4)) + len((RUNG, CAPTURED_ROWS))), "of both kinds of layers"
    attention = engine.executor._steps._graphs._parts.backend.paged_attention
    assert attention._begun is not None, "some steps had more rows than any captured one"
    assert {"decode", "prefill"} == set(log.runs)
