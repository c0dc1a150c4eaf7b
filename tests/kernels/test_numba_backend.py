"""The numba backend against the reference, and against torch where it only has to be the same."""

import dataclasses

import numpy as np
import pytest
import torch
from backend_checks import CHECKS, run_attention, run_lora
from kernel_cases import attention_case, lora_case

from lora_kernels import reference, select
from lora_kernels.cpu.numba_backend import NumbaBackend
from lora_kernels.cpu.numba_lora import cut_tiles
from lora_kernels.pointwise import BoundedSwiglu, TorchPointwise
from lora_kernels.segments import plan_segments

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def backend():
    return NumbaBackend()


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CHECKS)
def test_backend(backend, name):
    CHECKS[name](backend)


@pytest.mark.parametrize("rows", [2, 5, 15, 16, 17, 33, 64, 100])
@pytest.mark.parametrize("before", [0, 1, 49, 55, 64, 100, 127])
def test_chunks_that_cross_a_tile_of_the_context(backend, rows, before):
    """Rows of one item may lie before and behind a boundary; those before it see nothing of the tile behind."""
    case = attention_case([(rows, rows + before)], heads=9, kv_heads=3, head_dim=64)
    expected = reference.attention(case.query, run_written(backend, case), case.batch, case.scores)
    torch.testing.assert_close(run_attention(backend, case), expected, rtol=1e-4, atol=1e-5)


def run_written(backend, case):
    """The case's KV with this step's rows in it."""
    kv = case.kv.clone()
    backend.write_kv(kv, case.key, case.value, case.batch)
    return kv


def test_deltas_are_added_to_outputs_that_ranks_sum(backend):
    case = lora_case([8, 17, 3], [0, 1, 2, 2, 1, -1], dtype=torch.bfloat16)
    group = case.shape.groups[0]
    out, x = case.inputs(group)
    delta = reference.lora_delta(x, case.row_adapter_slots, case.arena, case.table, 1, group)
    added = run_lora(backend, case, out.float(), x, 1, group)
    torch.testing.assert_close(added, out.float() + delta, rtol=1e-3, atol=1e-3)


def test_one_thread_computes_what_a_team_does(backend, two_threads):
    case = attention_case([(1, 33), (20, 27), (1, 2), (3, 3), (1, 16)])
    lora = lora_case([8, 17, 3], [0, 1, 2, 2, 1, 1, 1, 1, 1])
    out, x = lora.inputs(lora.shape.groups[0])
    together = run_attention(backend, case), run_lora(backend, lora, out, x, 0, lora.shape.groups[0])
    torch.set_num_threads(1)
    alone = run_attention(backend, case), run_lora(backend, lora, out, x, 0, lora.shape.groups[0])
    assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoding_row_keeps_its_bits_among_others(backend, dtype):
    crowd = attention_case([(1, 200)] * 12 + [(5, 9)], dtype=dtype)
    among = run_attention(backend, crowd)
    batch = dataclasses.replace(
        crowd.batch,
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=crowd.batch.context_lens[3:4],
        block_tables=crowd.batch.block_tables[3:4],
        num_decodes=1,
        max_query=1,
        host_query_starts=(0, 1),
        host_context_lens=(200,),
    )
    assert torch.equal(backend.attention(crowd.query[3:4], crowd.kv, batch, crowd.scores), among[3:4])


def test_a_lora_row_keeps_its_bits_among_others(backend):
    adapter_slots = [0, 1, 0, 0, 1, 0, 0, 2]
    crowd, alone = (lora_case([8, 33, 3], rows, dtype=torch.bfloat16) for rows in (adapter_slots, [0]))
    for group in crowd.shape.groups:
        out, x = crowd.inputs(group)
        among = run_lora(backend, crowd, out, x, 1, group)
        assert torch.equal(run_lora(backend, alone, out[3:4], x[3:4], 1, group), among[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 49])
def test_norm_is_torchs(backend, dtype, width):
    """But for a unit in the last place of the norm, or of its product with the weight: both are rounded."""
    x, delta, weight = (torch.randn(7, width).to(dtype) for _ in range(3))
    theirs, plain = x.clone(), TorchPointwise()
    for step in (delta, None):
        expected = plain.add_norm(theirs, step, weight[0], 1e-5)
        found = backend.pointwise.add_norm(x, step, weight[0], 1e-5)
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        assert torch.equal(x, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_torchs(backend, dtype):
    angles = torch.randn(5, 1, 40)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    fused = torch.randn(5, 6, 80).to(dtype)
    ours, theirs = fused[:, 1:4], fused[:, 1:4].clone()
    backend.pointwise.rotate(ours, cos, sin)
    TorchPointwise().rotate(theirs, cos, sin)
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(theirs, torch.zeros_like(theirs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_torchs(backend, dtype):
    gate_up = torch.randn(9, 2 * 49).to(dtype) * 4
    gate_up[0, :5] = torch.tensor([-200.0, 200.0, 0.0, -88.0, 88.0])
    gate_up[1, 0] = float("nan")
    expected = TorchPointwise().swiglu(gate_up)
    torch.testing.assert_close(backend.pointwise.swiglu(gate_up), expected, equal_nan=True)
    bounds = BoundedSwiglu(limit=7.0, slope=1.702)
    expected = TorchPointwise().bounded_swiglu(gate_up, bounds)
    torch.testing.assert_close(backend.pointwise.bounded_swiglu(gate_up, bounds), expected, equal_nan=True)


def test_kernels_are_compiled_before_they_are_needed():
    told = []
    backend = select.select_backend(torch.device("cpu"), torch.float32, lambda *news: told.append(news))
    assert backend.name.startswith("numba")
    assert told == [(done, 8) for done in range(9)]


def test_tiles_hold_every_row_once_and_high_ranks_come_first() -> None:
    ranks = np.array([4, 64, 8], dtype=np.int32)
    plan = plan_segments(np.array([0, 1, 0, 0, 2, 0, -1, 0, 1], dtype=np.int32))
    tiles = cut_tiles(plan, ranks)
    assert tiles[:, [0, 2]].tolist() == [[1, 2], [2, 1], [0, 4], [0, 1]]
    rows = [row for _, first, count in tiles for row in plan.rows[first : first + count].tolist()]
    assert rows == [1, 8, 4, 0, 2, 3, 5, 7]
