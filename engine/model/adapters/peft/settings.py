"""The settings of an adapter that its computation depends on, and which modules they select.

The rules are those of PEFT 0.21: which modules are targeted (`target_modules`, `exclude_modules`,
`layers_to_transform`, `layers_pattern`), and the rank and alpha of each (`rank_pattern`, `alpha_pattern`, rsLoRA).
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import regex

from engine.model.adapters.peft.fields import LORA
from engine.model.adapters.peft.roots import HERE
from engine.model.spec.fused import fused_name
from engine.process.adapter_files import CONFIG_FILE
from lora_kernels.layout import MAX_RANK

MATCH_SECONDS = 1.0
"""Maximum time in seconds for matching one expression of an adapter with one module name. Ordinary ones take
microseconds."""
ADAPTER_SECONDS = 10.0
"""Maximum time in seconds, of the thread that checks an adapter, for matching all of its expressions with all names.
A match takes 6 us on a Zen 3 core: 5.5 s for the 4,096 entries that a `rank_pattern` may have and the 224 projections
of an 8B model, and 450 s for those of 48 layers of 128 experts."""
MAX_INVOCATION = 256
"""Maximum number of tokens that activate an adapter."""
Selection: TypeAlias = regex.Pattern[str] | frozenset[str]
"""Selects modules by name: an expression that matches whole names, or a set of suffixes of whole path components."""


class AdapterError(ValueError):
    """An adapter that cannot be served as it was trained. The message tells the operator why and what to do."""


@dataclass(frozen=True, slots=True)
class Override:
    """An entry of `rank_pattern` or `alpha_pattern`: `value` is the rank or alpha of modules whose names match."""

    key: str
    pattern: regex.Pattern[str]
    value: float


class Matching:
    """Matches the regular expressions in an adapter's configuration with module names, and stops them after
    `ADAPTER_SECONDS` of CPU time in all."""

    def __init__(self) -> None:
        self._left = ADAPTER_SECONDS

    def match(self, pattern: regex.Pattern[str], name: str, whole: bool = False) -> regex.Match[str] | None:
        """Match the beginning of a name, or the `whole` name. Return the match, or None. Raises AdapterError if this
        expression, or all of the adapter's together, take too long."""
        began, find = time.thread_time(), pattern.fullmatch if whole else pattern.match
        try:
            found = find(name, timeout=MATCH_SECONDS, concurrent=True)
        except TimeoutError as error:
            raise AdapterError(
                f"the expression {short(pattern.pattern)} takes too long on {name}: write it simpler"
            ) from error
        self._left -= time.thread_time() - began
        if self._left < 0:
            raise AdapterError(
                f"matching the adapter's expressions with the names of modules takes over {ADAPTER_SECONDS:g} s, at "
                f"last {short(pattern.pattern)}: write fewer or simpler ones"
            )
        return found


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
    target_modules: Selection
    exclude_modules: Selection
    layers: frozenset[int]
    """Layers to adapt; a module targeted by its full path is adapted in any layer. Empty means all layers."""
    layer_patterns: tuple[regex.Pattern[str], ...]
    base_model: str
    invocation: tuple[int, ...] = ()
    """Token ids from whose last occurrence in a prompt on the adapter applies (activated LoRA). Empty means that it
    applies to all tokens."""
    fused: bool = False
    """True means that the configuration names the projections of `FUSED` (engine/model/spec/fused.py) in place of their
    parts."""
    root: str = HERE
    """Path, in the model that the adapter was trained on, of the decoder that is `model.` in the base model: see
    adapters/peft/roots.py. The configuration's expressions were written for it."""
    kind: str = LORA
    """The kind of adapter, one of `KINDS` (engine/model/adapters/peft/fields.py)."""
    seed: int | None = None
    """Seed of VeRA's shared matrices. None means that the weights file has them."""
    scaled_inputs: Selection = frozenset()
    """Selects the modules whose inputs, not outputs, (IA)³ scales: by the ends of their names, or by an expression of
    whole names."""
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Layers with trained rows, `embed_tokens` or `lm_head`, each with its tokens, in the order of their rows in the
    file. An adapter of a model whose head is its embedding need not name the head."""
    saved: tuple[str, ...] = ()
    """Layers of which the file has all rows (PEFT's `modules_to_save`): `embed_tokens`, `lm_head`, or both."""
    scales_outputs: bool = False
    """True means that each projection has factors of its base outputs, as (IA)³ has once it is converted."""
    parameters: frozenset[str] = frozenset()
    """Names of bare parameters that the adapter changes: suffixes of their paths, in whole path components."""
    exact: Mapping[str, tuple[int, float]] | None = None
    """Rank and alpha of each module that the adapter changes, by name, where all of them are known (see
    adapters/peft/experts.py). None means that the other fields say it."""
    has_version: bool = False
    """True means that the configuration says which PEFT wrote it, as PEFT does since 0.18 (huggingface/peft#2782), the
    first that works with transformers 5 (huggingface/transformers#41889)."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What operators should know of the adapter although it is served."""
    matching: Matching = field(default_factory=Matching, compare=False, repr=False)
    found: dict[str, tuple[int, float]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Rank and alpha by name, kept for each name that `rank_and_alpha` has matched with the overrides."""

    @property
    def has_only_deltas(self) -> bool:
        """Return whether the adapter has only A and B of projections: no factors of outputs and no rows of tokens."""
        return not (self.use_dora or self.scales_outputs or self.tokens or self.saved)

    def targets(self, module: str) -> bool:
        """Return whether the adapter changes the module of this name. Raises AdapterError if matching takes too
        long."""
        if self.exact is not None:
            return module in self.exact
        module = self._written(module)
        if self._selects(self.exclude_modules, module):
            return False
        if isinstance(self.target_modules, frozenset) and self.layers and module not in self.target_modules:
            return self._selects(self.target_modules, module) and self._layer(module) in self.layers
        return self._selects(self.target_modules, module)

    def without_weights(self, modules: Sequence[str]) -> AdapterError:
        """Return the error of an adapter that targets these modules and has no weights for them."""
        trained_on = f" ({self.base_model})" if self.base_model else ""
        return AdapterError(
            f"{CONFIG_FILE} targets {modules[0]}, but there are no weights for it ({len(modules)} such modules): "
            f"an incomplete file, or an adapter of another base{trained_on}?"
        )

    def rank_of(self, module: str) -> int:
        """Return the adapter's rank on the module of this name. Raises AdapterError if it is not 1 to MAX_RANK, or
        matching takes too long."""
        rank = self.rank_and_alpha(module)[0]
        if not 1 <= rank <= MAX_RANK:
            raise AdapterError(f"rank {rank} on {module}: ranks of 1 to {MAX_RANK} are supported")
        return rank

    def scale_of(self, module: str) -> float:
        """Return the factor of B A on the module of this name: alpha / r, or alpha / sqrt(r) with rsLoRA. Raises
        AdapterError in the cases of `rank_of`."""
        alpha, rank = self.rank_and_alpha(module)[1], self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank_and_alpha(self, name: str) -> tuple[int, float]:
        """Return the adapter's rank and alpha on the module or parameter of this name. Raises AdapterError if matching
        takes too long."""
        if self.exact is not None:
            return self.exact[name]
        if (found := self.found.get(name)) is None:
            written = self._written(name)
            rank = int(self._override(self.rank_overrides, written, self.rank))
            found = self.found[name] = rank, self._override(self.alpha_overrides, written, self.alpha)
        return found

    def changes_parameter(self, path: str) -> bool:
        """Return whether the adapter changes the bare parameter of this path."""
        return self._selects(self.parameters, path)

    def canonical(self) -> bytes:
        """Return the settings that affect the computation as JSON bytes, which are part of the adapter's hash.
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
            *([{"parameters": sorted(self.parameters)}] if self.parameters else ()),
            *([self.kind, self.seed, _canonical_selection(self.scaled_inputs)] if self.kind != LORA else ()),
            *([self.tokens] if self.tokens else ()),
            *(["modules_to_save", self.saved] if self.saved else ()),
        )
        return json.dumps(fields).encode()

    def scales_inputs(self, module: str) -> bool:
        """Return whether (IA)³ scales the inputs of the module of this name, in place of its outputs. PEFT compares the
        ends of names here, not whole path components. Raises AdapterError as `targets` does."""
        if isinstance(self.scaled_inputs, frozenset):
            return module.endswith(tuple(self.scaled_inputs))
        return self.matching.match(self.scaled_inputs, module, whole=True) is not None

    def _selects(self, selection: Selection, module: str) -> bool:
        if isinstance(selection, frozenset):
            parts = module.split(".")  # few, where an adapter may name thousands of modules
            return any(".".join(parts[start:]) in selection for start in range(len(parts)))
        return self.matching.match(selection, module, whole=True) is not None

    def _override(self, overrides: Iterable[Override], module: str, default: float) -> float:
        return next((entry.value for entry in overrides if self.matching.match(entry.pattern, module)), default)

    def _written(self, module: str) -> str:
        """Return the name by which the adapter's configuration knows a module of the base model: that of the fused
        projection that it is part of if `fused`, else its own, below the path `root`."""
        name = fused_name(module) if self.fused else module
        return name if self.root == HERE else self.root + name.removeprefix(HERE)

    def _layer(self, module: str) -> int | None:
        for pattern in self.layer_patterns:
            if found := self.matching.match(pattern, module):
                return int(found["idx"])
        return None


def check_invocation(tokens: object, name: str) -> tuple[int, ...]:
    """Return `tokens`, the value of the setting `name`, as the invocation tokens of an activated LoRA. Raises
    AdapterError if it is no list of 1 to MAX_INVOCATION token ids."""
    found = tuple(tokens) if isinstance(tokens, list | tuple) else ()
    is_valid = 1 <= len(found) <= MAX_INVOCATION and all(type(one) is int and 0 <= one < 2**31 for one in found)
    if not is_valid:
        raise AdapterError(f"{name} must be 1 to {MAX_INVOCATION} token ids, not {short(tokens)}")
    return found


def settings_of_ranks(ranks: Mapping[str, int], alpha: float = 0) -> PeftSettings:
    """Return the settings of a LoRA that changes modules of these names with these ranks. `alpha` 0 means that B A is
    not scaled."""
    [(common, _)] = Counter(ranks.values()).most_common(1)
    others = tuple(
        Override(module, regex.compile(f"{regex.escape(module)}$"), rank)
        for module, rank in ranks.items()
        if rank != common
    )
    return PeftSettings(
        rank=common,
        alpha=alpha or common,
        use_rslora=False,
        use_dora=False,
        rank_overrides=others,
        alpha_overrides=() if alpha else others,
        target_modules=frozenset(ranks),
        exclude_modules=frozenset(),
        layers=frozenset(),
        layer_patterns=(),
        base_model="",
    )


def _canonical_selection(selection: Selection) -> Any:
    return sorted(selection) if isinstance(selection, frozenset) else selection.pattern


def short(value: Any) -> str:
    """Return a value as messages show it, in at most 120 characters."""
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
