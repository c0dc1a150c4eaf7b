"""The decoder against Hugging Face's own, in fp32: chunked, paged, scattered and mixed must change nothing."""

import random

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, VOCAB, save_model

from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk
from engine.model.batch.state import BatchState
from engine.model.decode.assembly import build_decoder
from engine.model.layers.lora import TARGETS, target_widths
from engine.model.memory.arena import Arena, page_shape
from engine.model.memory.host import Blob
from engine.model.spec.config import read_spec
from engine.model.weights.reader import open_weights
from lora_kernels.layout import pack_adapter, plan_layout
from lora_kernels.select import select_backend

CPU = torch.device("cpu")
BLOCK, NUM_PAGES = 16, 60


@pytest.fixture(autouse=True)
def one_thread():
    """Matrices this small are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Replay:
    """Sequences pushed through a decoder in chunks of random length, over randomly scattered pages."""

    def __init__(self, folder, dtype=torch.float32):
        self.spec = read_spec(folder).served(128)
        self.decoder = build_decoder(self.spec, open_weights(folder, self.spec), dtype, CPU)
        self.arena = Arena(page_shape(self.spec, BLOCK), NUM_PAGES, 8, dtype, CPU)
        self.arena.pages[1:] = 1e4  # what a page held before must not matter
        self.state = BatchState(8, 128, BLOCK)
        self.last_tokens = torch.zeros(8, dtype=torch.int64)
        self.backend = select_backend(CPU, dtype)
        self.rng = random.Random(0)
        self.free = self.rng.sample(range(1, NUM_PAGES), NUM_PAGES - 1)

    def take(self, count):
        return tuple(self.free.pop() for _ in range(count))

    def load(self, name, blocks):
        ranks = np.zeros((self.spec.layers, len(TARGETS)), dtype=np.int32)
        for place, (a, _) in blocks.items():
            ranks[place] = len(a)
        layout = plan_layout(ranks, target_widths(self.spec), self.arena.shape.elements)
        blob = pack_adapter(layout, blocks, self.arena.shape.elements, self.arena.pages.dtype)
        self.arena.load_adapter(name, layout, Blob.of(blob), self.take(layout.num_pages))

    @torch.inference_mode()
    def run(self, sequences, adapters=None):
        """{(sequence index, position): logits} at the last row of every chunk."""
        adapters = adapters or [None] * len(sequences)
        for index, (tokens, adapter) in enumerate(zip(sequences, adapters, strict=True)):
            admission = Admission(str(index), tuple(tokens), len(tokens), 0, (), adapter, SamplingParams())
            self.state.admit(admission, self.arena.adapter_slot(adapter))
        done, logits = [0] * len(sequences), {}
        while any(count < len(tokens) for count, tokens in zip(done, sequences, strict=True)):
            chunks = [self.chunk(i, done, tokens) for i, tokens in enumerate(sequences) if done[i] < len(tokens)]
            batch = self.state.gather(chunks).to_device(self.last_tokens)
            rows = self.decoder.run(batch, self.arena, self.backend).logits
            for name, row in zip(batch.sample_ids, rows, strict=True):
                logits[int(name), done[int(name)] - 1] = row
        return logits

    def chunk(self, index, done, tokens):
        length = min(self.rng.choice((1, 1, 2, 5, 17)), len(tokens) - done[index])
        start, done[index] = done[index], done[index] + length
        pages = -(-done[index] // BLOCK) - -(-start // BLOCK)
        return ScheduledChunk(str(index), start, length, self.take(pages), samples=True)


def random_tokens(*lengths):
    rng = random.Random(1)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def assert_matches(logits, models, sequences, atol=1e-4):
    with torch.inference_mode():
        expected = [model(torch.tensor([tokens])).logits[0] for model, tokens in zip(models, sequences, strict=True)]
    assert {index for index, _ in logits} == set(range(len(sequences)))
    for (index, position), row in logits.items():
        torch.testing.assert_close(row.float(), expected[index][position], atol=atol, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_hugging_face(family, tmp_path):
    model = save_model(family, tmp_path)
    replay, sequences = Replay(tmp_path), random_tokens(50, 33, 7, 1)
    assert_matches(replay.run(sequences), [model] * 4, sequences)
    assert not replay.arena.pages[0].any()


def random_adapter(spec, ranks, scale=0.1):
    """Blocks with the given rank of each target; rank 0 leaves the projection alone."""
    widths = target_widths(spec).tolist()
    return {
        (layer, target): (torch.randn(rank, widths[target][0]), torch.randn(widths[target][1], rank) * scale)
        for layer in range(spec.layers)
        for target, rank in enumerate(ranks)
        if rank
    }


def merged(family, folder, blocks):
    """The Hugging Face model with an adapter added into its weights."""
    model = save_model(family, folder)
    with torch.no_grad():
        for (layer, target), (a, b) in blocks.items():
            block = model.model.layers[layer].self_attn if target < 4 else model.model.layers[layer].mlp
            getattr(block, TARGETS[target]).weight += b @ a
    return model


def test_each_row_has_its_own_adapter(tmp_path):
    torch.manual_seed(3)
    save_model("qwen3", tmp_path)
    replay = Replay(tmp_path)
    adapters = {
        "all": random_adapter(replay.spec, (8, 8, 8, 8, 8, 8, 8)),
        "some": random_adapter(replay.spec, (1, 0, 17, 0, 0, 3, 5)),
        "base": {},
    }
    for name in ("all", "some"):
        replay.load(name, adapters[name])
    names = ["some", "base", "all", "some"]
    models = [merged("qwen3", tmp_path / name, adapters[name]) for name in names]
    sequences = random_tokens(20, 20, 35, 9)
    logits = replay.run(sequences, [None if name == "base" else name for name in names])
    assert_matches(logits, models, sequences, atol=1e-3)


def test_bfloat16_is_as_close_as_hugging_face_is(tmp_path):
    model, sequences = save_model("llama", tmp_path), random_tokens(40)
    logits = Replay(tmp_path, torch.bfloat16).run(sequences)
    with torch.inference_mode():
        exact = model(torch.tensor(sequences)).logits[0]
        theirs = model.bfloat16()(torch.tensor(sequences)).logits[0].float()
    positions = [position for _, position in logits]
    ours = torch.stack([row.float() for row in logits.values()])
    assert (ours - exact[positions]).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_a_step_that_samples_nothing_has_no_logits(tmp_path):
    save_model("llama", tmp_path)
    replay = Replay(tmp_path)
    replay.state.admit(Admission("a", (1, 2, 3, 4), 4, 0, (1,), None, SamplingParams()), -1)
    batch = replay.state.gather([ScheduledChunk("a", 0, 3, (), samples=False)]).to_device(replay.last_tokens)
    assert replay.decoder.run(batch, replay.arena, replay.backend).logits.shape == (0, VOCAB)
