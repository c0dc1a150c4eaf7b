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

from engine.config import EngineConfig
from engine.core.types import Admission, SamplingParams, ScheduledChunk
from engine.model.arena import Arena, page_shape
from engine.model.batch import BatchState
from engine.model.decoder import build_decoder
from engine.model.device_sampler import DeviceSampler
from engine.model.graph_plan import graph_bytes
from engine.model.graphs import StepGraphs, StepParts, ladder
from engine.model.host_memory import Blob
from engine.model.lora import TARGETS, target_widths
from engine.model.memory import count_pages
from engine.model.spec import read_spec
from engine.model.step_block import HostBlock, StepShape, cut_block, write_rows
from engine.model.steps import plan_graphs
from engine.model.weights import open_weights
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_lora_plan import COUNT, HEADER, workspace_numbers
from lora_kernels.layout import plan_layout

ROOT, CPU = Path(__file__).parents[2], torch.device("cpu")
BLOCK, MAX_SEQS, MAX_LEN = 16, 5, 64
REPLAYS = (
    "any_set_of_adapters_with_padding",
    "requests_come_and_go",
    "scaled_outputs_are_not_replayed",
    "grammar_rows_are_replayed_beside_others",
    "an_engine_ahead_of_replays",
)


@pytest.fixture(scope="module")
def outcomes(tiny_llama):
    """Check -> traceback or None, from a process whose kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, Path(__file__).parent / "graph_checks.py", tiny_llama]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", REPLAYS)
def test_replays_say_what_single_launches_say(outcomes, name):
    assert outcomes[name] is None, outcomes[name]


def test_every_check_is_run(outcomes):
    assert set(outcomes) == set(REPLAYS)


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


class Idle:
    """`LaunchRecorder` that launches nothing, and knows what was replayed."""

    def __init__(self):
        self.count, self.replayed = 0, []

    def record(self, launch):
        number, self.count = self.count, self.count + 1
        return lambda: self.replayed.append(number)


class CapturedGraphs:
    """What captured steps need, with an adapter `x` in slot 0 and one that scales outputs, `d`, in slot 1."""

    def __init__(self, folder):
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
        parts = StepParts(decoder, self.arena, TritonBackend(), self.sampler)
        self.graphs = StepGraphs(parts, self.recorder, MAX_SEQS, MAX_LEN, lambda *told: self.told.append(told))

    def admit(self, name, adapter_hash=None, tokens=(5, 6, 7)):
        self.sampler.add(name, SamplingParams(), tokens, len(tokens))
        admission = Admission(name, tokens, len(tokens), len(tokens) - 1, (3,), adapter_hash, SamplingParams())
        self.state.admit(admission, self.arena.adapter_slot(adapter_hash), int(self.sampler.slots([name])[0]))

    def decode(self, names):
        return self.state.gather([ScheduledChunk(name, 2, 1, (), samples=True) for name in names])


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
    assert captured.graphs.fits(batch)
    logits = captured.graphs.launch(batch)
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
        assert not captured.graphs.fits(batch), why
        with pytest.raises(ValueError, match="does not fit any graph"):
            captured.graphs.launch(batch)
    assert captured.recorder.replayed == []


def test_a_slot_may_scale_outputs_and_then_not(captured):
    captured.admit("a", "d")
    assert not captured.graphs.fits(captured.decode("a"))
    captured.arena.evict_adapter("d")
    assert not captured.arena.table.has_scales.any()


def test_a_step_is_one_upload_from_a_block_that_the_last_one_did_not_use(captured, monkeypatch):
    sent = []
    monkeypatch.setattr(HostBlock, "send", lambda block, target, numbers: sent.append((block, target, numbers)))
    for name, adapter_hash in zip("abc", ("x", "x", None), strict=True):
        captured.admit(name, adapter_hash)
    for names in ("abc", "c", "abc"):
        captured.graphs.launch(captured.decode(names))
    blocks, targets, numbers = zip(*sent, strict=True)
    assert blocks[0] is blocks[2] and blocks[0] is not blocks[1]
    assert len({target.data_ptr() for target in targets}) == 1
    before_lists = [StepShape(rows, MAX_LEN // BLOCK, workspace_numbers(rows)).lora_start for rows in (4, 1)]
    row_tiles, shrink_tiles, padded_rows = 1, 1, 4
    room_for_rows = padded_rows * row_tiles
    lists = HEADER + padded_rows + 4 * room_for_rows + 4 * shrink_tiles
    assert list(numbers) == [before_lists[0] + lists, before_lists[1], before_lists[0] + lists]


def test_parts_of_a_block_are_aligned_and_apart():
    shape = StepShape(3, 5, workspace_numbers(3, 16))
    block = torch.zeros(shape.size + 8, dtype=torch.int32)
    fields = cut_block(block, shape)
    for number, part in enumerate(fields, 1):
        assert (part.data_ptr() - block.data_ptr()) % 16 == 0
        assert not part.any()
        part.fill_(number)
    assert [part.dtype for part in fields] == [torch.int64] + [torch.int32] * 6
    assert fields.block_tables.shape == (3, 5)
    assert not block[shape.size :].any()


def test_rows_beyond_a_batch_are_padding(captured):
    """Whatever lay there before."""
    captured.admit("a", None)
    captured.admit("b", "x")
    shape = StepShape(4, MAX_LEN // BLOCK, workspace_numbers(4))
    fields = HostBlock((shape,), CPU).begin(4)
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


def test_what_is_kept_back_covers_what_lies_at_fixed_addresses(captured):
    spec, graphs = captured.graphs._parts.decoder.spec, captured.graphs
    tuning = graphs._parts.backend.paged_attention.decode_tuning(captured.arena.kv(0))
    workspace = graphs._parts.backend.paged_attention._workspace
    held = (graphs._block, graphs._logits, graphs._sums, workspace.rows)
    held = (*held, workspace.partials.totals, workspace.partials.stats)
    sizes = [graph_bytes(spec, torch.float32, tuning, rows, MAX_LEN // BLOCK) for rows in (1, MAX_SEQS, 64)]
    assert sum(tensor.nbytes for tensor in held) < sizes[1]
    assert sizes == sorted(sizes)


def test_llama_3_8b_keeps_half_a_gigabyte_back(captured):
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
    assert 0.3e9 < graph_bytes(spec, torch.bfloat16, DecodeTuning(), 64, 512) < 0.6e9


def test_pages_are_what_graphs_leave(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10_000, 20_000))
    config, cuda = EngineConfig("model"), torch.device("cuda")
    assert count_pages(config, 100, cuda) == 90
    assert count_pages(config, 100, cuda, reserved=4_000) == 54
    assert count_pages(replace(config, num_pages=70), 100, cuda, reserved=4_000) == 70


def test_graphs_are_for_gpus(captured):
    spec, shape = captured.graphs._parts.decoder.spec, captured.arena.shape
    arguments = (spec, shape, torch.float32, CPU, TritonBackend(), MAX_LEN)
    assert plan_graphs(EngineConfig("model"), *arguments) is None


def test_graphs_are_off_where_the_configuration_says_so(captured):
    spec, shape, cuda = captured.graphs._parts.decoder.spec, captured.arena.shape, torch.device("cuda")
    config = EngineConfig("model", graphs=False)
    assert plan_graphs(config, spec, shape, torch.float32, cuda, TritonBackend(), MAX_LEN) is None
