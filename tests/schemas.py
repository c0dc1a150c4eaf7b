"""Random JSON schemas that every answer to is short, and how to tell whether an answer keeps to one."""

import json

import jsonschema

LEAVES = (
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -50, "maximum": 999},
    {"type": "string", "maxLength": 6},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    {"enum": ["red", "green", 7, None]},
    {"const": {"fixed": [1]}},
)


def random_schema(rng, depth=2):
    """Return a random schema of an object, three levels deep at most."""
    names = rng.sample(["name", "size", "ä b", "tags", "ok"], rng.randint(1, 3))
    properties = {name: _value(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng, depth):
    kind = rng.randrange(4) if depth else 0
    if kind == 1:
        return random_schema(rng, depth)
    if kind == 2:
        low = rng.randint(0, 1)
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + 2}
    if kind == 3:
        return {"anyOf": [rng.choice(LEAVES), rng.choice(LEAVES)]}
    return rng.choice(LEAVES)


def check(answer, schema):
    """Raises ValueError or jsonschema.ValidationError: it is no answer to the schema."""
    jsonschema.validate(json.loads(answer), schema, cls=jsonschema.Draft202012Validator)
