"""Reads from a model folder's config.json what the decoder needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from engine.model.checkpoints.stored import StoredTensors
from engine.model.spec.families import find_family
from engine.model.spec.families.base import ExpertsSpec, Json, ModelSpec, token_ids
from engine.process.small_files import read_small_text

__all__ = ["ExpertsSpec", "ModelSpec", "parse_spec", "read_spec"]

MOST_JSON_BYTES = 256 * 2**20
"""Maximum size of a JSON file of a model folder: tokenizers of 256,000 tokens have some 35 MiB."""


def read_spec(folder: Path) -> ModelSpec:
    """Read config.json, generation_config.json, the tokenizer's configuration, and whether the weights have a head, of
    a Hugging Face folder. Raises ValueError, which says why, if the engine cannot run the model."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: not a Hugging Face model folder")
    spec = parse_spec(read_json(folder / "config.json"), read_json(folder / "generation_config.json"))
    ends = dict.fromkeys((*spec.eos_token_ids, *read_eos(folder)))
    spec = replace(spec, eos_token_ids=tuple(ends))
    return replace(spec, tied_embeddings=True, has_head=False) if _lacks_head(folder, spec) else spec


def read_json(file: Path) -> Json:
    """Return the object in a JSON file, empty if there is no such file. Raises ValueError, which names the file, if it
    holds anything else."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_small_text(file, MOST_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a JSON object: fetch it again")
    return found


def parse_spec(config: Json, generation: Json) -> ModelSpec:
    """Build the spec from the contents of config.json and generation_config.json. Raises ValueError, whose message says
    why, if this engine cannot run the model."""
    spec = find_family(config.get("model_type"))(config)
    if "eos_token_id" not in generation:
        return spec
    return replace(spec, eos_token_ids=token_ids(generation["eos_token_id"]))


def read_eos(folder: Path) -> tuple[int, ...]:
    """Return the id of the tokenizer's EOS token; empty means that the folder does not say. It ends answers beside
    those of the model's configuration, which may have another end where a chat's turns end."""
    settings = read_json(folder / "tokenizer_config.json")
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        return ()
    added = settings.get("added_tokens_decoder") or {
        token.get("id"): token for token in read_json(folder / "tokenizer.json").get("added_tokens", ())
    }
    return tuple(int(token_id) for token_id, token in added.items() if token.get("content") == text)[:1]


def _lacks_head(folder: Path, spec: ModelSpec) -> bool:
    """Return whether the folder's weights have no head although they need one, as those of embedding models that
    `AutoModel` saved. Such a model gives vectors, and generates nothing."""
    if spec.tied_embeddings or not any(folder.glob("*.safetensors")):
        return False
    return not any(name.startswith("lm_head.") for name in StoredTensors(folder))
