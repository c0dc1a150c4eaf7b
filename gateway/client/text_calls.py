"""Calls about texts and tokens that tenants make."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.client.call import Call
from gateway.embeddings.schema import RerankRequest, ScoreRequest
from gateway.http.openapi.answers import Text, Tokens
from gateway.http.openapi.embeddings import Ranking, Scores
from gateway.openai.schema import DetokenizeRequest, TokenizeRequest


def tokenize(prompt: str, *, model: str | None = None, add_special_tokens: bool = True) -> Call[Tokens]:
    """Return the token ids of a text."""
    body = TokenizeRequest(prompt=prompt, model=model, add_special_tokens=add_special_tokens)
    return Call("POST", "/tokenize", Tokens, body=body)


def detokenize(tokens: Sequence[int], *, model: str | None = None) -> Call[str]:
    """Return the text of token ids."""
    return Call("POST", "/detokenize", Text, body=DetokenizeRequest(tokens=list(tokens), model=model), field="prompt")


def rerank(model: str, query: str, documents: Sequence[str], *, top_n: int | None = None) -> Call[Ranking]:
    """Return the documents that are most similar to a query, the most similar first."""
    body = RerankRequest(model=model, query=query, documents=list(documents), top_n=top_n)
    return Call("POST", "/v1/rerank", Ranking, body=body)


def score(model: str, text_1: str | list[str], text_2: str | list[str]) -> Call[Scores]:
    """Return the similarity of `text_1` with each text of `text_2` or, if both are lists of one length, of their texts
    pairwise."""
    return Call("POST", "/v1/score", Scores, body=ScoreRequest(model=model, text_1=text_1, text_2=text_2))
