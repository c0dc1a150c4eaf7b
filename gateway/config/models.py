"""The settings of one base model, and the section `models` of the file, which names several."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from engine.config import EngineConfig
from engine.rpc.target import UNIX, EngineTarget, EngineTls
from gateway.config.cluster import RayConfig, RayShare
from gateway.config.file import ConfigError, Problems, as_mapping, build, check_keys, convert, read_each
from gateway.config.lanes import LanesConfig
from gateway.core.names import ADAPTER_NAME, MODEL_NAME
from gateway.routing.router import MAX_REPLICAS
from gateway.text.reasoning.parser import ReasoningParserName
from gateway.text.tools.dialects import ToolParserName

OWN_KEYS = ("source", "chat_template", "tool_parser", "reasoning_parser", "generation_config")
"""Keys of an entry of the section `models` that the section `model` has, too."""
ALONE = ("model", "engine")
"""Sections that are the short form for one base model. A file has either these or the section `models`."""

EMBEDDED, EMBEDDED_NAME, UNNAMED = "embedded", "smollm2-135m-instruct", "model"


def served_name(source: str) -> str:
    """Return the name that clients use for a base model without a configured name: EMBEDDED_NAME for the embedded
    model, else the last part of its path or id in lower case, without .gguf, with `-` for characters that a name cannot
    have; UNNAMED if that leaves nothing."""
    if source == EMBEDDED:
        return EMBEDDED_NAME
    part = Path(source).name.removesuffix(".gguf").lower()
    return re.sub(r"[^a-z0-9_.:-]+", "-", part).lstrip("_.:-").rstrip("-")[:128] or UNNAMED


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A base model that is served."""

    source: str = EMBEDDED
    """A model folder, a GGUF file, a Hugging Face id, or `embedded`, the small model that comes with the package."""
    name: str = ""
    """Name of the model for clients. If empty, it is the last part of the source's path or id."""
    chat_template: Path | None = None
    """A Jinja file to render chats with; None means the template that comes with the model."""
    tool_parser: ToolParserName = "auto"
    """Format in which the model writes tool calls, by a name of `DIALECTS`. With `none` tool calls are not parsed.
    `auto` means the format that the chat template uses."""
    reasoning_parser: ReasoningParserName = "auto"
    """Marks around the model's reasoning, which answers then have apart from their text: harmony, think, mistral or
    seed. With `none` reasoning is part of the text. `auto` means the marks that the chat template mentions."""
    generation_config: Literal["auto", "none"] = "auto"
    """Where sampling parameters come from that a request does not set: with `auto`, from the model's
    generation_config.json, if it has one; with `none`, they are those of OpenAI's API."""

    def __post_init__(self) -> None:
        if self.name and not MODEL_NAME.fits(self.name):
            raise ValueError(f"{self.name!r} cannot be the name: a name of a base model is {MODEL_NAME.words}")


@dataclass(frozen=True, slots=True)
class EnginesConfig:
    """Which engines a gateway uses: its own processes, or engines that run elsewhere. The file sets these fields in the
    section `engine`, beside the fields of EngineConfig, which say how one engine works."""

    replicas: int = 1
    """Number of engine processes that the gateway starts, if `addresses` is empty."""
    addresses: tuple[str, ...] = ()
    """Engines that were started with `loralane engine`, as `host:port`. If there are any, the gateway starts none."""
    roles: tuple[Literal["prefill", "decode", "both"], ...] = ()
    """The parts of split requests that the first engines compute, in the order of `addresses` or of the processes that
    the gateway starts. The others compute both."""
    split: Literal["auto", "never", "always"] = "auto"
    """Which requests are split between engines with `kv_listen`, so that one computes the prompt and the first token,
    and another one the rest. With `auto`, those for which that is predicted to take less time in all."""
    tls: EngineTls | None = None
    """Certificates for connections to `addresses`, and of an engine that `loralane engine` starts. None means that
    engines are reached on this machine only, without TLS."""
    ray: RayShare | None = None
    """With the section `cluster.ray`: how this base model's engines differ from it. Ray starts no engines for a model
    with `addresses`."""

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas must be from 1 to {MAX_REPLICAS}, not {self.replicas}")
        if len(self.addresses) > MAX_REPLICAS:
            raise ValueError(f"addresses must be at most {MAX_REPLICAS}, not {len(self.addresses)}")
        if self.addresses and self.replicas > 1:
            raise ValueError("replicas counts processes that the gateway starts, and with addresses it starts none")
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError("addresses has an engine twice")
        engines = len(self.addresses) or self.replicas
        if len(self.roles) > engines:
            raise ValueError(f"roles has {len(self.roles)}, and there are {engines} engines")
        self.targets()  # raises ValueError for a malformed address, and for a remote one without tls

    def targets(self) -> tuple[EngineTarget, ...]:
        """Return the engines of `addresses`, with the TLS files to connect to them."""
        for address in self.addresses:
            if address.startswith(UNIX):
                raise ValueError(f"addresses are like host:7001, not {address!r}")
        return tuple(EngineTarget(address, self.tls) for address in self.addresses)

    def on_ray(self, common: RayConfig | None) -> RayConfig | None:
        """Return how Ray runs these engines, where `common` is the section `cluster.ray`; None means that it runs none.
        Raises ValueError if `ray` does not fit `common`."""
        if common is None or self.addresses:
            return None
        return self.ray.within(common) if self.ray else common

    def check_ray(self, common: RayConfig | None, where: str) -> None:
        """Raise ConfigError, with the place `where` of these settings in the file, if they contradict the section
        `cluster.ray`, which is `common`."""
        if self.ray is not None and common is None:
            raise ConfigError(f"{where}.ray: needs the section cluster.ray, which says where Ray is")
        try:
            runs = self.on_ray(common)
        except ValueError as error:
            raise ConfigError(f"{where}.ray: {error}") from error
        if runs is not None and self.replicas > 1:
            raise ConfigError(f"{where}.replicas: Ray starts the engines; set min and max of cluster.ray")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """All settings of one base model."""

    model: ModelConfig
    """Where the model comes from; its name is the one that clients use."""
    engine: EngineConfig
    """How one of its engines works, without what `engine_config` adds."""
    engines: EnginesConfig = field(default_factory=EnginesConfig)
    """Which engines serve the model."""
    lanes: LanesConfig = field(default_factory=LanesConfig)
    preload: Mapping[str, Path] = field(default_factory=dict)
    """Adapters to load at start: PEFT folders or GGUF files by served name."""

    def engine_config(self, folder: Path | None, state_dir: Path | None = None) -> EngineConfig:
        """Return the complete configuration of an engine process: the section `engine`, with the lanes' goals.

        Args:
            folder: folder of the prepared model. None means that the model is still being prepared.
            state_dir: folder in which the engine stores what it learns about this machine. None means nowhere.
        """
        return replace(
            self.engine,
            model="" if folder is None else str(folder),
            state_dir="" if state_dir is None else str(state_dir),
            interactive=self.lanes.interactive.goals(),
            batch=self.lanes.batch.goals(),
        )


EngineParts = Callable[[Any, str], tuple[EngineConfig, EnginesConfig]]
"""Function that converts the value of a section `engine`, given its place in the file for messages. Returns how one
engine works and which engines the gateway uses. Raises ConfigError."""


def read_models(value: Any, lanes: Any, base: Path, engine: EngineParts) -> dict[str, ModelSettings]:
    """Convert the section `models`: base models by the name that clients use, in the order of the file.

    Args:
        value: the section, with references to the environment replaced.
        lanes: the section `lanes`, whose values apply to models that do not set them.
        base: the folder that relative paths start from.
        engine: converts the section `engine` of a model.

    Raises:
        ConfigError: with all problems of all models.
    """
    section = as_mapping(value, "models")
    if not section:
        raise ConfigError("models: names no model")
    common = _valid_lanes(lanes, base)
    return read_each(section, lambda name, item: _model(name, item, common, base, engine))


def _valid_lanes(lanes: Any, base: Path) -> Any:
    """Return the section `lanes` of the file if it is valid, otherwise an empty one: its problems are reported at its
    own place, and not also for each model."""
    try:
        convert(lanes, LanesConfig, "lanes", base)
    except ConfigError:
        return {}
    return lanes


def _model(name: str, value: Any, lanes: Any, base: Path, engine: EngineParts) -> ModelSettings:
    check_entry("models", name)
    where, problems = f"models.{name}", Problems()
    section, parts = as_mapping(value, where), dict[str, Any]()
    with problems.noting():
        check_keys(section, [*OWN_KEYS, "engine", "lanes", "adapters"], where)
    with problems.noting():
        if "source" not in section:
            raise ConfigError(f"{where}.source: is required")
    with problems.noting():
        model_section = {key: section[key] for key in OWN_KEYS if key in section}
        parts["model"] = build(ModelConfig, model_section, where, base, name=name)
    with problems.noting():
        parts["engine"], parts["engines"] = engine(section.get("engine"), f"{where}.engine")
    with problems.noting():
        merged = _merged(lanes, section.get("lanes"), f"{where}.lanes")
        parts["lanes"] = convert(merged, LanesConfig, f"{where}.lanes", base)
    with problems.noting():
        adapters = as_mapping(section.get("adapters"), f"{where}.adapters")
        check_keys(adapters, ["preload"], f"{where}.adapters")
        preload = adapters.get("preload") or {}
        parts["preload"] = convert(preload, Mapping[str, Path], f"{where}.adapters.preload", base)
    problems.raise_all()
    return ModelSettings(**parts)


def _merged(common: Any, particular_lanes: Any, where: str) -> dict[str, Any]:
    """Return the section `lanes` of a model: its own values, and those of the file's section `lanes` for the others."""
    shared, section = as_mapping(common, "lanes"), as_mapping(particular_lanes, where)
    return {
        lane: {**(shared.get(lane) or {}), **as_mapping(section.get(lane), f"{where}.{lane}")}
        for lane in dict.fromkeys((*shared, *section))
    }


def check_alone(document: Mapping[str, Any]) -> None:
    """Raise ConfigError if a file that has the section `models` also has a part of the short form for one model."""
    if "models" not in document:
        return
    problems = Problems()
    for name in (name for name in ALONE if name in document):
        with problems.noting():
            raise ConfigError(f"{name}: a file has either {name} or models, whose entries have their own settings")
    with problems.noting():
        if as_mapping(document.get("adapters"), "adapters").get("preload"):
            raise ConfigError("adapters.preload: with models, it belongs into models.NAME.adapters.preload")
    problems.raise_all()


def check_kv_places(models: Mapping[str, ModelSettings], sections: Mapping[str, str]) -> None:
    """Raise ConfigError if several engines that the gateway starts would listen at one address for the transfer of KV
    (`kv_listen`). `sections` are the places of the models' sections `engine` in the file."""
    taken: set[str] = set()
    for model, settings in models.items():
        place, engines = settings.engine.kv_listen, settings.engines
        if engines.addresses or place in ("", "auto") or (place.endswith(":0") and not place.startswith(UNIX)):
            continue
        if engines.replicas > 1 or place in taken:
            raise ConfigError(f"{sections[model]}.kv_listen: several engines cannot listen at {place}; write auto")
        taken.add(place)


def check_entry(section: str, name: str) -> None:
    """Raise ConfigError if an entry of a section of base models, virtual models or upstreams has a malformed name."""
    if not MODEL_NAME.fits(name):
        what = f"a name of a base model is {MODEL_NAME.words}"
        raise ConfigError(f"{section}: {name!r} cannot be the name of an entry: {what}")


def check_preloads(models: Mapping[str, ModelSettings], sections: Mapping[str, str]) -> None:
    """Raise ConfigError if an adapter that is loaded at start has a malformed name, that of a base model, or that of
    another adapter. `sections` has the section in which each model's adapters stand, such as `adapters`."""
    owners: dict[str, str] = dict.fromkeys(models, "")
    for model, settings in models.items():
        for name in settings.preload:
            place = f"{sections[model]}.preload"
            if not ADAPTER_NAME.fits(name):
                raise ConfigError(f"{place}: {name!r} cannot be the name of an adapter, which is {ADAPTER_NAME.words}")
            if name in owners:
                taken = f"also an adapter of {owners[name]}" if owners[name] else "the name of a base model"
                raise ConfigError(f"{place}.{name}: is {taken}")
            owners[name] = model
