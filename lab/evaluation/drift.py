"""Measures how far forms of a model's weights move its log-probabilities from those of the same weights in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from rich.progress import track
from rich.table import Table

from gateway.cli.options import console
from lab.demo.questions import plain_pairs

EXACT = "fp32"
"""Form of the weights whose log-probabilities those of all other forms are compared with."""
FORMS = ("auto", "int8", "int4", "fp8")
PIECE = 1200
"""Characters of a text that are scored as one prompt: some 300 tokens."""
LARGE = 0.99


class Drift(Struct, frozen=True):
    """Differences between the log-probabilities of a text's tokens in `form` and in fp32, of the base model (`adapter`
    is empty) or an adapter: absolute, in nats. `perplexity` is the form's own."""

    form: str
    adapter: str
    tokens: int
    mean: float
    p99: float
    worst: float
    perplexity: float


def bundled_text() -> str:
    """Return the demo's questions and answers as one text."""
    return "\n\n".join(f"{question}\n{answer}" for question, answer in plain_pairs())


def split(text: str) -> list[str]:
    """Cut a text into pieces of PIECE characters, each of which is scored as a prompt of its own. A last piece of less
    than two characters is left out."""
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    return [piece for piece in pieces if len(piece) > 1]


def measure(model: str, forms: Sequence[str], adapters: Mapping[str, str], pieces: Sequence[str]) -> Iterator[Drift]:
    """Yield the drift of each form for the base and each adapter; that of the exact weights comes first.

    Args:
        model: as `LLM` takes it.
        adapters: folders or hub ids of adapters by name.
    """
    exact: dict[str, list[float]] = {}
    for form in track((EXACT, *forms), "Scoring", console=console, transient=True):
        scores = score(model, form, adapters, pieces)
        exact = exact or scores
        for name, own in scores.items():
            yield compare(form, name, own, exact[name])


def score(model: str, form: str, adapters: Mapping[str, str], pieces: Sequence[str]) -> dict[str, list[float]]:
    """Load the model with weights in `form`. Return, for the base model (named "") and each adapter, the
    log-probabilities of the tokens of all pieces, without the first token of each piece."""
    from gateway.llm.llm import LLM  # its import takes seconds
    from gateway.llm.params import SamplingParams

    dtype, weights = ("float32", "auto") if form == EXACT else ("auto", form)
    engine = {"weights": weights, "prefix_caching": False}
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    scores: dict[str, list[float]] = {}
    with LLM(model, adapters=dict(adapters), dtype=dtype, engine=engine) as llm:
        for name in ("", *adapters):
            results = llm.generate(list(pieces), params, adapter=name or None, lane="batch", progress=False)
            scores[name] = [item.values.logprob for one in results for item in one.prompt_logprobs if item is not None]
    return scores


def compare(form: str, adapter: str, own: Sequence[float], exact: Sequence[float]) -> Drift:
    """Return the drift of a form: `own` are its log-probabilities, `exact` those of the same tokens in fp32."""
    moved = sorted(abs(ours - theirs) for ours, theirs in zip(own, exact, strict=True))
    mean, p99 = math.fsum(moved) / len(moved), moved[int(LARGE * (len(moved) - 1))]
    return Drift(form, adapter, len(own), mean, p99, moved[-1], math.exp(-math.fsum(own) / len(own)))


def drift_table(found: Sequence[Drift]) -> Table:
    table = Table(box=None)
    for title in ("model", "weights", "tokens", "mean |Δ logprob|", "p99", "largest", "perplexity"):
        table.add_column(title, justify="left" if title in ("model", "weights") else "right", no_wrap=True)
    for one in found:
        moved = ("-", "-", "-") if one.form == EXACT else (f"{one.mean:.4f}", f"{one.p99:.3f}", f"{one.worst:.3f}")
        table.add_row(one.adapter or "base", one.form, f"{one.tokens:,}", *moved, f"{one.perplexity:.3f}")
    return table
