"""The models that a gateway serves, and which of them are evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import httpx
from msgspec import Struct

from gateway.cli.http import refusal, unreachable

ALL, NONE = "all", "none"


class Model(Struct, frozen=True):
    """A model as /v1/models lists it."""

    id: str
    root: str
    """The adapter's name if `id` is an alias; otherwise the base model's name."""
    parent: str | None
    """The base model of an adapter. None means that this is a base model."""
    max_model_len: int


class EvalError(Exception):
    """The gateway could not be reached or refused a request, or an argument is wrong; the message is shown to users."""


def served_models(http: httpx.Client) -> list[Model]:
    """Return the models that the key may use. Raises EvalError."""
    try:
        response = http.get("/v1/models")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise EvalError(unreachable(http, error)) from error
    if response.is_error:
        raise EvalError(refusal(response))
    fields = ("id", "root", "parent", "max_model_len")
    return [Model(*(model.get(name) for name in fields)) for model in response.json()["data"]]


def chosen_models(models: Sequence[Model], adapters: str) -> list[Model]:
    """Return the models to evaluate: base models, each followed by its chosen adapters, by names with commas, all
    (without aliases) or none. Named ones leave other base models out. Raises EvalError for unknown ones."""
    bases = [model for model in models if model.parent is None and model.root == model.id]
    if adapters == NONE:
        return bases
    known = {model.id: model for model in models if model.parent is not None}
    chosen = [name for name, model in known.items() if model.root in (name, model.parent)]
    if adapters != ALL:
        chosen = list(dict.fromkeys(listed(adapters)))
        bases = [base for base in bases if any(name in known and known[name].parent == base.id for name in chosen)]
    for name in chosen:
        if name not in known:
            raise EvalError(f"there is no adapter {name!r}; there are: {', '.join(known) or 'none'}")
    of = {base.id: [known[name] for name in chosen if known[name].parent == base.id] for base in bases}
    return [model for base in bases for model in (base, *of[base.id])]


def listed(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
