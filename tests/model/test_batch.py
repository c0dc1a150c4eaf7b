"""A plan's deltas become one step's tensors."""

import pytest
import torch

from engine.core.messages.requests import SamplingParams
from engine.core.messages.step import Admission, ScheduledChunk
from engine.model.batch.rows import UNKNOWN
from engine.model.batch.state import BatchState

BLOCK = 4


@pytest.fixture
def state():
    return BatchState(max_seqs=3, max_model_len=20, block_size=BLOCK)


def admission(name, tokens, pages=(), computed=0):
    return Admission(name, tuple(tokens), len(tokens), computed, tuple(pages), None, SamplingParams())


def chunk(name, start, length, pages=(), samples=True):
    return ScheduledChunk(name, start, length, tuple(pages), samples)


def build(state, chunks):
    return state.gather(chunks).to_device(torch.zeros(3, dtype=torch.int64))


def test_decodes_come_first_and_rows_keep_their_order(state):
    state.admit(admission("long", range(100, 107)), adapter_slot=5)
    state.admit(admission("short", [1, 2, 3, 4, 5], pages=(9, 2), computed=4), adapter_slot=-1)
    batch = build(state, [chunk("long", 0, 6, pages=(7, 3), samples=False), chunk("short", 4, 1)])
    assert batch.token_ids.tolist() == [5, 100, 101, 102, 103, 104, 105]
    assert batch.positions.tolist() == [4, 0, 1, 2, 3, 4, 5]
    assert (batch.sample_ids, batch.sample_rows.tolist()) == (("short",), [0])
    assert batch.segments.rows.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.segments.adapter_slots.tolist() == [5]


def test_attention_reads_and_writes_through_block_tables(state):
    state.admit(admission("long", range(7)), -1)
    state.admit(admission("short", [1, 2, 3, 4, 5], pages=(9, 2), computed=4), -1)
    attention = build(state, [chunk("long", 0, 6, pages=(7, 3)), chunk("short", 4, 1)]).attention
    assert attention.query_starts.tolist() == list(attention.host_query_starts) == [0, 1, 7]
    assert attention.context_lens.tolist() == list(attention.host_context_lens) == [5, 6]
    assert attention.block_tables.tolist() == [[9, 2], [7, 3]]
    assert attention.kv_slots.tolist() == [2 * BLOCK, *range(7 * BLOCK, 8 * BLOCK), 3 * BLOCK, 3 * BLOCK + 1]
    assert (attention.num_decodes, attention.max_query, attention.max_context) == (1, 6, 6)
    assert (attention.kv_slots.dtype, attention.block_tables.dtype) == (torch.int64, torch.int32)


def test_sampled_tokens_are_computed_next(state):
    state.admit(admission("a", [7, 8]), -1)
    build(state, [chunk("a", 0, 2, pages=(1,))])
    state.append("a", 42)
    batch = build(state, [chunk("a", 2, 1)])
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([42], [2])
    assert batch.attention.kv_slots.tolist() == [BLOCK + 2]


def test_a_token_that_is_still_being_chosen_is_taken_from_its_requests_slot(state):
    """Beside a prompt, whose own tokens are known though its slot has a last token, too."""
    state.admit(admission("a", [7, 8]), -1, sampler_slot=2)
    state.admit(admission("b", [5, 6, 7]), -1, sampler_slot=1)
    build(state, [chunk("a", 0, 2, pages=(1,))])
    batch = state.gather([chunk("a", 2, 1), chunk("b", 0, 3, pages=(2,))])
    assert (batch.token_ids.tolist(), batch.sampler_slots.tolist()) == ([UNKNOWN, 5, 6, 7], [2, 1, 1, 1])
    assert batch.to_device(torch.tensor([11, 22, 33])).token_ids.tolist() == [33, 5, 6, 7]
    state.append("a", 42)
    assert build(state, [chunk("a", 2, 1)]).token_ids.tolist() == [42]


def test_a_released_line_starts_afresh(state):
    state.admit(admission("a", range(8), pages=(1, 2)), 4)
    assert state.release("a")
    assert not state.release("a")
    state.admit(admission("b", [5, 6]), -1)
    state.admit(admission("c", range(7)), -1)
    batch = build(state, [chunk("b", 0, 2, pages=(2,)), chunk("c", 0, 7, pages=(1, 3))])
    assert batch.attention.block_tables.tolist() == [[2, 0], [1, 3]]
    assert batch.segments.num_segments == 0
    assert len(state) == 2


def test_impossible_admissions_are_refused(state):
    for name in "abc":
        state.admit(admission(name, [1]), -1)
    with pytest.raises(ValueError, match="d finds every line taken"):
        state.admit(admission("d", [1]), -1)
    state.release("b")
    with pytest.raises(ValueError, match="a runs already"):
        state.admit(admission("a", [1]), -1)


def test_the_last_token_of_the_longest_sequence_is_kept_out(state):
    state.admit(admission("a", range(20)), -1)
    build(state, [chunk("a", 0, 20, pages=(1, 2, 3, 4, 5))])
    state.append("a", 99)
    assert state.num_tokens.tolist() == [20, 0, 0]


def test_only_steps_that_sample_from_every_row_are_decoding(state):
    state.admit(admission("a", [7, 8, 9], pages=(1,), computed=1), -1)
    state.admit(admission("b", [4, 5], pages=(2,), computed=1), -1)
    assert state.gather([chunk("a", 2, 1), chunk("b", 1, 1)]).is_decoding
    assert not state.gather([chunk("a", 1, 1, samples=False), chunk("b", 1, 1)]).is_decoding
    assert not state.gather([chunk("a", 1, 2), chunk("b", 1, 1)]).is_decoding
