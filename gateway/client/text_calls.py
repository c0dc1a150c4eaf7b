"""Calls about texts and tokens that tenants make."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.api_schema import tokens as api
from gateway.api_schema import vectors
from gateway.client.call import Call


def tokenize(prompt: str, *, model: str | None = None, add_special_tokens: bool = True) -> Call[api.Tokens]:
    """Return the token ids of a text."""
    body = api.TokenizeRequest(prompt=prompt, model=model, add_special_tokens=add_special_tokens)
    return Call.of(api.TOKENIZE, body=body)


def detokenize(tokens: Sequence[int], *, model: str | None = None) -> Call[str]:
    """Return the text of token ids."""
    body = api.DetokenizeRequest(tokens=list(tokens), model=model)
    return Call.of(api.DETOKENIZE, body=body, field="prompt")


def rerank(model: str, query: str, documents: Sequence[str], *, top_n: int | None = None) -> Call[vectors.Ranking]:
    """Return the documents that are most similar to a query, the most similar first."""
    body = vectors.RerankRequest(model=model, query=query, documents=list(documents), top_n=top_n)
    return Call.of(vectors.RERANK, body=body)


def score(model: str, text_1: str | list[str], text_2: str | list[str]) -> Call[vectors.Scores]:
    """Return the similarity of `text_1` with each text of `text_2` or, if both are lists of one length, of their texts
    pairwise."""
    return Call.of(vectors.SCORE, body=vectors.ScoreRequest(model=model, text_1=text_1, text_2=text_2))
