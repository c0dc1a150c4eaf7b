"""A draft model's guesses change no answer: real models in fp32, base and adapters, greedy and seeded."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from test_preemption import BIG_CORE, HOST_PAGES, Arrival, Schedule, compare, run
from test_proposals import SCHEDULE, adapter_folders, everything, plain  # noqa: F401
from tiny_adapters import save_adapter
from tiny_llama import save_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.config import EngineConfig, Speculation
from engine.core.config import Scheduling
from engine.core.messages.requests import Request, SamplingParams
from engine.core.plan import draft_asks, proposals
from engine.core.plan.draft_asks import Wanted
from engine.core.speculate.proposer import Guess, PromptLookup
from engine.model.runner.loading import load
from engine.model.runner.model_runner import ModelRunner
from engine.model.spec.config import read_spec
from engine.model.spec.draft import find_draft
from engine.serve.explain import explain

DRAFT_BLOCK = 4
TIGHT = {"num_pages": 70, "max_seqs": 4, "host_pages": HOST_PAGES, "scheduling": Scheduling(preemption="swap")}


@pytest.fixture(scope="module")
def other_llama(tmp_path_factory):
    """Return the folder of a model that guesses hardly any token of `tiny_llama`."""
    folder = tmp_path_factory.mktemp("other")
    save_llama(folder, 97, 128, seed=1)
    return folder


def drafted(model, draft, folders, schedule, core):
    """Run a schedule with four guesses for every sequence, all of which are verified, and no others."""
    core = replace(core, speculation=True, draft_block=DRAFT_BLOCK)
    with (
        patch.object(draft_asks, "_worthwhile", lambda state, candidates, *_: list(map(four, candidates))),
        patch.object(
            proposals, "_worthwhile", lambda state, guesses, *_: {s: len(g.tokens) for s, g in guesses.items()}
        ),
        patch.object(PromptLookup, "propose", lambda *_: Guess()),
    ):
        return run(model, folders, schedule, core, speculation=Speculation(draft))


def four(candidate):
    return Wanted(candidate, min(9, candidate.missing), min(4, candidate.most))


@pytest.mark.parametrize("sizes", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("kind", ["equal", "other"])
def test_answers_are_the_same_with_a_draft_model(kind, sizes, plain, tiny_llama, other_llama, adapter_folders):  # noqa: F811
    draft = tiny_llama if kind == "equal" else other_llama
    streams, counters = drafted(tiny_llama, draft, adapter_folders, SCHEDULE, replace(BIG_CORE, **sizes))
    assert (counters.preemptions > 0) == bool(sizes)
    assert counters.proposed_tokens > 50
    found = compare(SCHEDULE, plain, streams)
    assert found["decided"] > 0.6 * found["tokens"]


def greedy(number):
    params = SamplingParams(30, temperature=0.0, seed=number, ignore_eos=True, logprobs=2)
    return Request(f"r{number}", tuple(range(5 + number, 5 + 5 * number)), params)


def test_a_model_that_equals_the_large_one_is_right(tiny_llama, other_llama):
    schedule = Schedule(tuple(Arrival(number, greedy(number)) for number in range(2, 6)), 0, 0, 0, 0, True)
    _, counters = drafted(tiny_llama, tiny_llama, {}, schedule, BIG_CORE)
    assert counters.accepted_tokens > 0.95 * counters.proposed_tokens
    assert counters.steps < 20
    _, counters = drafted(tiny_llama, other_llama, {}, schedule, BIG_CORE)
    assert counters.accepted_tokens < 0.1 * counters.proposed_tokens


def test_an_eos_token_that_ends_nothing_ends_no_drafting(tiny_llama):
    """The step after which nothing is guessed has pages for the next ones."""
    params = SamplingParams(60, temperature=0.9, seed=5, logit_bias=((2, 4.0),), ignore_eos=True, logprobs=97)
    schedule = Schedule((Arrival(0, Request("r", (5, 9, 17), params)),), 0, 0, 0, 0, True)
    expected, _ = run(tiny_llama, {}, schedule, BIG_CORE)
    streams, counters = drafted(tiny_llama, tiny_llama, {}, schedule, BIG_CORE)
    tokens = [token for token, _ in expected["r"]]
    assert 5 < tokens.count(2) < 55
    assert [token for token, _ in streams["r"]] == tokens
    assert counters.proposed_tokens > 20


@pytest.fixture
def paired(tmp_path):
    """Return the folders of two adapters, the same but for that the first has a part for the draft model, too."""
    folders = {"paired": tmp_path / "paired", "single": tmp_path / "single"}
    for folder in folders.values():
        save_adapter(folder, 4, seed=7)
    save_adapter(folders["paired"] / "draft", 4, seed=7)
    return folders


def test_an_adapters_part_for_the_draft_model_guesses_for_its_requests(tiny_llama, paired):
    shares = {}
    for name in paired:
        asked = [greedy(number)._replace(adapter_hash=(name, None)[number % 2]) for number in range(2, 6)]
        schedule = Schedule(tuple(Arrival(0, request) for request in asked), 0, 0, 0, 0, True)
        expected, _ = run(tiny_llama, paired, schedule, BIG_CORE)
        streams, counters = drafted(tiny_llama, tiny_llama, paired, schedule, BIG_CORE)
        compare(schedule, expected, streams)
        shares[name] = counters.accepted_tokens / counters.proposed_tokens
    assert shares["paired"] > 0.95
    assert shares["single"] < 0.8


def test_adapters_with_parts_for_the_draft_model_make_way_for_each_other(tiny_llama, paired):
    names = ("paired", "single", None)
    asked = [greedy(number)._replace(adapter_hash=names[number % 3]) for number in range(2, 8)]
    schedule = Schedule(tuple(Arrival(14 * place, one) for place, one in enumerate(asked)), 0, 0, 0, 0, True)
    expected, _ = run(tiny_llama, paired, schedule, BIG_CORE)
    streams, counters = drafted(
        tiny_llama, tiny_llama, paired, schedule, replace(BIG_CORE, max_resident_adapters=1, host_adapter_bytes=10**5)
    )
    compare(schedule, expected, streams)
    assert counters.adapters.evictions > 1


def test_an_adapter_is_its_part_for_the_draft_model_too(tiny_llama, paired):
    """It has pages and a hash of its own, which do not say whether the engine has a draft model."""
    drafting = config(tiny_llama, tiny_llama)
    engines = [ModelRunner(load(each)) for each in (drafting, replace(drafting, speculation="auto"))]
    found = [
        {name: engine.load_host(str(folder), lambda host: False) for name, folder in paired.items()}
        for engine in engines
    ]
    assert found[0]["paired"].num_pages == 2 * found[0]["single"].num_pages
    assert found[0]["paired"].num_bytes == 2 * found[0]["single"].num_bytes
    assert found[1]["paired"].num_pages == found[1]["single"].num_pages
    for host, other in zip(found[0].values(), found[1].values(), strict=True):
        assert host.adapter_hash == other.adapter_hash
    assert len({host.adapter_hash for host in found[0].values()}) == 2
    (paired["single"] / "draft").symlink_to(paired["paired"] / "draft")
    with pytest.raises(ValueError, match=r"draft is a link that leaves the adapter's folder"):
        engines[0].load_host(str(paired["single"]), lambda host: False)
    weights = paired["paired"] / "draft" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ValueError, match="its adapter of the draft model cannot be served"):
        engines[0].load_host(str(paired["paired"]), lambda host: False)


def test_the_engine_chooses_by_what_it_measures(tiny_llama):
    """Nothing is patched: what is drafted depends on the machine, and the answer does not."""
    request = Request("r", (5, 9, 17), SamplingParams(100, temperature=0.0, ignore_eos=True, logprobs=2))
    schedule = Schedule((Arrival(0, request),), 0, 0, 0, 0, True)
    expected, _ = run(tiny_llama, {}, schedule, BIG_CORE)
    core = replace(BIG_CORE, speculation=True, draft_block=DRAFT_BLOCK)
    streams, _ = run(tiny_llama, {}, schedule, core, speculation=Speculation(tiny_llama))
    compare(schedule, expected, streams)


def save_tokenizer(folder, tokens):
    Tokenizer(WordLevel({token: number for number, token in enumerate(tokens)}, unk_token=tokens[0])).save(
        str(folder / "tokenizer.json")
    )


def config(model, draft, **options):
    speculation = Speculation(draft)
    return EngineConfig(str(model), dtype="float32", device="cpu", num_pages=20, speculation=speculation, **options)


def test_a_draft_model_that_cannot_guess_is_refused_by_name(tmp_path):
    model, draft, empty = (tmp_path / name for name in ("model", "draft", "empty"))
    save_llama(model, 97, 128)
    save_llama(draft, 98, 128)
    empty.mkdir()
    with pytest.raises(ValueError, match=r"engine.speculation.draft_model: .*empty has no config.json"):
        ModelRunner(load(config(model, empty)))
    with pytest.raises(ValueError, match=r"draft_model .*draft has not the vocabulary .* 98 tokens in place of 97"):
        ModelRunner(load(config(model, draft)))
    with pytest.raises(ValueError, match=r"draft_model is for a CPU, not for cuda: remove it"):
        find_draft(config(model, model), read_spec(model), torch.device("cuda"))
    save_tokenizer(model, ["a", "b", "c"])
    save_tokenizer(draft, ["a", "c", "b"])
    with pytest.raises(ValueError, match=r"'[bc]': number [12] in place of [12]"):
        explain(config(model, draft))
    save_tokenizer(draft, ["a", "b", "c"])
    found = explain(config(model, draft))
    assert found["draft_block"] == 16
    assert found["draft_bytes"] > found["weight_bytes"] > 0


def test_a_page_must_hold_a_token_of_the_draft_model(tiny_llama, tmp_path):
    save_llama(tmp_path, 97, 128, num_hidden_layers=40)
    with pytest.raises(ValueError, match=r"2560 numbers of KV a token, .* room for 2048"):
        explain(config(tiny_llama, tmp_path))
