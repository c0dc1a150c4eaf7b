"""What the benchmark of proposed tokens asks for, and how it counts."""

import jsonschema

from benchmarks.speculation_lanes import Slice
from benchmarks.speculation_schemas import make_schemas
from engine.core.messages.requests import TokenEvent


def test_schemas_differ_and_are_schemas():
    schemas = make_schemas(100)
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert 3 <= len(schema["properties"]) <= 7
    assert len({str(schema) for schema in schemas}) > 95
    assert any("parts" in schema["properties"] for schema in schemas)


def test_a_slice_tells_first_tokens_from_gaps_and_from_the_batch():
    measured, last = Slice(), {"chat": 1.0}
    for name, tokens, now in (("chat", (), 1.1), ("chat", (5,), 1.5), ("batch", (1, 2), 1.5), ("chat", (6,), 1.75)):
        measured.note(TokenEvent(name, tokens), last, now)
    assert (measured.ttft, measured.itl, measured.batch_tokens) == ([0.5], [0.25], 2)
