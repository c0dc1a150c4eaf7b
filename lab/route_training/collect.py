"""Collects what a router is trained with: features and labels of examples, some of which a gateway is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from rich.progress import Progress

from gateway.virtual_models import acceptance
from gateway.virtual_models.acceptance import HeldAnswer
from gateway.virtual_models.features import text_features
from lab.route_training.asking import Asker, gather_all
from lab.route_training.examples import Example, Json, Label, unlabelled
from lab.route_training.fit import Bools, Floats

Message = Mapping[str, Any]


class Training(Struct, frozen=True):
    """What training knows: features by prompt, [n, num_features], and the scores of both answers, [n] each."""

    rows: Floats
    small: Floats
    large: Floats

    @property
    def suffices(self) -> Bools:
        return self.small >= self.large


class Collecting:
    """Makes features and labels of examples, with progress bars, asking a gateway for what the examples lack."""

    def __init__(
        self,
        examples: Sequence[Example],
        members: tuple[str, str],
        source: tuple[str, str] | None,
        bars: Progress,
        verify: Any = True,
    ) -> None:
        """
        Args:
            members: names of the small and of the large member.
            source: the embedding model and its pooling, for the vectors of the prompts; None means that the features
                are those of the text alone.
            bars: gets a progress bar for each kind of requests.
            verify: certificates that are trusted, as httpx takes them.
        """
        self._examples = examples
        self._members = members
        self._source = source
        self._bars = bars
        self._verify = verify
        self._labels = {number: example.label for number, example in enumerate(examples) if example.label is not None}
        self._answers: dict[int, tuple[Json, Json]] = {}

    async def collect(self, url: str, key: str) -> Training:
        """Return the features and scores of all examples, after asking the gateway for the labels and vectors that they
        lack. Raises AskError if the gateway cannot be reached or refuses a request."""
        missing = list(unlabelled(self._examples))
        rows = np.array([text_features(example.facts) for example in self._examples])
        if missing or self._source is not None:
            async with Asker.open(url, key, self._verify) as asker:
                await self._ask_members(asker, missing)
                rows = await self._with_vectors(asker, rows)
        labels = [self._labels[number] for number in range(len(self._examples))]
        return Training(rows, np.array([label.small for label in labels]), np.array([label.large for label in labels]))

    def lines(self) -> Iterator[Json]:
        """Yield each example as a line of a training file, with its label and the answers that were compared."""
        for number, example in enumerate(self._examples):
            label = self._labels[number]
            line = {"body": example.body, "small_score": label.small, "large_score": label.large}
            if number in self._answers:
                line["small_answer"], line["large_answer"] = self._answers[number]
            yield line

    async def _ask_members(self, asker: Asker, missing: Sequence[int]) -> None:
        if not missing:
            return
        task = self._bars.add_task("asking both members", total=len(missing))

        async def ask_both(number: int) -> tuple[Json, Json]:
            small, large = [await asker.answer(self._examples[number], member) for member in self._members]
            return small, large

        self._answers = await gather_all(ask_both, missing, lambda: self._bars.advance(task))
        for number, (small, large) in self._answers.items():
            self._labels[number] = Label(float(agree(small, large)), 1.0)

    async def _with_vectors(self, asker: Asker, rows: Floats) -> Floats:
        if self._source is None:
            return rows
        model, pooling = self._source
        task = self._bars.add_task("vectors of prompts", total=len(rows))
        vectors = await gather_all(
            lambda number: asker.vector(self._examples[number], model, pooling),
            range(len(rows)),
            lambda: self._bars.advance(task),
        )
        return np.hstack((rows, np.array([vectors[number] for number in range(len(rows))])))


def agree(small: Message, large: Message) -> bool:
    """Return whether two assistant messages of the chat API say the same, by the rule of cascades."""
    return acceptance.agree(_answer(small), _answer(large))


def _answer(message: Message) -> HeldAnswer:
    functions = [call.get("function", {}) for call in message.get("tool_calls") or ()]
    calls = [(str(function.get("name")), str(function.get("arguments", ""))) for function in functions]
    return HeldAnswer(str(message.get("content") or ""), "", calls=calls)
