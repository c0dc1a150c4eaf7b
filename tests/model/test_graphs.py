"""Captured steps: what is captured, what may be replayed, and that a replay says what single launches say."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tiny_families import save_model
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import EngineConfig
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk
from engine.model.batch.block import HostSteps, StepShape, cut_block, write_rows
from engine.model.batch.state import BatchState
from engine.model.decode.assembly import build_decoder
from engine.model.layers.lora import TARGETS, target_widths
from engine.model.memory.allocation import count_pages
from engine.model.memory.arena import Arena, page_shape
from engine.model.memory.host import Blob
from engine.model.sample.device_sampler import DeviceSampler
from engine.model.spec.config import read_spec
from engine.model.steps.forward import plan_graphs
from engine.model.steps.graph_plan import MIB, GraphTunings, expected_bytes, graph_bytes
from engine.model.steps.graphs import StepGraphs, StepParts
from engine.model.steps.rungs import chunk_ladder, ladder
from engine.model.weights.quantize import quantized_source
from engine.model.weights.reader import open_weights
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_lora_plan import COUNT, HEADER, workspace_numbers
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning
from lora_kernels.layout import plan_layout

ROOT, CPU = Path(__file__).parents[2], torch.device("cpu")
BLOCK, MAX_SEQS, MAX_LEN = 16, 5, 64
REPLAYS = (
    "any_set_of_adapters_with_padding",
    "requests_come_and_go",
    "scaled_outputs_and_trained_tokens_are_not_replayed",
    "grammar_rows_are_replayed_beside_others",
    "an_engine_ahead_of_replays",
    "any_mix_of_chunks_and_decodes",
    "keys_and_values_in_eight_bits",
    "adapters_of_experts",
)
NIGHTLY = {
    "any_set_of_adapters_with_padding",
    "an_engine_ahead_of_replays",
    "any_mix_of_chunks_and_decodes",
    "keys_and_values_in_eight_bits",
    "adapters_of_experts",
}
"""The replays that take longest: 3 to 8 s of a processor each."""


@pytest.fixture(scope="module")
def outcomes(request, tiny_llama, expert_folder):
    """Check -> None, or why it failed or was not run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in items if "outcomes" in item.fixturenames]
    return run_interpreted("replay_worker.py", tiny_llama, expert_folder, *names)


@pytest.fixture(scope="module")
def expert_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    save_model("qwen2_moe", folder)
    return folder


def run_interpreted(script, *arguments):
    """Return what a script says, given these arguments, in a process whose kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).parent / script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # after the log


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in REPLAYS]
)
def test_replays_say_what_single_launches_say(outcomes, name):
    assert outcomes[name] is None, outcomes[name]


def test_every_check_is_run(outcomes):
    assert set(outcomes) == set(REPLAYS)


def test_quantised_experts_are_not_captured_and_the_log_says_why(expert_folder, captured):
    spec = read_spec(expert_folder)
    source = quantized_source(open_weights(expert_folder, spec), "int8", None)
    decoder, cuda = build_decoder(spec, source, torch.float32, CPU), torch.device("cuda")
    arguments = (decoder, captured.arena.shape, torch.float32, cuda, TritonBackend(), MAX_LEN)
    with capture_logs() as lines:
        assert plan_graphs(EngineConfig("model"), *arguments) is None
    assert [line["event"] for line in lines] == ["steps are not captured"]


@pytest.mark.parametrize(
    ("most", "rungs"),
    [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (33, (1, 2, 4, 8, 16, 24, 32, 33))],
)
def test_small_ladders(most, rungs):
    assert ladder(most) == rungs


@pytest.mark.parametrize("most", [64, 100, 256, 1000])
def test_padding_is_bounded(most):
    rungs = ladder(most)
    assert list(rungs) == sorted(set(rungs)) and rungs[-1] == most
    for low, high in pairwise(rungs):
        assert high - low - 1 < max(8, low / 8), "a step of one row more than a rung is padded too far"


@pytest.mark.parametrize(
    ("budget", "rungs"),
    [(1, ()), (100, (100,)), (128, (128,)), (300, (128, 256, 300)), (8192, tuple(range(128, 1025, 128)))],
)
def test_ladders_of_steps_with_prompts(budget, rungs):
    assert chunk_ladder(budget) == rungs


class Idle:
    """`LaunchRecorder` that launches nothing, and knows what was replayed."""

    def __init__(self):
        self.count, self.replayed = 0, []

    def record(self, launch):
        number, self.count = self.count, self.count + 1
        return lambda: self.replayed.append(number)


class CapturedGraphs:
    """What captured steps need, with an adapter `x` in slot 0 and one that scales outputs, `d`, in slot 1."""

    def __init__(self, folder, token_budget=1):
        spec = read_spec(folder)
        decoder = build_decoder(spec, open_weights(folder, spec), torch.float32, CPU)
        self.arena = Arena(page_shape(spec, BLOCK), 50, 4, torch.float32, CPU)
        self.sampler = DeviceSampler(spec.vocab_size, CPU, (), MAX_SEQS + 2)
        self.state, self.recorder = BatchState(MAX_SEQS + 2, MAX_LEN, BLOCK), Idle()
        ranks = np.full((spec.layers, len(TARGETS)), 4, dtype=np.int32)
        for name, first in (("x", 20), ("d", 35)):
            scaled = np.full(ranks.shape, name == "d")
            layout = plan_layout(ranks, target_widths(spec), self.arena.shape.elements, scaled)
            blob = torch.zeros(layout.num_pages, self.arena.shape.elements)
            self.arena.load_adapter(name, layout, Blob.of(blob), tuple(range(first, first + layout.num_pages)))
        self.told = []
        parts = StepParts(decoder, self.arena, TritonBackend(LoraTuning(long_from=150)), self.sampler)
        told = self.told.append
        self.graphs = StepGraphs(parts, self.recorder, MAX_SEQS, MAX_LEN, token_budget, lambda *args: told(args))

    def admit(self, name, adapter_hash=None, tokens=(5, 6, 7)):
        self.sampler.add(name, SamplingParams(), tokens, len(tokens))
        admission = Admission(name, tokens, len(tokens), len(tokens) - 1, (3,), adapter_hash, SamplingParams())
        self.state.admit(admission, self.arena.adapter_slot(adapter_hash), int(self.sampler.slots([name])[0]))

    def decode(self, names):
        return self.state.gather([ScheduledChunk(name, 2, 1, (), samples=True) for name in names])


def replayed_logits(captured, batch):
    rung = captured.graphs.find(batch)
    assert rung is not None
    return captured.graphs.launch(batch, rung).logits


@pytest.fixture
def captured(tiny_llama):
    return CapturedGraphs(tiny_llama)


def test_every_rung_is_captured_with_adapters_and_without(captured):
    assert captured.graphs.rungs == (1, 2, 4, 5)
    assert captured.recorder.count == 8
    assert captured.told == [(0, 8), (2, 8), (4, 8), (6, 8), (8, 8)]


@pytest.mark.parametrize(
    ("adapters", "replayed"),
    [([None], 7), (["x"], 6), ([None, None], 5), ([None, "x", None], 2), (["x"] * 5, 0), ([None] * 5, 1)],
)
def test_the_lowest_rung_that_fits_is_replayed(captured, adapters, replayed):
    """The largest is captured first, and with adapters before without."""
    for name, adapter_hash in zip("abcde", adapters, strict=False):
        captured.admit(name, adapter_hash)
    batch = captured.decode("abcde"[: len(adapters)])
    logits = replayed_logits(captured, batch)
    assert captured.recorder.replayed == [replayed]
    assert logits.shape == (len(adapters), 97)


def test_what_does_not_fit_is_not_replayed(captured):
    for name in "abcdefg":
        captured.admit(name, "d" if name == "g" else None)
    prompt_too = [ScheduledChunk("a", 2, 1, (), samples=True), ScheduledChunk("b", 0, 3, (), samples=True)]
    steps = {
        "a prompt beside a decode": captured.state.gather(prompt_too),
        "a prompt's last but one token": captured.state.gather([ScheduledChunk("a", 1, 1, (), samples=False)]),
        "outputs that are scaled": captured.decode("ag"),
        "more rows than any rung": captured.decode("abcdef"),
    }
    for why, batch in steps.items():
        assert captured.graphs.find(batch) is None, why
    assert captured.recorder.replayed == []


@pytest.fixture
def with_chunks(tiny_llama):
    """200 rows: sizes 128 and 200, of which only the latter may have long segments (from 150 rows on)."""
    return CapturedGraphs(tiny_llama, token_budget=200)


def chunk(name, length, samples=True):
    return ScheduledChunk(name, 0, length, (), samples=samples)


def test_a_rung_has_a_graph_for_long_segments_where_there_may_be_any(with_chunks):
    assert with_chunks.graphs.chunk_rungs == (128, 200)
    assert with_chunks.recorder.count == 3 + 2 + 8
    assert with_chunks.told == [(done, 13) for done in (0, 3, 5, 7, 9, 11, 13)]


@pytest.mark.parametrize(
    ("chunks", "replayed"),
    [
        ([("a", 60), ("b", 1), ("c", 60)], 4),
        ([("a", 60), ("x", 60), ("b", 8)], 3),
        ([("a", 60), ("x", 60), ("b", 9)], 1),
        ([("a", 60), ("b", 60), ("c", 9)], 2),
        ([("x", 60), ("y", 60), ("z", 31)], 0),
        ([("x", 60), ("y", 60), ("z", 29), ("a", 30)], 1),
    ],
)
def test_the_lowest_rung_that_fits_a_step_with_prompts_is_replayed(with_chunks, chunks, replayed):
    for name, _ in chunks:
        with_chunks.admit(name, "x" if name in "xyz" else None, range(60))
    batch = with_chunks.state.gather([chunk(name, length) for name, length in chunks])
    assert len(replayed_logits(with_chunks, batch)) == len(chunks)
    assert with_chunks.recorder.replayed == [replayed]


def test_what_does_not_fit_a_step_with_prompts(with_chunks):
    for name in "abcdef":
        with_chunks.admit(name, None, range(60))
    with_chunks.admit("g", "d", range(60))
    steps = {
        "more rows than any rung": [chunk(name, 50) for name in "abcd"] + [chunk("e", 1)],
        "more sequences than a rung": [chunk(name, 9) for name in "abcdef"],
        "outputs that are scaled": [chunk("a", 9), chunk("g", 9)],
    }
    for why, chunks in steps.items():
        assert with_chunks.graphs.find(with_chunks.state.gather(chunks)) is None, why


class Operations(TorchDispatchMode):
    """Notes torch's operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_step_with_prompts_is_one_upload_and_one_replay(with_chunks):
    """The host does nothing else on the device until it samples from the logits."""
    for name in "abx":
        with_chunks.admit(name, "x" if name == "x" else None, range(60))
    batch = with_chunks.state.gather([chunk("a", 50, samples=False), chunk("b", 1), chunk("x", 20)])
    with Operations() as operations:
        logits = replayed_logits(with_chunks, batch)
    assert operations.names == ["aten::copy_"]
    assert len(with_chunks.recorder.replayed) == 1
    assert logits.shape == (2, 97)


def test_rows_and_sequences_beyond_a_batch_are_padding(with_chunks):
    for name in "ab":
        with_chunks.admit(name, None, range(60))
    shape = StepShape(128, MAX_LEN // BLOCK, workspace_numbers(128, max_segments=5), 5)
    fields = HostSteps((shape,), CPU).begin(shape)
    for part in fields:
        part[:] = 99
    write_rows(fields, with_chunks.state.gather([chunk("a", 50, samples=False), chunk("b", 20)]))
    assert fields.query_starts.tolist() == [0, 50, 70, 70, 70, 70]
    assert fields.sample_rows.tolist() == [69, 0, 0, 0, 0]
    assert fields.contexts.tolist() == [50, 20, 0, 0, 0]
    assert fields.kv_slots[69] >= 0 and (fields.kv_slots[70:] == -1).all()
    assert (fields.sampler_slots[70:] == -1).all() and not fields.token_ids[70:].any()


def test_a_slot_may_scale_outputs_and_then_not(captured):
    captured.admit("a", "d")
    assert captured.graphs.find(captured.decode("a")) is None
    captured.arena.evict_adapter("d")
    assert not captured.arena.table.has_scales.any()


def test_a_step_is_one_upload_from_a_block_that_the_last_one_did_not_use(captured, monkeypatch):
    sent = []
    monkeypatch.setattr(HostSteps, "send", lambda block, target, numbers: sent.append((block, target, numbers)))
    for name, adapter_hash in zip("abc", ("x", "x", None), strict=True):
        captured.admit(name, adapter_hash)
    for names in ("abc", "c", "abc"):
        replayed_logits(captured, captured.decode(names))
    blocks, targets, numbers = zip(*sent, strict=True)
    assert blocks[0] is blocks[2] and blocks[0] is not blocks[1]
    assert len({target.data_ptr() for target in targets}) == 1
    before_lists = [StepShape(rows, MAX_LEN // BLOCK, workspace_numbers(rows)).lora_start for rows in (4, 1)]
    row_tiles, shrink_tiles, padded_rows = 1, 1, 4
    room_for_rows = padded_rows * row_tiles
    lists = HEADER + padded_rows + 4 * room_for_rows + 4 * shrink_tiles
    assert list(numbers) == [before_lists[0] + lists, before_lists[1], before_lists[0] + lists]


@pytest.mark.parametrize("chunk_seqs", [0, 2])
def test_parts_of_a_block_are_aligned_and_apart(chunk_seqs):
    shape = StepShape(3, 5, workspace_numbers(3, 16), chunk_seqs, has_experts=True)
    block = torch.zeros(shape.size + 8, dtype=torch.int32)
    fields = cut_block(block, shape)
    for number, part in enumerate(fields, 1):
        assert (part.data_ptr() - block.data_ptr()) % 16 == 0
        assert not part.any()
        part.fill_(number)
    assert [part.dtype for part in fields] == [torch.int64] * 2 + [torch.int32] * 9
    assert fields.block_tables.shape == (chunk_seqs or 3, 5)
    assert (len(fields.query_starts), len(fields.sample_rows)) == ((3, 2) if chunk_seqs else (0, 0))
    assert not block[shape.size :].any()


def test_rows_beyond_a_batch_are_padding(captured):
    """Whatever lay there before."""
    captured.admit("a", None)
    captured.admit("b", "x")
    shape = StepShape(4, MAX_LEN // BLOCK, workspace_numbers(4))
    fields = HostSteps((shape,), CPU).begin(shape)
    for part in fields:
        part[:] = 99
    write_rows(fields, captured.decode("ab"))
    assert fields.kv_slots.tolist() == [3 * BLOCK + 2] * 2 + [-1] * 2
    assert fields.token_ids[:2].tolist() == [7, 7]
    assert fields.positions[:2].tolist() == [2, 2]
    assert fields.contexts.tolist() == [3, 3, 0, 0]
    assert fields.sampler_slots.tolist() == [0, 1, -1, -1]
    assert fields.token_ids.min() >= 0 and fields.token_ids.max() < 97, "padding is embedded, too"
    assert fields.block_tables[:2, 0].tolist() == [3, 3]


def test_lists_are_empty_where_nothing_is_captured_yet(captured):
    """A capture launches everything once, before any step has filled the block."""
    fields = cut_block(captured.graphs._block, StepShape(1, MAX_LEN // BLOCK, workspace_numbers(1)))
    assert fields.lora[:HEADER:COUNT].tolist() == [0, 0, 0, 0]
    assert (fields.kv_slots.tolist(), fields.sampler_slots.tolist(), fields.contexts.tolist()) == ([-1], [-1], [0])


def test_what_is_kept_back_covers_what_lies_at_fixed_addresses(with_chunks):
    graphs, backend = with_chunks.graphs, with_chunks.graphs._parts.backend
    spec, kv, attention = graphs._parts.decoder.spec, with_chunks.arena.kv(0), backend.paged_attention
    tunings = GraphTunings(attention.decode_tuning(kv), attention.prefill_tuning(kv), backend.lora_tuning)
    held = [graphs._block, graphs._logits, graphs._residual, graphs._query_starts, graphs._sums]
    for partials in (attention._workspace.partials, attention._parts):
        held += [partials.totals, partials.stats]
    sizes = [graph_bytes(spec, torch.float32, tunings, *size, MAX_LEN, BLOCK) for size in ((1, 1), (5, 200), (5, 900))]
    assert sum(tensor.nbytes for tensor in held) < sizes[1]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(("max_seqs", "budget", "least", "most"), [(64, 64, 0.3e9, 0.7e9), (256, 8192, 0.9e9, 1.8e9)])
def test_llama_3_8b_keeps_some_memory_back(captured, max_seqs, budget, least, most):
    spec = replace(
        captured.graphs._parts.decoder.spec,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
    )
    tunings = GraphTunings(DecodeTuning(), PrefillTuning(), LoraTuning())
    assert least < graph_bytes(spec, torch.bfloat16, tunings, max_seqs, budget, 8192, 16) < most


def test_pages_are_what_graphs_leave(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10_000, 20_000))
    config, cuda = EngineConfig("model"), torch.device("cuda")
    assert count_pages(config, 100, cuda) == 90
    assert count_pages(config, 100, cuda, reserved=4_000) == 54
    assert count_pages(replace(config, num_pages=70), 100, cuda, reserved=4_000) == 70


def test_graphs_are_for_gpus(captured):
    decoder, shape = captured.graphs._parts.decoder, captured.arena.shape
    arguments = (decoder, shape, torch.float32, CPU, TritonBackend(), MAX_LEN)
    assert plan_graphs(EngineConfig("model"), *arguments) is None


def test_graphs_are_off_where_the_configuration_says_so(captured):
    decoder, shape, cuda = captured.graphs._parts.decoder, captured.arena.shape, torch.device("cuda")
    spec, tunings = decoder.spec, GraphTunings(DecodeTuning(), PrefillTuning(), LoraTuning())
    kept = graph_bytes(spec, torch.float32, tunings, 64, 1024, MAX_LEN, BLOCK)
    for config in (EngineConfig("model", graphs=False), EngineConfig("model", pipeline_parallel=2)):
        assert plan_graphs(config, decoder, shape, torch.float32, cuda, TritonBackend(), MAX_LEN) is None
        assert expected_bytes(config, spec, torch.float32, cuda, MAX_LEN, 64, 1024) < kept - 100 * MIB, "no graphs"
