"""The base models of a gateway: each with its engine, tokenizer, adapters and lanes."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from engine.core.fairness.shares import Shares
from engine.core.messages.requests import Lane
from engine.grammar_check.pool import GrammarPool
from engine.rpc.api import EngineApi
from gateway.adapters.record import AdapterRecord
from gateway.adapters.registry import AdapterRegistry
from gateway.core.errors import ApiError, Fault, model_not_found, unavailable
from gateway.core.routing import Catalog, ModelQuery, find, find_adapter, resolve
from gateway.core.tenants import Tenant
from gateway.requests.admission import RequestIntake
from gateway.requests.heartbeat import Heartbeat
from gateway.requests.job import GenerationJob
from gateway.requests.settings import ServiceSettings
from gateway.requests.types import GenerateRequest, Speech
from gateway.text.tokenizer import Tokenizer

MOST_TEMPLATES = 128
"""Maximum number of adapters' chat templates of one base model that are kept ready, which means compiled."""

MOST_BUILDS = 3
"""Maximum number of times that a request's job is built because the chat template of its adapter has changed."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that a caller may name."""

    name: str
    model: ServedModel
    """The base model that serves the name."""
    adapter: AdapterRecord | None = None
    """Adapter behind the name; None means the base model. For an alias, `name` differs from the adapter's name."""

    @property
    def root(self) -> str:
        """The adapter's name if this is an alias, the base model's name otherwise. For a virtual model, that is the
        base model that `ServedModels.cards` lists it with."""
        is_alias = self.adapter is not None and self.name in self.adapter.aliases
        return self.adapter.name if self.adapter and is_alias else self.model.name

    @property
    def parent(self) -> str | None:
        """The base model's name, or None for the base model itself."""
        return self.model.name if self.adapter else None

    @property
    def created(self) -> int:
        """When the adapter was first loaded or the gateway began to serve the base model, in Unix seconds."""
        return int(self.adapter.created if self.adapter else self.model.created)


class ServedModel:
    """One base model: its names, its engine (or a pool of engines), its tokenizer, its adapters and its lanes."""

    def __init__(
        self,
        engine: EngineApi,
        tokenizer: Tokenizer,
        adapters: AdapterRegistry,
        *,
        grammars: GrammarPool,
        settings: ServiceSettings | None = None,
    ) -> None:
        """Create the model, which does not start or close what it is given. `adapters` knows the model's names.
        `settings` are the gateway's, with the lanes' capacities and the tool parser of this model."""
        settings = settings or ServiceSettings()
        self.names = adapters.catalog.bases
        """Names of the base model, the canonical one first."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.adapters = adapters
        self._intake_with = partial(RequestIntake, engine, adapters=adapters, settings=settings, grammars=grammars)
        self.intake = self._intake_with(tokenizer)
        self._voices: OrderedDict[str, tuple[Tokenizer, RequestIntake]] = OrderedDict()
        """The tokenizer and intake for each chat template of adapters; the template used last is the last."""
        self.heartbeat = Heartbeat(engine)
        self.lane_capacity = settings.lane_capacity
        """Maximum number of answers in progress, by lane. A lane that is missing has no limit."""
        self.created = time.time()
        self._in_lane = {lane: Shares() for lane in Lane}
        self._template = ""
        """The adapter's chat template that renders chats. Empty means the base model's."""
        self._own = self  # what `for_adapter` returns is a copy, which refers to the model itself

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def speech(self) -> Speech:
        return Speech(self.tokenizer, self.intake.dialect)

    def fingerprint(self, adapter: AdapterRecord | None) -> str:
        """Return the `system_fingerprint`, a short text that differs if the base model, its numeric type, the engine's
        backend or the content of the adapter (None: no adapter) differs."""
        info = self.engine.info
        return _base_print(info.model_hash, info.dtype, info.backend) + (f"_{adapter.version[:10]}" if adapter else "")

    def for_adapter(self, name: str) -> ServedModel:
        """Return this model as requests of the adapter `name` see it: it renders chats with the adapter's chat
        template, and reads answers as that template wants. It is the model itself if the adapter has none of its
        own. A load of the adapter may change its template later (see `build_job`)."""
        template = self.adapters.chat_template(name)
        if not template:
            return self._own
        seen = copy(self._own)
        seen._template = template
        seen.tokenizer, seen.intake = self._own._voice(template)
        seen.__dict__.pop("speech", None)
        return seen

    async def build_job(
        self,
        tenant: Tenant,
        request: GenerateRequest,
        adapter: AdapterRecord | None,
        lane: Lane,
        engine_wait: float | None = None,
    ) -> tuple[ServedModel, GenerationJob]:
        """Build the job of a request that `RequestIntake.check` has passed, and return it with this model as the
        adapter in the job sees it. The job is built again if the adapter got another chat template meanwhile, because
        a version must read a prompt that its own template wrote.

        Raises what `RequestIntake.check` and `build_job` raise, and ApiError (ENGINE_UNAVAILABLE) if the template
        changed during each of MOST_BUILDS attempts.
        """
        seen = self
        for _ in range(MOST_BUILDS):
            job = await seen.intake.build_job(tenant, request, adapter, lane, engine_wait)
            if job.adapter is None or seen._template == self.adapters.chat_template(job.adapter.name):
                return seen, job
            seen = self.for_adapter(job.adapter.name)
            seen.intake.check(tenant, request)  # the other template may know no tools, or no reasoning
        raise unavailable(Fault.ENGINE_UNAVAILABLE, "the chat template of the adapter keeps changing; try again")

    def _voice(self, template: str) -> tuple[Tokenizer, RequestIntake]:
        voice = self._voices.pop(template, None)
        if voice is None:
            tokenizer = self.tokenizer.with_template(template)
            voice = tokenizer, self._intake_with(tokenizer)
        self._voices[template] = voice
        if len(self._voices) > MOST_TEMPLATES:
            self._voices.popitem(last=False)
        return voice

    @contextmanager
    def answering(self, lane: Lane, tenant: Tenant, answers: int) -> Iterator[None]:
        """Count `answers` more answers of a tenant as in progress in a lane during the block."""
        shares = self._in_lane[lane]
        shares.add(tenant.name, tenant.weight, answers)
        try:
            yield
        finally:
            shares.remove(tenant.name, answers)

    def refusal(self, lane: Lane, tenant: Tenant, answers: int) -> str:
        """Return a message that says why the lane has no capacity for so many answers; empty means that it has."""
        capacity, shares = self.lane_capacity.get(lane), self._in_lane[lane]
        if capacity is None or shares.admits(tenant.name, answers, capacity):
            return ""
        held = shares.held(tenant.name)
        return f"{shares.total} answers are on their way, {held} of them of this tenant, and it has room for {capacity}"


class ServedModels:
    """All base models of a gateway, in the order of the configuration."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """`models` has at least one model, and no two have a name in common."""
        self._models = tuple(models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def default(self) -> ServedModel:
        """The first model of the configuration."""
        return self._models[0]

    def resolve(self, tenant: Tenant, query: ModelQuery) -> tuple[ServedModel, AdapterRecord | None]:
        """Return the base model and the adapter's record (None: no adapter) that a request names. Raises ApiError:
        MODEL_NOT_FOUND, also if the tenant may not use it; INVALID_REQUEST, two names contradict each other."""
        target = resolve(query, self.catalogs, tenant)
        return self._with_adapter(self._models[target.model], target.adapter)

    def find(self, name: str) -> tuple[ServedModel, str | None] | None:
        """Return the base model and the adapter's name (None: no adapter) behind a name, for any tenant. None means
        that the name is unknown."""
        target = find(name, self.catalogs)
        return None if target is None else (self._models[target.model], target.adapter)

    def member(self, name: str) -> tuple[ServedModel, AdapterRecord | None]:
        """Return the base model and the adapter's record (None: no adapter) of a member that the operator chose, for
        any tenant. Raises ApiError (MODEL_NOT_FOUND) if the name is unknown."""
        found = self.find(name)
        if found is None:
            raise model_not_found(name)
        return self._with_adapter(*found)

    def _with_adapter(self, model: ServedModel, adapter: str | None) -> tuple[ServedModel, AdapterRecord | None]:
        return (model, None) if adapter is None else (model.for_adapter(adapter), model.adapters.records[adapter])

    def likely(self, tenant: Tenant, query: ModelQuery) -> ServedModel:
        """Return the base model that will serve a request, whose tokenizer decodes a prompt to echo before the request
        runs. If `resolve` raises, as `Gateway.generate` then will, too, return the default one."""
        if len(self._models) == 1:
            return self.default
        try:
            return self.resolve(tenant, query)[0]
        except ApiError:
            return self.default

    def speech(self, tenant: Tenant, query: ModelQuery) -> Speech:
        """Return how to read the answers to a request, as far as that is known before it runs. The member of a virtual
        model that will answer is not chosen yet: its answers count as having tool calls apart, so that nothing is
        refused for want of a parser. Raises what `resolve` raises."""
        model, _ = self.resolve(tenant, query)
        is_virtual = query.model in model.adapters.catalog.virtual
        return Speech(model.tokenizer, None, calls_apart=True) if is_virtual else model.speech

    def sampled(self, tenant: Tenant, request: GenerateRequest) -> GenerateRequest:
        """Return a request with the sampling parameters of the model that it names, as far as these are known before it
        runs: the member of a virtual model that will answer is not chosen yet. Raises what `resolve` raises."""
        model, _ = self.resolve(tenant, request.model)
        is_virtual = request.model.model in model.adapters.catalog.virtual
        return request if is_virtual else model.intake.with_defaults(request)

    def cards(self, tenant: Tenant) -> list[ModelCard]:
        """Return the models that a tenant may name, for the lists of models in the API: for each base model its first
        name, its adapters and aliases, and the virtual models in its catalog."""
        catalogs = self.catalogs
        cards = []
        for position, (model, catalog) in enumerate(zip(self._models, catalogs, strict=True)):
            if tenant.may_use_base(catalog.bases):
                cards.append(ModelCard(model.name, model))
            for name in (*sorted(catalog.adapters), *sorted(catalog.aliases)):
                target = find_adapter(name, catalogs)
                if target is None or target.model != position or target.adapter is None:
                    continue
                if catalog.permits(tenant, target.adapter):
                    cards.append(ModelCard(name, model, model.adapters.records[target.adapter]))
            cards += [ModelCard(name, model) for name in sorted(catalog.virtual) if tenant.may_use_virtual(name)]
        return cards

    @property
    def catalogs(self) -> tuple[Catalog, ...]:
        """The catalog of each base model: the names of the model and of its adapters, in live views of the
        registries."""
        return tuple(model.adapters.catalog for model in self._models)


@lru_cache(maxsize=4)
def _base_print(model_hash: str, dtype: str, backend: str) -> str:
    return "fp_" + hashlib.sha256(f"{model_hash} {dtype} {backend}".encode()).hexdigest()[:10]
