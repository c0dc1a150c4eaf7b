"""Parses adapter_config.json exactly as PEFT understands it, or refuses it with the reason.

The rules are those of PEFT 0.21: which modules are targeted (`target_modules`, `exclude_modules`,
`layers_to_transform`, `layers_pattern`), and the rank and alpha of each (`rank_pattern`, `alpha_pattern`, rsLoRA).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import regex

from engine.model.fused import fused_name
from engine.model.peft_fields import ACTIVE_WHEN_EMPTY, HANDLED, HARMLESS, PLAIN_INITIALISATIONS, REFUSED
from lora_kernels.layout import MAX_RANK

MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 2048
MAX_INVOCATION = 256
"""Maximum number of tokens that activate an adapter."""
MATCH_SECONDS = 1.0
"""Maximum time in seconds for matching one expression of an adapter with one module name. Ordinary ones take
microseconds."""
ALL_LINEAR = "all-linear"


class AdapterError(ValueError):
    """An adapter that cannot be served as it was trained. The message tells the operator why and what to do."""


@dataclass(frozen=True, slots=True)
class Override:
    """An entry of `rank_pattern` or `alpha_pattern`: `value` is the rank or alpha of modules whose names match."""

    key: str
    pattern: regex.Pattern[str]
    value: float


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """The fields of an adapter's configuration that its computation depends on. Module names are paths in the base
    model, such as `model.layers.3.self_attn.q_proj`."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_overrides: tuple[Override, ...]
    alpha_overrides: tuple[Override, ...]
    target_modules: regex.Pattern[str] | tuple[str, ...]
    """An expression that matches whole module names, or a list of suffixes of them, in whole path components."""
    exclude_modules: regex.Pattern[str] | tuple[str, ...]
    layers: frozenset[int]
    """Layers to adapt; a module targeted by its full path is adapted in any layer. Empty means all layers."""
    layer_patterns: tuple[regex.Pattern[str], ...]
    base_model: str
    invocation: tuple[int, ...] = ()
    """Token ids from whose last occurrence in a prompt on the adapter applies (activated LoRA). Empty means that it
    applies to all tokens."""
    fused: bool = False
    """True means that the configuration names the projections of `FUSED` (engine/model/fused.py) in place of their
    parts."""

    def targets(self, module: str) -> bool:
        """Returns whether the adapter changes the module of this name. Raises AdapterError if matching takes too
        long."""
        module = self._written(module)
        if _selects(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, tuple) and self.layers and module not in self.target_modules:
            return _selects(self.target_modules, module) and self._layer(module) in self.layers
        return _selects(self.target_modules, module)

    def rank_of(self, module: str) -> int:
        """Returns the adapter's rank on the module of this name. Raises AdapterError if it is not 1 to MAX_RANK, or
        matching takes too long."""
        rank = int(_override(self.rank_overrides, self._written(module), self.rank))
        if not 1 <= rank <= MAX_RANK:
            raise AdapterError(f"rank {rank} on {module}: ranks of 1 to {MAX_RANK} are supported")
        return rank

    def scale_of(self, module: str) -> float:
        """Returns the factor of B A on the module of this name: alpha / r, or alpha / sqrt(r) with rsLoRA. Raises
        AdapterError in the cases of `rank_of`."""
        alpha, rank = _override(self.alpha_overrides, self._written(module), self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def canonical(self) -> bytes:
        """Returns the settings that affect the computation as JSON bytes, which are part of the adapter's hash.
        `use_dora` is not included: the weights have magnitudes if and only if it is on."""
        fields = (
            self.rank,
            float(self.alpha),
            self.use_rslora,
            [(entry.key, entry.value) for entry in self.rank_overrides],
            [(entry.key, float(entry.value)) for entry in self.alpha_overrides],
            _canonical_selection(self.target_modules),
            _canonical_selection(self.exclude_modules),
            sorted(self.layers),
            [pattern.pattern for pattern in self.layer_patterns],
            *([self.invocation] if self.invocation else ()),  # hashes of plain LoRAs stay as they were
        )
        return json.dumps(fields).encode()

    def _written(self, module: str) -> str:
        """Returns a module's name in the configuration."""
        return fused_name(module) if self.fused else module

    def _layer(self, module: str) -> int | None:
        for pattern in self.layer_patterns:
            if found := _match(pattern, module):
                return int(found["idx"])
        return None


def parse_config(data: bytes) -> PeftSettings:
    """Parses the bytes of an adapter_config.json. Raises AdapterError if the file is malformed, or asks for something
    that cannot be served faithfully."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"adapter_config.json is not valid JSON ({error}); copy or save the adapter again"
        ) from error
    if not isinstance(config, dict):
        raise AdapterError("adapter_config.json must hold a JSON object, as PEFT's save_pretrained writes it")
    _refuse_unsupported(config)
    return _settings(config)


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise AdapterError(f"peft_type is {_short(kind)}: only LORA adapters are supported")
    if config.get("bias") not in (None, "none"):
        raise AdapterError(f"bias is {_short(config['bias'])}: only bias='none' is supported; retrain without biases")
    if config.get("init_lora_weights") not in PLAIN_INITIALISATIONS:
        raise AdapterError(
            f"init_lora_weights is {_short(config['init_lora_weights'])}: it changes the base weights, which every "
            "adapter shares; save it with path_initial_model_for_weight_conversion to turn it into a plain LoRA"
        )
    for key, value in config.items():
        if key not in HANDLED and key not in HARMLESS and not _is_unset(key, value):
            reason = REFUSED.get(
                key, "not known here, and it may change the computation; set it to null if it does not"
            )
            raise AdapterError(f"{_short(key)} is {_short(value)}: {reason}")


def _is_unset(key: str, value: Any) -> bool:
    return value is None or value is False or (value in ("", [], {}) and key not in ACTIVE_WHEN_EMPTY)


def _settings(config: dict[str, Any]) -> PeftSettings:
    targets, layers = config.get("target_modules"), _layers(config)
    if not targets:
        raise AdapterError("target_modules is missing: name the projections the adapter was trained on")
    if isinstance(targets, str) and (layers or config.get("layers_pattern")):
        raise AdapterError("layers_to_transform and layers_pattern need target_modules as a list, not an expression")
    if config.get("layers_pattern") and not layers:
        raise AdapterError("layers_pattern is given without layers_to_transform")
    return PeftSettings(
        rank=int(_number(config, "r", 8, whole=True)),
        alpha=_number(config, "lora_alpha", 8),
        use_rslora=_flag(config, "use_rslora"),
        use_dora=_flag(config, "use_dora"),
        rank_overrides=_overrides(config, "rank_pattern", whole=True),
        alpha_overrides=_overrides(config, "alpha_pattern"),
        target_modules=_selection(config, "target_modules"),
        exclude_modules=_selection(config, "exclude_modules"),
        layers=layers,
        layer_patterns=_layer_patterns(config),
        base_model=str(config.get("base_model_name_or_path") or ""),
        invocation=_invocation(config),
    )


def _invocation(config: dict[str, Any]) -> tuple[int, ...]:
    """Returns the tokens that activate the adapter. Empty means that it is no activated LoRA."""
    tokens = config.get("alora_invocation_tokens")
    if tokens is None:
        return ()
    if config.get("use_dora"):
        raise AdapterError("use_dora and alora_invocation_tokens: PEFT has no activated DoRA; retrain without one")
    is_list = isinstance(tokens, list) and 1 <= len(tokens) <= MAX_INVOCATION
    if not is_list or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise AdapterError(
            f"alora_invocation_tokens must be 1 to {MAX_INVOCATION} token ids or null, not {_short(tokens)}"
        )
    return tuple(tokens)


def _number(config: dict[str, Any], key: str, default: float, whole: bool = False) -> float:
    value = config.get(key, default)
    wanted = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted) or not abs(value) <= 1e9:
        raise AdapterError(f"{_short(key)} must be {'an integer' if whole else 'a number'}, not {_short(value)}")
    return value


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if value not in (None, False, True):
        raise AdapterError(f"{key} must be true or false, not {_short(value)}")
    return bool(value)


def _strings(config: dict[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise AdapterError(f"{key} must be a string or a list of strings, not {_short(value)}")
    if len(values) > MAX_PATTERNS:
        raise AdapterError(f"{key} has {len(values)} entries: at most {MAX_PATTERNS} are read")
    return tuple(values)


def _selection(config: dict[str, Any], key: str) -> regex.Pattern[str] | tuple[str, ...]:
    value = config.get(key)
    if not isinstance(value, str) or not value:
        return tuple(sorted(_strings(config, key)))
    all_linear = key == "target_modules" and value.lower() == ALL_LINEAR
    return _compile(".*" if all_linear else value, value, key)


def _layers(config: dict[str, Any]) -> frozenset[int]:
    value = config.get("layers_to_transform")
    layers = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < 10**6 for layer in layers):
        raise AdapterError(f"layers_to_transform must be layer numbers, not {_short(value)}")
    return frozenset(layers)


def _layer_patterns(config: dict[str, Any]) -> tuple[regex.Pattern[str], ...]:
    """Returns expressions that find a module's layer number (group `idx`): the number after one of the given names of
    layer lists, or the first number if no name is given."""
    names = _strings(config, "layers_pattern")
    if not names:
        return (regex.compile(r".*?\.[^.]*\.(?P<idx>\d+)\."),)
    return tuple(_compile(rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.", name, "layers_pattern") for name in names)


def _overrides(config: dict[str, Any], key: str, whole: bool = False) -> tuple[Override, ...]:
    """Returns the entries of `config[key]` in the file's order, because the first entry that matches a module
    counts."""
    entries = config.get(key) or {}
    if not isinstance(entries, dict) or len(entries) > MAX_PATTERNS:
        raise AdapterError(f"{key} must be an object of at most {MAX_PATTERNS} entries, not {_short(entries)}")
    return tuple(
        Override(name, _compile(rf"(.*\.)?({name})$", name, key), _number(entries, name, 0, whole)) for name in entries
    )


def _compile(expression: str, written: str, key: str) -> regex.Pattern[str]:
    """Compiles an expression with `re`, to check it as PEFT does, and returns it compiled with `regex`, which can stop
    after a timeout. Raises AdapterError if it is invalid, or `written`, its form in the field `key`, too long."""
    if len(written) > MAX_PATTERN_CHARS:
        raise AdapterError(
            f"{key} has an expression of {len(written)} characters: at most {MAX_PATTERN_CHARS} are read"
        )
    try:
        re.compile(expression)
        return regex.compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{key}: {_short(written)} is not a regular expression: {error}") from error


def _match(pattern: regex.Pattern[str], module: str, whole: bool = False) -> regex.Match[str] | None:
    try:
        find = pattern.fullmatch if whole else pattern.match
        return find(module, timeout=MATCH_SECONDS, concurrent=True)
    except TimeoutError as error:
        raise AdapterError(
            f"the expression {_short(pattern.pattern)} takes too long on {module}: write it simpler"
        ) from error


def _selects(selection: regex.Pattern[str] | tuple[str, ...], module: str) -> bool:
    if isinstance(selection, tuple):
        return any(module == name or module.endswith(f".{name}") for name in selection)
    return _match(selection, module, whole=True) is not None


def _override(overrides: Iterable[Override], module: str, default: float) -> float:
    return next((entry.value for entry in overrides if _match(entry.pattern, module)), default)


def _canonical_selection(selection: regex.Pattern[str] | tuple[str, ...]) -> Any:
    return list(selection) if isinstance(selection, tuple) else selection.pattern


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
