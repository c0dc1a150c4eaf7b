"""Result blocks: they alternate, a late reader is told, and what does not fit still arrives."""

import pytest
import torch

from engine.model.batch.results import BLOCKS, ResultBlocks

CPU = torch.device("cpu")


def test_results_stay_until_their_block_is_taken_again():
    blocks, steps = ResultBlocks(64, CPU), []
    for step in range(BLOCKS):
        results = blocks.begin()
        ids, scores = torch.full((3,), step), torch.full((2, 2), step / 2)
        steps.append((results, results.download(ids), results.download(scores), ids, scores))
    for results, host_ids, host_scores, ids, scores in steps:
        results.check()
        assert torch.equal(host_ids, ids) and torch.equal(host_scores, scores)
    memory = {host_ids.data_ptr() for _, host_ids, *_ in steps}
    later = blocks.begin().download(torch.full((3,), 99))
    assert len(memory) == BLOCKS and later.data_ptr() in memory, "no step has memory of its own"
    with pytest.raises(RuntimeError, match="read after 4 later steps have begun"):
        steps[0][0].check()
    steps[1][0].check()


def test_kernels_store_into_a_block_beside_what_is_copied_there():
    results = ResultBlocks(48, CPU).begin()
    stored, copied = results.take(3, torch.int64), results.download(torch.arange(2))
    stored.fill_(7)
    assert stored.tolist() == [7, 7, 7] and copied.tolist() == [0, 1]
    assert (stored.data_ptr() - copied.data_ptr()) % 16 == 0, "one kernel serves all of its addresses"
    with pytest.raises(ValueError, match=r"a block of 48 bytes has no room for 1 numbers of torch\.int64"):
        results.take(1, torch.int64)


def test_what_does_not_fit_into_a_block_arrives_all_the_same():
    results = ResultBlocks(40, CPU).begin()
    large, small = torch.arange(100), torch.arange(3)
    assert torch.equal(results.download(large), large) and torch.equal(results.download(small), small)
    assert torch.equal(results.download(small), small), "the rest of the block is too small for a second one"
