"""Reads from a model folder's config.json what the decoder needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from engine.model.families import find_family
from engine.model.families.base import ExpertsSpec, Json, ModelSpec, token_ids

__all__ = ["ExpertsSpec", "ModelSpec", "parse_spec", "read_spec"]


def read_spec(folder: Path) -> ModelSpec:
    """Reads config.json and, if it exists, generation_config.json of a Hugging Face folder. Raises ValueError if
    `folder` is no such folder, or describes a model that this engine cannot run; the message says why."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face model folder")
    config = json.loads((folder / "config.json").read_text())
    generation_file = folder / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    return parse_spec(config, generation)


def parse_spec(config: Json, generation: Json) -> ModelSpec:
    """Builds the spec from the contents of config.json and generation_config.json. Raises ValueError, whose message
    says why, if this engine cannot run the model."""
    spec = find_family(config.get("model_type"))(config)
    if "eos_token_id" not in generation:
        return spec
    return replace(spec, eos_token_ids=token_ids(generation["eos_token_id"]))
