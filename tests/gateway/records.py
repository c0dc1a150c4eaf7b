"""Requests and their records, for tests of what becomes of them."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from engine.core.messages.requests import Lane, SamplingParams
from gateway.core.routing import ModelQuery
from gateway.requests.progress import RequestTimes
from gateway.requests.record import Asked, Caller, RequestRecord
from gateway.requests.types import DEFAULTED, GenerateRequest, PromptInput

Whole = TypeVar("Whole", GenerateRequest, RequestRecord)


def make_request(model: str, *prompts: PromptInput, **fields: Any) -> GenerateRequest:
    """Return a request. `fields` are those of the request or of its parts, by name, and `seed`. Raises TypeError if no
    part has such a field."""
    sampling: SamplingParams = fields.pop("sampling", SamplingParams())
    if (seed := fields.pop("seed", None)) is not None:
        sampling, fields["defaulted"] = sampling._replace(seed=seed), DEFAULTED - {"seed"}
    return _with(GenerateRequest(ModelQuery(model), prompts, "req-1", sampling=sampling), fields)


def make_record(**fields: Any) -> RequestRecord:
    """Return the record of a request of `acme` for `poet`. `fields` are those of the record or of its parts, by name.
    Raises TypeError if no part has such a field."""
    record = RequestRecord("1", "r", Caller("acme", "k"), Asked("poet"), Lane.INTERACTIVE, RequestTimes(10.0))
    return _with(record, fields)


def _with(whole: Whole, fields: dict[str, Any]) -> Whole:
    whole = replace(whole, **{name: fields.pop(name) for name in whole.__struct_fields__ if name in fields})
    for name in whole.__struct_fields__:
        part = getattr(whole, name)
        if isinstance(part, Struct):
            its = {field: fields.pop(field) for field in part.__struct_fields__ if field in fields}
            whole = replace(whole, **{name: replace(part, **its)})
    if fields:
        raise TypeError(f"nothing has a field {', '.join(fields)}")
    return whole
