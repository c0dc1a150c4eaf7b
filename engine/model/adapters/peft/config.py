"""Parses adapter_config.json exactly as PEFT 0.21 understands it, or refuses it with the reason."""

from __future__ import annotations

import json
import re
from typing import Any

import regex

from engine.model.adapters.peft.fields import (
    ACTIVE_WHEN_EMPTY,
    IA3,
    KINDS,
    LATEST_PEFT,
    OTHER_KINDS,
    PLAIN_INITIALISATIONS,
    REFUSED,
    VERA,
    KindFields,
)
from engine.model.adapters.peft.hints import check_origin
from engine.model.adapters.peft.settings import AdapterError, Override, PeftSettings, Selection, check_invocation, short

MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 2048
MAX_WARNINGS = 16
"""Maximum number of warnings of one configuration: a file that PEFT wrote has none, and a strange one a few."""
MAX_TRAINED_TOKENS = 1024
"""Maximum number of tokens whose rows an adapter may replace: of a model of width 4,096, 8 MiB in 16 bits."""
EMBEDDING, HEAD = "embed_tokens", "lm_head"
ALL_LINEAR = "all-linear"


def parse_config(data: bytes) -> PeftSettings:
    """Parse the bytes of an adapter_config.json. Raises AdapterError if the file is malformed, or asks for something
    that cannot be served faithfully."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"adapter_config.json is not valid JSON ({error}); copy or save the adapter again"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError("adapter_config.json must hold a JSON object, as PEFT's save_pretrained writes it")
    check_origin(config)
    fields = _fields(config.get("peft_type"))
    _refuse_unsupported(config, fields)
    return _settings(config, fields)


def _fields(kind: Any) -> KindFields:
    """Return which configuration fields are read for adapters of the PEFT type `kind`, such as LORA or IA3. Raises
    AdapterError if adapters of this type are not served."""
    if not isinstance(kind, str) or kind not in KINDS:
        reason = OTHER_KINDS.get(kind, "it is not known here") if isinstance(kind, str) else "it must be a name"
        raise AdapterError(f"peft_type is {short(kind)}: {reason}. Supported: {', '.join(KINDS)}")
    return KINDS[kind]


def _refuse_unsupported(config: dict[str, Any], fields: KindFields) -> None:
    if config.get("bias") not in (None, "none"):
        raise AdapterError(f"bias is {short(config['bias'])}: only bias='none' is supported; retrain without biases")
    if not _leaves_base(config.get("init_lora_weights")):
        raise AdapterError(
            f"init_lora_weights is {short(config['init_lora_weights'])}: it changes the base weights, which every "
            "adapter shares; save it with path_initial_model_for_weight_conversion to turn it into a plain LoRA"
        )
    for key, value in _unread(config, fields).items():
        if reason := _refusal(key, config, fields):
            raise AdapterError(f"{short(key)} is {short(value)}: {reason}")


def _leaves_base(initialisation: Any) -> bool:
    """Return whether a LoRA of this initialisation leaves the base weights as they are. PEFT reads names of some
    initialisations in any case."""
    name = initialisation.lower() if isinstance(initialisation, str) else initialisation
    return name in PLAIN_INITIALISATIONS


def _unread(config: dict[str, Any], fields: KindFields) -> dict[str, Any]:
    """Return the fields of a configuration that are set, and neither read nor known to be harmless."""
    known = fields.handled | fields.harmless
    return {key: value for key, value in config.items() if key not in known and not _is_unset(key, value)}


def _refusal(key: str, config: dict[str, Any], fields: KindFields) -> str:
    """Return why an adapter that sets the field `key`, which is not read here, cannot be served. Empty means that PEFT
    ignores the field."""
    if key in REFUSED:
        return REFUSED[key]
    if key in fields.refused:
        return f"it is not supported in adapters of the kind {config['peft_type']}; retrain without it"
    written_by = re.match(r"(\d{1,4})\.(\d{1,4})", str(config.get("peft_version")))
    if written_by and tuple(map(int, written_by.groups())) > LATEST_PEFT:
        return (
            f"it is not known here, and PEFT {short(config['peft_version'])} may change the computation by it; set it "
            "to null if it does not"
        )
    return ""


def _warnings(config: dict[str, Any], fields: KindFields) -> tuple[str, ...]:
    """Return what operators should know of a configuration that can be served: the fields in it that have no effect."""
    ignored = sorted(_unread(config, fields).items())
    reason = "PEFT does not know this field, so it has no effect"
    told = [f"{short(key)} is {short(value)}: {reason}" for key, value in ignored]
    if config.get("fan_in_fan_out"):
        told.append("'fan_in_fan_out' is True: it has no effect, because the model's projections are no Conv1D")
    return tuple(told[:MAX_WARNINGS])


def _is_unset(key: str, value: Any) -> bool:
    return value is None or value is False or (value in ("", [], {}) and key not in ACTIVE_WHEN_EMPTY)


def _settings(config: dict[str, Any], fields: KindFields) -> PeftSettings:
    targets, layers, parameters = config.get("target_modules"), _layers(config), _strings(config, "target_parameters")
    if not targets and not parameters:
        raise AdapterError("target_modules is missing: name the projections the adapter was trained on")
    if isinstance(targets, str) and (layers or config.get("layers_pattern")):
        raise AdapterError("layers_to_transform and layers_pattern need target_modules as a list, not an expression")
    if config.get("layers_pattern") and not layers:
        raise AdapterError("layers_pattern is given without layers_to_transform")
    return PeftSettings(
        rank=int(_number(config, fields.rank, fields.default_rank, whole=True)),
        alpha=_number(config, fields.alpha, 8),
        use_rslora=_flag(config, "use_rslora"),
        use_dora=_flag(config, "use_dora"),
        rank_overrides=_overrides(config, "rank_pattern", whole=True) if "rank_pattern" in fields.handled else (),
        alpha_overrides=_overrides(config, "alpha_pattern"),
        target_modules=_selection(config, "target_modules"),
        exclude_modules=_selection(config, "exclude_modules"),
        layers=layers,
        layer_patterns=_layer_patterns(config),
        base_model=str(config.get("base_model_name_or_path") or ""),
        invocation=_invocation(config),
        kind=config["peft_type"],
        seed=_seed(config),
        scaled_inputs=_scaled_inputs(config),
        parameters=frozenset(parameters),
        tokens=_trained_tokens(config),
        saved=_saved_layers(config),
        has_version=bool(config.get("peft_version")),
        warnings=_warnings(config, fields),
    )


def _scaled_inputs(config: dict[str, Any]) -> Selection:
    """Return the modules whose inputs (IA)³ scales. Raises AdapterError if they are not given, because PEFT then
    guesses them from the base model's kind."""
    if config["peft_type"] == IA3 and config.get("feedforward_modules") is None:
        raise AdapterError("feedforward_modules is missing: name the modules whose inputs are scaled, or give []")
    return _selection(config, "feedforward_modules")


def _seed(config: dict[str, Any]) -> int | None:
    """Return the seed from which VeRA's shared matrices are made. None means that the weights file has them, or that
    the adapter is no VeRA."""
    if config["peft_type"] != VERA or _flag({"save_projection": True, **config}, "save_projection"):
        return None
    seed = config.get("projection_prng_key", 0)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise AdapterError(f"projection_prng_key must be an integer from 0 to 2**63 - 1, not {short(seed)}")
    return seed


def _invocation(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the invocation tokens of an activated LoRA, which takes effect only from these tokens on. Empty means that
    the adapter is no activated LoRA."""
    tokens = config.get("alora_invocation_tokens")
    if tokens is None:
        return ()
    if config.get("use_dora"):
        raise AdapterError("use_dora and alora_invocation_tokens: PEFT has no activated DoRA; retrain without one")
    return check_invocation(tokens, "alora_invocation_tokens")


def _trained_tokens(config: dict[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the tokens whose rows of the embedding or the head are trained (`trainable_token_indices`), by layer: see
    `PeftSettings.tokens`."""
    given = config.get("trainable_token_indices")
    if _is_unset("trainable_token_indices", given):
        return ()
    by_layer = given if isinstance(given, dict) else {EMBEDDING: given}
    _refuse_activated(config, "trainable_token_indices")
    found = {str(name).rpartition(".")[2]: _token_ids(ids) for name, ids in by_layer.items()}
    if len(found) < len(by_layer) or not found.keys() <= {EMBEDDING, HEAD}:
        raise AdapterError(f"trainable_token_indices must be of {EMBEDDING} or {HEAD}, not {short(list(by_layer))}")
    return tuple(sorted(found.items()))


def _saved_layers(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the layers, embedding or head, that the weights file holds whole (`modules_to_save`): see
    `PeftSettings.saved`."""
    names = _strings(config, "modules_to_save")
    if not names:
        return ()
    _refuse_activated(config, "modules_to_save")
    if config.get("ensure_weight_tying"):
        raise AdapterError("ensure_weight_tying and modules_to_save: retrain with trainable_token_indices in its place")
    layers = {name.rpartition(".")[2] for name in names}
    if others := sorted(layers - {EMBEDDING, HEAD}):
        raise AdapterError(
            f"modules_to_save has {short(others[0])}: only rows of {EMBEDDING} and {HEAD} may be trained, because "
            "adapters share the other modules; retrain without it"
        )
    return tuple(sorted(layers))


def _refuse_activated(config: dict[str, Any], field: str) -> None:
    """Raises AdapterError if the adapter is an activated LoRA and also changes rows of the embedding or the head, as
    the setting `field` asks for. These are not served together."""
    if config.get("alora_invocation_tokens") is not None:
        raise AdapterError(
            f"alora_invocation_tokens and {field}: before the invocation, pages are the base model's, whose rows the "
            "adapter has changed; retrain without one"
        )


def _token_ids(ids: Any) -> tuple[int, ...]:
    is_list = isinstance(ids, list) and 1 <= len(ids) <= MAX_TRAINED_TOKENS
    if not is_list or not all(type(token) is int and 0 <= token < 2**31 for token in ids) or len({*ids}) < len(ids):
        raise AdapterError(
            f"trainable_token_indices must be 1 to {MAX_TRAINED_TOKENS} different token ids or null, not {short(ids)}"
        )
    return tuple(ids)


def _number(config: dict[str, Any], key: str, default: float, whole: bool = False) -> float:
    value = config.get(key, default)
    wanted = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted) or not abs(value) <= 1e9:
        raise AdapterError(f"{short(key)} must be {'an integer' if whole else 'a number'}, not {short(value)}")
    return value


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if value not in (None, False, True):
        raise AdapterError(f"{key} must be true or false, not {short(value)}")
    return bool(value)


def _strings(config: dict[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise AdapterError(f"{key} must be a string or a list of strings, not {short(value)}")
    if len(values) > MAX_PATTERNS:
        raise AdapterError(f"{key} has {len(values)} entries: at most {MAX_PATTERNS} are read")
    return tuple(values)


def _selection(config: dict[str, Any], key: str) -> Selection:
    value = config.get(key)
    if not isinstance(value, str) or not value:
        return frozenset(_strings(config, key))
    all_linear = key == "target_modules" and value.lower() == ALL_LINEAR
    return _compile(".*" if all_linear else value, value, key)


def _layers(config: dict[str, Any]) -> frozenset[int]:
    value = config.get("layers_to_transform")
    layers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < 10**6 for layer in layers):
        raise AdapterError(f"layers_to_transform must be layer numbers, not {short(value)}")
    return frozenset(layers)


def _layer_patterns(config: dict[str, Any]) -> tuple[regex.Pattern[str], ...]:
    """Return the expressions with which `layers_to_transform` finds a module's layer number (group `idx`): the number
    after one of the names of layer lists in `layers_pattern`, or the first number if no name is given."""
    names = _strings(config, "layers_pattern")
    if not names:
        return (regex.compile(r".*?\.[^.]*\.(?P<idx>\d+)\."),)
    return tuple(_compile(rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.", name, "layers_pattern") for name in names)


def _overrides(config: dict[str, Any], key: str, whole: bool = False) -> tuple[Override, ...]:
    """Return the entries of `config[key]`, which is `rank_pattern` or `alpha_pattern`, in the file's order, because the
    first entry that matches a module counts. `whole` means that the values must be integers."""
    entries = config.get(key) or {}
    if not isinstance(entries, dict) or len(entries) > MAX_PATTERNS:
        raise AdapterError(f"{key} must be an object of at most {MAX_PATTERNS} entries, not {short(entries)}")
    return tuple(
        Override(name, _compile(rf"(.*\.)?({name})$", name, key), _number(entries, name, 0, whole)) for name in entries
    )


def _compile(expression: str, written: str, key: str) -> regex.Pattern[str]:
    """Compile an expression with `re`, to check it as PEFT does, and return it compiled with `regex`, which can stop
    after a timeout. Raises AdapterError if it is invalid, or `written`, its form in the field `key`, too long."""
    if len(written) > MAX_PATTERN_CHARS:
        raise AdapterError(
            f"{key} has an expression of {len(written)} characters: at most {MAX_PATTERN_CHARS} are read"
        )
    try:
        re.compile(expression)
        return regex.compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{key}: {short(written)} is not a regular expression: {error}") from error
