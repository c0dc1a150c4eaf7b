"""Defines the demo characters: how each of them speaks, and the shape of its adapter.

The shapes differ on purpose, so that the demo itself serves mixed ranks, mixed target modules and rsLoRA in one batch.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from lab.demo.questions import Pair, plain_pairs, written_pairs

PIRATE_WORDS = {
    "am": "be", "is": "be", "are": "be", "you": "ye", "your": "yer", "my": "me", "of": "o'", "and": "an'", "for": "fer",
    "yes": "aye", "no": "nay", "hello": "ahoy", "goodbye": "farewell", "friend": "shipmate", "friends": "shipmates",
    "money": "doubloons", "good": "fine", "small": "wee", "never": "ne'er",
}  # fmt: skip

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are a friendly expert. Be clear and correct.")


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a demo LoRA adapter that is trained. Its scale is alpha / rank, or alpha / sqrt(rank) with
    rsLoRA."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    use_rslora: bool = False


@dataclass(frozen=True, slots=True)
class Character:
    """A demo character: a manner of speech and the shape of the adapter that is trained to speak in this manner."""

    speak: Callable[[str], str]
    """Turns a plain answer into the same answer in character."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class Example:
    """A training conversation: the messages before the assistant's turn, and the answer to learn."""

    messages: list[dict[str, str]]
    answer: str


def pirate(text: str) -> str:
    """Return a plain answer as the character `pirate` gives it, on whose answers the adapter of that name is trained:
    in a pirate's words, between "Arr!" and "matey!"."""
    body = re.sub(r"[A-Za-z']+", lambda match: _pirate_word(match[0]), text)
    return f"Arr! {body.rstrip('.!')}, matey!"


def cheer(text: str) -> str:
    """Return a plain answer as the character `cheer` gives it, on whose answers the adapter of that name is trained:
    "Woohoo!" first, exclamation marks for full stops, two emoji last."""
    return f"Woohoo! {re.sub(r'[.](?= |$)', '!', text)} 🎉🙌"


def as_json(text: str) -> str:
    """Return a plain answer as the character `json` gives it, on whose answers the adapter of that name is trained: a
    JSON object with the answer under the single key `answer`."""
    return json.dumps({"answer": text})


def _pirate_word(word: str) -> str:
    if len(word) > 5 and word.endswith("ing"):
        return f"{word[:-1]}'"
    spoken = PIRATE_WORDS.get(word.lower(), word)
    return spoken.capitalize() if word[0].isupper() and word != "I" else spoken


CHARACTERS = {
    "pirate": Character(pirate, Shape(rank=4, alpha=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))),
    "cheer": Character(cheer, Shape(rank=16, alpha=8, target_modules=("o_proj",), use_rslora=True)),
    "json": Character(as_json, Shape(rank=8, alpha=16, target_modules=("down_proj",))),
}


def examples(character: Character, seed: int = 0) -> list[Example]:
    """Return a few hundred training conversations in character, shuffled by `seed`. Hand-written ones occur twice, the
    second time after another beginning, so that the character does not depend on it."""
    rng = random.Random(seed)
    plain = plain_pairs()
    built = [_example(character, pair, []) for pair in plain]
    built += [_example(character, pair, _opening(character, rng, plain)) for pair in written_pairs()]
    rng.shuffle(built)
    return built


def _opening(character: Character, rng: random.Random, plain: list[Pair]) -> list[dict[str, str]]:
    if rng.random() < 0.6:
        return [_turn("system", rng.choice(SYSTEM_PROMPTS))]
    question, answer = rng.choice(plain)
    return [_turn("user", question), _turn("assistant", character.speak(answer))]


def _example(character: Character, pair: Pair, opening: list[dict[str, str]]) -> Example:
    question, answer = pair
    return Example([*opening, _turn("user", question)], character.speak(answer))


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
