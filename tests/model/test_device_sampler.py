"""The sampler of a GPU, its kernels interpreted; needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lora_kernels.sampling_words import FILTERED, SlotWords, pack_edits

ROOT = Path(__file__).parents[2]
NAMES = (
    "requests_of_every_kind_in_any_dtype",
    "filters_among_ties",
    "filters_wider_than_the_histogram",
    "equal_tokens_are_cut_by_id",
    "a_single_possible_token",
    "broken_logits_still_give_tokens",
    "one_broken_row_is_told_apart",
    "extreme_temperatures",
    "histories_are_counted",
    "stops_are_banned_until_min_tokens",
    "biases_add_up_and_stay_in_the_vocabulary",
    "masked_rows_keep_to_their_masks",
    "masks_are_those_of_their_step",
    "masks_are_stronger_than_biases",
    "logprobs_are_those_of_the_raw_logits",
    "logprobs_of_prompts_are_those_of_a_cpu",
    "a_row_is_the_same_in_any_batch_and_any_tiles",
    "draws_follow_seed_and_position",
    "padding_is_left_alone",
    "tokens_of_a_step_stay_while_the_next_is_sampled",
    "slots_are_taken_and_given_back",
)


@pytest.fixture(scope="module")
def outcomes():
    """Check -> traceback or None, from a process whose kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    worker = Path(__file__).parent / "device_sampler_checks.py"
    done = subprocess.run([sys.executable, worker], env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # after the log


@pytest.mark.parametrize("name", NAMES)
def test_device_sampler(outcomes, name):
    assert outcomes[name] is None, outcomes[name]


def test_every_check_is_run(outcomes):
    assert set(outcomes) == set(NAMES)


def test_words_are_what_kernels_read():
    fields = dict.fromkeys(SlotWords._fields, 0)
    fields |= {"kind": FILTERED, "seed": -3, "temperature": 0.5, "top_p": 1.0, "min_p": 0.25, "seen": 2**63 + 8}
    words = dict(zip(SlotWords._fields, SlotWords(**fields).pack(), strict=True))
    assert words["kind"] == FILTERED
    assert words["seed"] == -3
    assert words["temperature"] == np.float32(0.5).view(np.int32)
    assert words["top_p"] == 2**62
    assert words["min_p"] == 2**60
    assert words["seen"] == 8 - 2**63


def test_edits_carry_a_token_and_its_value():
    edits = pack_edits(np.array([7, 2**17]), np.array([-np.inf, 1.5], dtype=np.float32))
    assert (edits >> 32).tolist() == [7, 2**17]
    assert (edits & 0xFFFFFFFF).astype(np.uint32).view(np.float32).tolist() == [-np.inf, 1.5]
