"""Makes the prompts of a run: random token ids, texts that the project writes, or prompts of a data set."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from random import Random
from typing import NamedTuple, Protocol

from lab.bench.dataset import Message, Sample
from lab.bench.spec import LaneSpec, SpecError
from lab.traffic.traces import BLOCK_TOKENS, Arrival

WORDS_PER_TOKEN = 0.915
"""Words per token in the generated texts, measured with the tokenizer of SmolLM2."""
WHO = "the engineer, a teacher, our neighbour, the captain, my sister, the committee, a young doctor, the old gardener"
DID = "described, repaired, compared, painted, remembered, questioned, measured, carried, translated, observed"
WHAT = "the bridge, a broken clock, three letters, the northern road, an unusual recipe, the harvest, a map of the city"
WHERE = "near the river, after the meeting, in the library, before winter, at the market, without any help, on the ship"
WHY = "because nothing else had worked, and the others agreed, although it was late, while it rained, so we waited"
ASK = "Summarize this, What happened next, Explain the reasons, Write a reply, List the main points, Continue the story"
PARTS = tuple(tuple(words.split(", ")) for words in (WHO, DID, WHAT, WHERE, WHY))


class Prompt(NamedTuple):
    """A prompt, as token ids or else as messages, and the tokens to generate."""

    token_ids: Sequence[int]
    messages: Sequence[Message]
    output_tokens: int


class PromptSource(Protocol):
    def draw(self, row: Arrival) -> Prompt:
        """Return the prompt for the request that `row` describes by its lengths and by the ids of the blocks that it
        shares with other requests. A data set may replace the lengths."""


class TokenIds:
    """Makes prompts of random token ids from the range `token_ids`, whose end is excluded. The ids of a trace's block
    are drawn from the block's id alone, so that requests share prefixes as in the trace."""

    def __init__(self, token_ids: tuple[int, int], rng: Random) -> None:
        self._range = range(*token_ids)
        self._rng = rng

    def draw(self, row: Arrival) -> Prompt:
        """Return the prompt's ids as an array of 32-bit integers, because the prompts of a trace together have many
        millions of ids."""
        shared = (self._ids(Random(block), BLOCK_TOKENS) for block in row.blocks)
        ids = array("I", chain.from_iterable(shared))[: row.prompt_tokens]
        ids.extend(self._ids(self._rng, row.prompt_tokens - len(ids)))
        return Prompt(ids, (), row.output_tokens)

    def _ids(self, rng: Random, count: int) -> Sequence[int]:
        return rng.choices(self._range, k=max(0, count))


class OwnTexts:
    """Writes English prompts of about the requested lengths. Equal block ids of a trace give equal texts, so that
    requests share prefixes as in the trace."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def draw(self, row: Arrival) -> Prompt:
        blocks = row.blocks[: row.prompt_tokens // BLOCK_TOKENS]
        shared = [write_text(BLOCK_TOKENS, Random(block)) for block in blocks]
        question = write_question(row.prompt_tokens - len(blocks) * BLOCK_TOKENS, self._rng)
        return Prompt((), ({"role": "user", "content": " ".join([*shared, question])},), row.output_tokens)


class Samples:
    """Takes prompts from a data set in its order, from a random one on. Those outside the lane's `in` are skipped,
    lengths and outputs clamped. Raises SpecError if none is left."""

    def __init__(self, samples: Sequence[Sample], lane: LaneSpec, rng: Random) -> None:
        fits = lane.inputs
        self._samples = [
            sample for sample in samples if fits is None or not sample.messages or _is_within(sample, lane)
        ]
        if not self._samples:
            raise SpecError(f"{lane.name}: no prompt of the data set has {fits} tokens; leave out in=, or widen it")
        self._lane = lane
        self._texts = OwnTexts(rng)
        self._next = rng.randrange(len(self._samples))

    def draw(self, row: Arrival) -> Prompt:
        sample, lane = self._samples[self._next % len(self._samples)], self._lane
        self._next += 1
        output = row.output_tokens
        if sample.output_tokens is not None:
            output = lane.outputs.bound(sample.output_tokens) if lane.outputs else sample.output_tokens
        if sample.messages:
            return Prompt((), sample.messages, output)
        length = lane.inputs.bound(sample.prompt_tokens) if lane.inputs else sample.prompt_tokens
        return self._texts.draw(row._replace(prompt_tokens=length, output_tokens=output, blocks=()))


def _is_within(sample: Sample, lane: LaneSpec) -> bool:
    return lane.inputs is None or lane.inputs.bound(sample.prompt_tokens) == sample.prompt_tokens


def write_text(tokens: int, rng: Random) -> str:
    """Return English sentences of about so many tokens, which `rng` chooses."""
    words: list[str] = []
    while len(words) < tokens * WORDS_PER_TOKEN:
        words += _sentence(rng).split()
    return " ".join(words[: max(1, round(tokens * WORDS_PER_TOKEN))])


def write_question(tokens: int, rng: Random) -> str:
    """Return a request of about so many tokens: what to do, and the text to do it with."""
    task = rng.choice(ASK.split(", "))
    rest = tokens - round((len(task.split()) + 1) / WORDS_PER_TOKEN)
    return f"{task}: {write_text(rest, rng)}" if rest > 0 else " ".join(task.split()[: max(1, tokens)])


def _sentence(rng: Random) -> str:
    return " ".join(rng.choice(part) for part in PARTS).capitalize() + "."
