"""The reference against loops over rows and heads, and against what every backend must satisfy."""

import pytest
import torch
from backend_checks import CHECKS
from kernel_cases import ATTENTION_CASES, LORA_CASES

from lora_kernels.reference import ReferenceBackend, lora_delta

OWN = {*(f"attention: {name}" for name in ATTENTION_CASES), *(f"lora: {name}" for name in LORA_CASES)}
"""Checks that compare with the reference itself."""


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in OWN])
def test_it_satisfies_what_every_backend_must(name):
    CHECKS[name](ReferenceBackend())


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_every_head_weighs_the_values_that_its_row_sees(name):
    build, window = ATTENTION_CASES[name]
    case, backend = build(), ReferenceBackend()
    backend.write_kv(case.kv, case.key, case.value, case.batch)
    expected, block = torch.zeros_like(case.query).double(), case.kv.shape[2]
    group = case.query.shape[1] // case.kv.shape[3]
    for sequence, context in enumerate(case.batch.host_context_lens):
        start, stop = case.batch.host_query_starts[sequence : sequence + 2]
        for row in range(start, stop):
            last = context - (stop - row)
            seen = range(0 if window is None else max(0, last - window + 1), last + 1)
            places = [(case.batch.block_tables[sequence, token // block], token % block) for token in seen]
            tokens = torch.stack([case.kv[page, :, offset] for page, offset in places]).double()
            for head, query in enumerate(case.query[row].double()):
                key, value = tokens[:, :, head // group].unbind(1)
                products = key @ query * case.scores.scale
                if case.scores.cap is not None:
                    products = case.scores.cap * (products / case.scores.cap).tanh()
                sink = 0.0 if case.scores.sinks is None else case.scores.sinks[head].double().exp()
                expected[row, head] = products.exp() / (products.exp().sum() + sink) @ value
    found = backend.attention(case.query, case.kv, case.batch, case.scores, window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LORA_CASES)
def test_every_row_has_the_delta_of_its_own_adapter(name):
    case = LORA_CASES[name]()
    for layer, group in [(0, case.shape.groups[0]), *((1, group) for group in case.shape.groups)]:
        _, x = case.inputs(group)
        expected = torch.zeros(len(x), sum(group.out_features)).double()
        for row, adapter_slot in enumerate(case.row_adapter_slots):
            parts = expected[row].split(group.out_features)
            for target, part in zip(group.targets, parts, strict=True):
                if adapter_slot >= 0 and (layer, target) in case.blocks[adapter_slot]:
                    a, b = (block.double() for block in case.blocks[adapter_slot][layer, target])
                    part += b @ (a @ x[row].double())
        found = lora_delta(x, case.row_adapter_slots, case.arena, case.table, layer, group)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
