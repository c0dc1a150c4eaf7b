"""Host time of launching a step kernel by kernel: `python -m benchmarks.gpu.launching`. Needs no GPU.

All of a step is done but the work on the device: rows are uploaded, and the kernels of 32 layers and of the sampler are
launched over a pretended CUDA driver (pretended_cuda.py), whose launches do nothing. Widths are small, because the time
to launch does not depend on them. The linears, which are not Triton's, return memory that exists. Rows have 64 adapters
of rank 16, or none. Every step is timed with Triton's own launches, and with those of lora_kernels/gpu/launch.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu.shapes import TOY, full_layout
from benchmarks.runner import Run, benchmark, option, table
from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk
from engine.model.batch.rows import HostBatch
from engine.model.batch.state import BatchState
from engine.model.decode.decoder import Decoder, Head, Layer, Norms, Rope
from engine.model.layers.feed_forward import Mlp
from engine.model.layers.lora import projection_groups
from engine.model.memory.arena import Arena, page_shape
from engine.model.memory.host import Blob
from engine.model.sample.device_sampler import DeviceSampler
from engine.model.spec.config import ModelSpec, parse_spec
from engine.model.steps.forward import Steps, forward_over
from lab.without_gpu.pretended_cuda import PretendedCuda, pretend
from lora_kernels.backend import Scores
from lora_kernels.gpu.launch import Launcher
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.linear import Linear

LAYERS, BLOCK_SIZE, ADAPTERS, RANK, CONTEXT = 32, 16, 64, 16, 1000
CPU, BF16 = torch.device("cpu"), torch.bfloat16


class Setup:
    """A model and an engine's device side for steps of up to `max_rows` rows, over a driver that launches nothing."""

    def __init__(self, max_rows: int, with_adapters: bool) -> None:
        spec = replace(parse_spec(TOY, {}), layers=LAYERS, windows=(None,) * LAYERS)
        layout, shape = full_layout(spec, RANK), page_shape(spec, BLOCK_SIZE)
        adapters = ADAPTERS if with_adapters else 0
        self._first_page = 1 + adapters * layout.num_pages
        self._arena = Arena(shape, self._first_page + 1, ADAPTERS, BF16, CPU)
        blob = Blob.of(torch.zeros(layout.num_pages, shape.elements, dtype=BF16))
        for i in range(adapters):
            first = 1 + i * layout.num_pages
            self._arena.load_adapter(f"{i}", layout, blob, tuple(range(first, first + layout.num_pages)))
        self._sampler = DeviceSampler(spec.vocab_size, CPU, (), max_rows)
        self._state = BatchState(max_rows, CONTEXT + 1024, BLOCK_SIZE)
        decoder = make_decoder(spec, max_rows + 1024)
        self._steps = Steps(forward_over(decoder, self._arena, TritonBackend()), self._sampler.last_tokens)
        for row in range(max_rows):
            self._admit(f"{row}", f"{row % adapters}" if adapters else None)

    def _admit(self, name: str, adapter: str | None) -> None:
        tokens, params = tuple([5] * (CONTEXT + 1)), SamplingParams()
        self._sampler.add(name, params, tokens, len(tokens))
        pages = (self._first_page,) * (-(-(CONTEXT + 1024) // BLOCK_SIZE))
        admission = Admission(name, tokens, len(tokens), CONTEXT, pages, adapter, params)
        self._state.admit(admission, self._arena.adapter_slot(adapter), int(self._sampler.slots([name])[0]))

    def launch(self, batch: HostBatch) -> None:
        """Launches a step, and sampling from it."""
        logits = self._steps.compute(batch, self._steps.find(batch)).logits
        if logits is not None:
            self._sampler.start(logits, batch.sample_ids)

    def gather(self, rows: int, chunk: int) -> HostBatch:
        """Returns a step of `rows` sequences that decode, of which the last computes `chunk` prompt tokens instead, if
        that is not 0."""
        chunks = [ScheduledChunk(f"{row}", CONTEXT, 1, (), samples=True) for row in range(rows)]
        if chunk:
            chunks[-1] = ScheduledChunk(f"{rows - 1}", CONTEXT + 1 - chunk, chunk, (), samples=True)
        return self._state.gather(chunks)


def make_decoder(spec: ModelSpec, max_rows: int) -> Decoder:
    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, dtype=BF16)

    def linear(width: int) -> Linear:
        out = torch.zeros(max_rows, width, dtype=BF16)
        return lambda x: out[: len(x)]

    hidden, inner = spec.hidden_size, spec.intermediate_size
    vocabulary = torch.zeros(spec.vocab_size, hidden, dtype=BF16)

    def embed(token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.index_select(vocabulary, 0, token_ids, out=out)

    norm, qkv, down = ones(hidden), linear(spec.query_width + 2 * spec.kv_width), linear(hidden)
    norms = Norms(norm, None, norm, None)
    groups, scores = projection_groups(spec), Scores(spec.attention_scale)
    mlp = Mlp(linear(2 * inner), down, (groups.gate_up, groups.down), spec.activation)
    layers = [Layer(i, None, scores, 0, norms, qkv, None, down, mlp) for i in range(spec.layers)]
    return Decoder(
        spec=spec,
        groups=groups,
        embed=embed,
        ropes=(Rope(torch.tensor(spec.ropes[0].inv_freq), 1.0),),
        layers=tuple(layers),
        head=Head(spec, norm, linear(spec.vocab_size)),
    )


def fastest(call: Callable[[], object], repeat: int) -> float:
    """Returns the least processor time of a call, in seconds, as the others were disturbed by other processes."""
    times = []
    for _ in range(repeat):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return float(np.min(times))


def measure(cuda: PretendedCuda, rows: int, chunk: int, with_adapters: bool, repeat: int) -> tuple[str, ...]:
    setup = Setup(rows, with_adapters)
    batch = setup.gather(rows, chunk)
    setup.launch(batch)
    launches = cuda.record()
    setup.launch(batch)
    count = len(launches)
    cuda.record(on=False)
    kept = fastest(lambda: setup.launch(batch), repeat)
    with patch.object(Launcher, "__call__", Launcher.launch_by_triton):
        ordinary = fastest(lambda: setup.launch(batch), repeat)
    name = f"{rows} rows" + (f", {chunk} prompt tokens" if chunk else "")
    return name, "yes" if with_adapters else "no", f"{count}", f"{ordinary * 1e3:.1f}", f"{kept * 1e3:.1f}"


@benchmark(
    option("--repeat", 40, "how often each step is launched; the fastest counts"),
    option("--rows", [64, 256], nargs="*"),
)
def bench(run: Run) -> None:
    torch.set_num_threads(1)
    steps = product(run.options.rows, (0, 512), (False, True))
    with pretend(Path(os.environ.get("TRITON_CACHE_DIR", run.scratch))) as cuda:
        rows = [measure(cuda, *step, run.options.repeat) for step in steps]
    columns = "step | adapters | launches | Triton's own, ms | kept, ms"
    run.show(table("host time to launch a step", columns, rows, ("step", "adapters")))


if __name__ == "__main__":
    bench.main()
