"""Writes English texts from a seed, as prompts for servers that take texts and not token ids."""

from __future__ import annotations

from random import Random

WORDS_PER_TOKEN = 0.915
"""Words of these texts in a token, measured with the tokenizer of SmolLM2."""
WHO = "the engineer, a teacher, our neighbour, the captain, my sister, the committee, a young doctor, the old gardener"
DID = "described, repaired, compared, painted, remembered, questioned, measured, carried, translated, observed"
WHAT = "the bridge, a broken clock, three letters, the northern road, an unusual recipe, the harvest, a map of the city"
WHERE = "near the river, after the meeting, in the library, before winter, at the market, without any help, on the ship"
WHY = "because nothing else had worked, and the others agreed, although it was late, while it rained, so we waited"
ASK = "Summarize this, What happened next, Explain the reasons, Write a reply, List the main points, Continue the story"
PARTS = tuple(tuple(words.split(", ")) for words in (WHO, DID, WHAT, WHERE, WHY))


def write_text(tokens: int, rng: Random) -> str:
    """Return sentences of about so many tokens, which `rng` chooses."""
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
