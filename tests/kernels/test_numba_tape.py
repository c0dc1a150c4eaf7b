"""Recorded kernels: a tape says of new input what the same calls would say."""

from threading import Thread

import pytest
import torch
from kernel_cases import attention_case, lora_case

from lora_kernels.cpu.numba_attention_plan import AttentionForm, plan_attention
from lora_kernels.cpu.numba_backend import NumbaBackend
from lora_kernels.cpu.numba_tape import Workspace, record
from lora_kernels.cpu.openmp import team

WIDTH, EPS = 64, 1e-5


@pytest.fixture(scope="module")
def backend():
    return NumbaBackend()


@pytest.fixture(params=["one thread", "a team", "no team to be had"])
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.param == "one thread" else 2)
    if request.param == "no team to be had":
        monkeypatch.setattr(team(), "is_parallel", False)
    yield
    torch.set_num_threads(before)


def chain(backend, x, weight, times=40):
    """Each kernel reads what the one before has written."""
    out = x
    for _ in range(times):
        out = backend.pointwise.add_norm(out, backend.pointwise.add_norm(out, None, weight, EPS), weight, EPS)
    return out


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_it_says_of_new_input_what_the_calls_say(backend, rows):
    first, second = torch.randn(2, rows, WIDTH)
    weight, x = torch.randn(WIDTH), first.clone()
    tape, out = record(lambda: chain(backend, x, weight), Workspace())
    assert torch.equal(out, chain(backend, first.clone(), weight)), "what is recorded is computed all the same"
    for new in (second, first, second):
        x.copy_(new)
        tape.play()
        assert torch.equal(out, chain(backend, new.clone(), weight))


@pytest.mark.usefixtures("threads")
def test_attention_follows_the_step(backend):
    """Recorded with one context, played with others, which are other items and other pages."""
    first, *others = (attention_case([(1, context), (1, 5)]) for context in (100, 3, 40))
    query, kv = first.query.clone(), first.kv.clone()
    tape, out = record(lambda: backend.attention(query, kv, first.batch, first.scores), Workspace())
    for case in (*others, first):
        pages = min(len(kv), len(case.kv))
        kv[:pages] = case.kv[:pages]
        backend.write_kv(kv, case.key, case.value, case.batch)
        query.copy_(case.query)
        backend.renew(tape, case.batch, None)
        tape.play()
        assert torch.equal(out, backend.attention(query, kv, case.batch, case.scores))


@pytest.mark.usefixtures("threads")
def test_lora_follows_the_step(backend):
    """Recorded while one adapter is used, played while others of other ranks are, and rows of none."""
    ranks, mixes = [8, 17, 3], ([0, 0, 0, 0], [2, 1, 0, 1], [-1, 1, -1, 2], [0, -1, -1, -1])
    cases = [lora_case(ranks, mix) for mix in mixes]
    group = cases[0].shape.groups[2]
    arena, table = cases[0].arena, cases[0].table
    out, x = cases[0].inputs(group)
    base, prepared = out.clone(), backend.prepare_lora(arena, table, cases[0].plan)
    tape, _ = record(lambda: backend.add_lora(out, x, prepared, 1, group), Workspace())
    for case in (*cases[1:], cases[0]):
        prepared = backend.prepare_lora(arena, table, case.plan)
        backend.renew(tape, attention_case([(1, 1)]).batch, prepared)
        out.copy_(base)
        tape.play()
        expected = base.clone()
        backend.add_lora(expected, x, prepared, 1, group)
        assert torch.equal(out, expected) and not torch.equal(out, base)


def test_memory_is_used_again_once_no_tensor_holds_it():
    workspace = Workspace()
    first = workspace.empty((4, 8), torch.float32)
    address, view = first.data_ptr(), first[1:].view(-1)
    second = workspace.empty((4, 8), torch.float32)
    assert second.data_ptr() != address, "it is held"
    del first
    assert workspace.empty((4, 8), torch.float32).data_ptr() != address, "a view of it is held"
    del view
    smaller = workspace.empty((3, 8), torch.bfloat16)
    assert smaller.data_ptr() == address and smaller.shape == (3, 8) and smaller.dtype == torch.bfloat16


def test_what_is_let_go_is_used_again():
    workspace = Workspace()
    tensor = workspace.empty((4, 8), torch.float32).fill_(3)
    tensor = workspace.let_go(tensor)
    assert tensor.shape == (4, 8) and (tensor == 3).all()
    workspace.empty((4, 8), torch.float32).fill_(5)
    assert (tensor == 5).all()


def test_steps_that_grow_row_by_row_use_the_same_memory():
    workspace, widths = Workspace(), (960, 576, 3072, 49152)
    for rows in range(1, 65):
        held = [workspace.empty((rows, width), torch.bfloat16) for width in widths]
        del held
    assert workspace.num_bytes < 4 * 2 * 64 * sum(widths)


def test_only_what_its_own_thread_runs_is_recorded(backend):
    weight, x = torch.randn(WIDTH), torch.randn(3, WIDTH)

    def compute():
        other = Thread(target=chain, args=(backend, x.clone(), weight))
        other.start()
        other.join()
        backend.pointwise.add_norm(x, None, weight, EPS)

    assert record(compute, Workspace())[0].num_calls == 1


def test_nothing_is_recorded_after_a_failure(backend):
    weight, x, seen = torch.randn(WIDTH), torch.randn(3, WIDTH), Workspace()

    def fail():
        chain(backend, x.clone(), weight)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record(fail, seen)
    before = seen.num_bytes
    held = [chain(backend, x.clone(), weight, times=1) for _ in range(20)]
    assert len(held) == 20 and seen.num_bytes == before


LAYERS_OWN = {"item", "thread", "query", "query_row", "query_head", "out", "out_row", "kv", "x", "x_row"} | {
    "ranks",
    "offsets",
    "sinks",
}
"""Fields that are each layer's own, and stay what they were when a step was recorded."""


def differing(one, other):
    return {name for name, _ in one._fields_ if getattr(one, name) != getattr(other, name)} - LAYERS_OWN


def test_all_that_steps_plan_is_renewed(backend):
    """A field that differs between two steps' plans, and is not in `of_step`, would be an old step's on a tape."""
    cases = [attention_case([(1, 100), (1, 5)]), attention_case([(1, 7)] * 9)]
    kv = cases[0].kv
    form = AttentionForm(cases[0].query.shape[1], kv.shape, kv.stride(), 4, cases[0].scores.scale, None, None)
    one, other = [plan_attention(form, case.batch) for case in cases]  # both are kept: nothing is where another was
    assert {"items", "tables", "scratch"} <= differing(one.block, other.block) <= set(one.block.of_step)
    loras = [lora_case([8, 17, 3], mix) for mix in ([0, 0, 0, 0], [2, 1, 0, 1] * 8)]
    plans = [backend.prepare_lora(loras[0].arena, loras[0].table, case.plan) for case in loras]
    for group in loras[0].shape.groups:
        one, other = [prepared.plan(group).block for prepared in plans]
        assert {"num_items", "tiles", "rows"} <= differing(one, other) <= set(one.of_step)
