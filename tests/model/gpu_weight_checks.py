"""A decoder whose weights are quantised as on a GPU, against one with dequantised weights, under Triton's interpreter.

A script of its own, because Triton decides at import whether kernels are interpreted: start it with TRITON_INTERPRET=1
and the folder of the tiny model. Prints one JSON object: form of the weights -> the largest differences of log
probabilities: with an adapter, without one, and between these two.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk
from engine.model.batch.state import BatchState
from engine.model.decode.assembly import build_decoder
from engine.model.decode.decoder import Decoder
from engine.model.layers.lora import target_widths
from engine.model.memory.arena import Arena, page_shape
from engine.model.memory.host import Blob
from engine.model.spec.config import read_spec
from engine.model.weights.quantize import quantized_source
from engine.model.weights.reader import WeightSource, open_weights
from lab.without_gpu.interpreter_speed import spare_repeated_work
from lora_kernels import forms
from lora_kernels.gpu.quantized_linear import DeviceEmbedding, DeviceLinear
from lora_kernels.gpu.triton_backend import TritonBackend
from lora_kernels.layout import pack_adapter, plan_layout
from lora_kernels.quantized import Coding, QuantizedWeight, Weight, dense

CPU, BLOCK, NUM_PAGES = torch.device("cpu"), 16, 80
PROMPT = (3, 10, 17, 24, 31)


def by_rows(source: WeightSource) -> WeightSource:
    """Returns a source of weights in INT8 that were made for activations in INT8."""

    def read(name: str) -> Weight:
        weight = source(name)
        if "_proj.weight" not in name or not isinstance(weight, torch.Tensor):
            return weight
        tops = weight.abs().amax(1, keepdim=True)
        codes = ((weight / tops * 127).round() + 128).to(torch.uint8)
        scales = (tops / 127).half().expand(-1, weight.shape[1] // 32).contiguous()
        return QuantizedWeight(Coding(8, 32, 128, by_rows=True), codes, scales)

    return read


def logits(decoder: Decoder) -> list[torch.Tensor]:
    """Returns the log probabilities after the prompt, with an adapter and without."""
    spec, pages = decoder.spec, iter(range(1, NUM_PAGES))
    arena, state = Arena(page_shape(spec, BLOCK), NUM_PAGES, 2, torch.float32, CPU), BatchState(2, BLOCK, BLOCK)
    elements, widths, drawn = arena.shape.elements, target_widths(spec), torch.Generator().manual_seed(0)
    layout = plan_layout(np.full((spec.layers, len(widths)), 8, dtype=np.int32), widths, elements)
    blocks = {
        (layer, target): (torch.randn(8, width, generator=drawn), torch.randn(out, 8, generator=drawn) * 0.1)
        for layer in range(spec.layers)
        for target, (width, out) in enumerate(widths.tolist())
    }
    blob = Blob.of(pack_adapter(layout, blocks, elements, torch.float32))
    arena.load_adapter("adapter", layout, blob, tuple(next(pages) for _ in range(layout.num_pages)))
    for index, adapter in enumerate(("adapter", None)):
        admission = Admission(str(index), PROMPT, len(PROMPT), 0, (), adapter, SamplingParams())
        state.admit(admission, arena.adapter_slot(adapter))
    chunks = [ScheduledChunk(str(index), 0, len(PROMPT), (next(pages),), samples=True) for index in range(2)]
    batch = state.gather(chunks).to_device(torch.zeros(2, dtype=torch.int64))
    rows = decoder.run(batch, arena, TritonBackend()).logits.log_softmax(-1)
    return [rows[batch.sample_ids.index(str(index))] for index in range(2)]


def as_on_gpu(table: tuple[forms.Form, ...]) -> tuple[forms.Form, ...]:
    """Return the table of forms with the row of a GPU's codes first, for all codes on any device."""
    [row] = [form for form in table if form.name == "codes on a GPU"]
    return (replace(row, fits=lambda stored: stored.coding is not None), *table)


def compare(folder: Path, form: str) -> list[float]:
    spec = read_spec(folder)
    stored, outcomes = open_weights(folder, spec), []
    source = by_rows(stored) if form == "by_rows" else quantized_source(stored, form, None)
    for keeps in (True, False):
        tables = as_on_gpu(forms.FORMS), as_on_gpu(forms.EMBEDDING_FORMS)
        with patch.multiple(forms, FORMS=tables[0], EMBEDDING_FORMS=tables[1]):
            kept = source if keeps else lambda name: dense(source(name))
            decoder = build_decoder(spec, kept, torch.float32, CPU)
        assert isinstance(decoder.layers[0].qkv, DeviceLinear) == keeps
        assert isinstance(decoder.embed, DeviceEmbedding) == (keeps and form == "int4")
        outcomes.append(logits(decoder))
    ours, exact = outcomes
    pairs = [*zip(ours, exact, strict=True), (exact[0], exact[1])]
    return [float((one - other).abs().max()) for one, other in pairs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    spare_repeated_work()
    with torch.inference_mode():
        found = {form: compare(Path(sys.argv[1]), form) for form in ("int4", "by_rows")}
    print(json.dumps(found))
