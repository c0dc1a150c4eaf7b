"""After an engine has run its padded steps, no step of any kind has a kernel compiled."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk
from engine.model.batch.state import BatchState
from engine.model.decode.assembly import build_decoder
from engine.model.layers.lora import TARGETS, target_widths
from engine.model.memory.arena import Arena, page_shape
from engine.model.memory.host import Blob
from engine.model.sample.device_sampler import DeviceSampler
from engine.model.sample.masks import TokenMasks, num_words
from engine.model.spec.config import read_spec
from engine.model.steps import warm_up as warming
from engine.model.steps.forward import Steps, forward_over
from engine.model.steps.warm_up import KINDS, StepLimits, warm_up
from engine.model.weights.reader import open_weights
from engine.serve.server import keep_compiled_kernels
from lora_kernels.gpu import triton_dora
from lora_kernels.gpu.launch import Launcher, Ready
from lora_kernels.gpu.triton_attention import PagedAttention
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.gpu.triton_decode import DecodeTuning
from lora_kernels.gpu.triton_lora_tuning import LoraTuning
from lora_kernels.gpu.triton_prefill_plan import PrefillTuning
from lora_kernels.layout import plan_layout

pretended_cuda = pytest.importorskip("lab.without_gpu.pretended_cuda")
pytestmark = pytest.mark.skipif(not pretended_cuda.can_pretend(), reason="needs a C compiler, and no GPU")
CPU, BLOCK, MAX_SEQS, MAX_LEN, ROWS = torch.device("cpu"), 16, 130, 128, 200
DECODE = DecodeTuning(block_n=16, split_tokens=32, max_splits=4)
PREFILL = PrefillTuning(block_m=16, block_n=16, split_tokens=32, max_splits=2)


class Compiled(Exception):
    """Raised at the first kernel that would be compiled, where none should be."""


class Compilations:
    """In the place of first launches: notes what Triton would compile, by its own key, and launches nothing."""

    def __init__(self):
        self.seen, self.new, self.is_over = set(), [], False

    def launch_first(self, launcher, key, grid, args):
        kernel, device = launcher._kernel, pretended_cuda.active.active.get_current_device()
        _, specialization, options = kernel.device_caches[device][4](*args, **launcher._constants)
        compiled = (kernel.__name__, str(specialization), str(options))
        if compiled not in self.seen:
            if self.is_over:
                raise Compiled(compiled)
            self.seen.add(compiled)
            self.new.append(compiled)
        launcher._ready[key] = Ready(lambda *_: None, (), ())


@pytest.fixture
def compilations(tmp_path):
    noted = Compilations()

    def launch_first(self, key, grid, args):
        noted.launch_first(self, key, grid, args)

    with (
        pretended_cuda.pretend(tmp_path),
        patch.object(Launcher, "_launch_first", launch_first),
        patch("engine.model.layers.lora.prepare_scales", triton_dora.prepare),
    ):
        yield noted


class Engine:
    """The device side of an engine, with an adapter `x` of rank 40 and one that scales outputs, `d`."""

    def __init__(self, folder):
        self.spec = spec = read_spec(folder)
        decoder = build_decoder(spec, open_weights(folder, spec), torch.float32, CPU)
        self.arena = Arena(page_shape(spec, BLOCK), 200, 4, torch.float32, CPU)
        self.sampler = DeviceSampler(spec.vocab_size, CPU, (), MAX_SEQS)
        backend = TritonBackend(LoraTuning(long_from=150), PagedAttention(DECODE, PREFILL))
        self.steps = Steps(forward_over(decoder, self.arena, backend), self.sampler.last_tokens)

    def warm_up(self, kinds=tuple(KINDS), progress=lambda *_: None):
        limits = StepLimits(MAX_SEQS, ROWS, MAX_LEN)
        warm_up(self.spec, self.steps, self.sampler, self.arena, limits, progress, kinds)

    def load_adapters(self):
        ranks = np.full((self.spec.layers, len(TARGETS)), 40, dtype=np.int32)
        first = 20
        for name in "xd":
            scaled = np.full(ranks.shape, name == "d")
            layout = plan_layout(ranks, target_widths(self.spec), self.arena.shape.elements, scaled)
            blob = Blob.of(torch.zeros(layout.num_pages, self.arena.shape.elements))
            self.arena.load_adapter(name, layout, blob, tuple(range(first, first + layout.num_pages)))
            first += layout.num_pages

    def run(self, chunks, adapters=(None,), params=(warming.GREEDY,), masked=False):
        """Runs a step of `chunks`, (first token, tokens) of each request, whose adapters and parameters go round."""
        state, names = BatchState(MAX_SEQS, MAX_LEN, BLOCK), [f"{i}" for i in range(len(chunks))]
        for i, (name, (start, count)) in enumerate(zip(names, chunks, strict=True)):
            tokens, adapter = (5,) * (start + count), adapters[i % len(adapters)]
            self.sampler.add(name, params[i % len(params)], tokens, len(tokens))
            pages = (3,) * (-(-len(tokens) // BLOCK))
            admission = Admission(name, tokens, len(tokens), start, pages, adapter, params[i % len(params)])
            state.admit(admission, self.arena.adapter_slot(adapter), int(self.sampler.slots([name])[0]))
        named = zip(names, chunks, strict=True)
        batch = state.gather([ScheduledChunk(name, start, count, (), samples=True) for name, (start, count) in named])
        words = np.full((1, num_words(self.spec.vocab_size)), -1, dtype=np.int32)
        logits = self.steps.compute(batch, self.steps.find(batch)).logits
        self.sampler.start(logits, batch.sample_ids, TokenMasks((0,), words) if masked else None)
        for name in names:
            self.sampler.remove(name)

    def run_everything(self):
        self.load_adapters()
        short, long, prompt, late = (3, 1), (120, 1), (0, 20), (100, 20)
        for count in (1, 3, 63, 64, 65, 127, 128, 129):
            self.run([short] * count)
            self.run([short] * count + [(0, 2)])
        for chunks in ([long], [prompt], [late], [short, long, late, prompt], [(0, 7), (0, 128)]):
            for adapters in ([None], ["x"], ["d"], [None, "x", "d"]):
                self.run(chunks, adapters)
        self.run([(0, 100), (0, 100)], ["x"])
        self.run([(0, 100), (0, 100)], ["d"])
        params = [SamplingParams(temperature=0.9, top_p=0.5), SamplingParams(temperature=0.9, min_p=0.1)]
        params += [SamplingParams(temperature=0.0), SamplingParams(temperature=1.2, repetition_penalty=1.3)]
        for each in (*((one,) for one in params), params):
            self.run([short] * 3 + [prompt], params=each)
            self.run([short], params=each, masked=True)
        for number in range(21):
            self.run([short] * 3, params=[SamplingParams(logprobs=number), SamplingParams()])


@pytest.fixture
def engine(tiny_llama, compilations):
    return Engine(tiny_llama)


def test_nothing_is_compiled_after_an_engine_is_ready(engine, compilations):
    engine.warm_up()
    assert compilations.new
    compilations.is_over = True
    engine.run_everything()


@pytest.mark.parametrize("without", KINDS)
def test_every_kind_of_step_is_needed(engine, compilations, without):
    engine.warm_up([kind for kind in KINDS if kind != without])
    compilations.is_over = True
    with pytest.raises(Compiled):
        engine.run_everything()


def test_an_engine_is_as_before(engine):
    told = []
    before = (engine.sampler.last_tokens.clone(), list(engine.sampler._free), list(engine.arena._free_adapter_slots))
    engine.warm_up(progress=lambda *facts: told.append(facts))
    assert not engine.arena.pages.any()
    assert torch.equal(engine.sampler.last_tokens, before[0])
    assert sorted(engine.sampler._free) == sorted(before[1])
    assert sorted(engine.arena._free_adapter_slots) == sorted(before[2])
    assert not engine.arena.table.max_ranks.any()
    engine.load_adapters()
    assert len(engine.arena.copies.finish()) == 2, "the first step reports its own copies"
    assert told[0] == ("warming up", 0, len(told) - 1) and told[-1] == ("warming up", len(told) - 1, len(told) - 1)


@pytest.mark.parametrize(
    ("state_dir", "given", "folder"),
    [("state", {}, "state/triton"), ("", {}, None), ("state", {"TRITON_CACHE_DIR": "mine"}, "mine")],
)
def test_compiled_kernels_lie_in_the_state_directory(state_dir, given, folder):
    environment = dict(given)
    keep_compiled_kernels(EngineConfig("model", state_dir=state_dir), environment)
    assert environment.get("TRITON_CACHE_DIR") == folder


def test_logprobs_of_any_number_that_a_request_may_ask_for_are_warmed_up():
    widths = {1 << (max(number, 1) - 1).bit_length() for number in range(21)}
    assert {1 << (max(number, 1) - 1).bit_length() for number in warming.LOGPROBS} == widths
