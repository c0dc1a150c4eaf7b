"""A gateway without a model or a Redis: an engine that says what it is told to, and a limiter that keeps count."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from file_fakes import build_files
from openai import AsyncOpenAI
from redis.asyncio import Redis
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine.core.config import BATCH_GOALS, INTERACTIVE_GOALS, LaneGoals
from engine.core.messages.requests import (
    ErrorCode,
    FinishReason,
    Lane,
    LaneMode,
    ProposalCount,
    Refusal,
    Request,
    TokenEvent,
    TokenLogprobs,
)
from engine.executor.fake import FAKE_HIDDEN, fake_rows, fake_vector
from engine.grammar_check.pool import GrammarPool
from engine.pb import engine_pb2 as pb
from engine.rpc.api import AdapterRejected
from engine.rpc.stream import EngineUnavailable, Handover
from engine.rpc.target import EngineTarget
from engine.rpc.wire import LANE_MODES, LANES, origin_to_pb
from gateway.accounts.record import ACCOUNTS
from gateway.accounts.registry import AccountRegistry
from gateway.adapters.admin import AdapterAdmin
from gateway.adapters.record import ADAPTERS
from gateway.adapters.registry import AdapterRegistry
from gateway.adapters.sources import LocalSources
from gateway.api_schema.engines import EngineOverview
from gateway.audit.log import AuditLog
from gateway.audit.store import MemoryAuditStore
from gateway.batches.eta import EtaEstimator
from gateway.batches.service import Batches
from gateway.batches.store import BatchStore
from gateway.core.administrators import Administrator, AdminRole
from gateway.core.billing import BillingConfig, Price
from gateway.core.limits import Limits
from gateway.core.tenants import ADMIN_TENANT, Principal, Tenant, hash_key, key_id
from gateway.core.usage import UsageRow, day_of
from gateway.engines.directory import EngineDirectory
from gateway.engines.member import MEMBERS
from gateway.files.service import Files
from gateway.http.app import create_app
from gateway.http.settings import PortSettings
from gateway.limiter.base import Grant, ReserveRequest
from gateway.limiter.local import LocalLimiter
from gateway.observe.latency import LatencyWindow
from gateway.observe.metrics import Metrics
from gateway.observe.model_operations import ModelOperations
from gateway.observe.operations import Operations
from gateway.registry.gateways import GatewayDirectory
from gateway.registry.memory import MemoryRecordStore
from gateway.requests.backend import Observer
from gateway.requests.record import RequestRecord
from gateway.requests.route_runner import RouteTable
from gateway.requests.served_model import ServedModel, ServedModels
from gateway.requests.service import Gateway, ServiceSettings
from gateway.responses.service import Responses
from gateway.responses.store import ResponseStore
from gateway.routing.news import Role
from gateway.services import Services
from gateway.text.tokenizer import Tokenizer
from gateway.usage.report import UsageAdmin

BASE = "tiny"
DEFAULT_GOALS = {Lane.INTERACTIVE: INTERACTIVE_GOALS, Lane.BATCH: BATCH_GOALS}
CONTEXT = 256
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
EOS = 0
AWAY = "redis://127.0.0.1:1"
"""Address at which no Redis answers."""
DEVICE_SECONDS = 0.002
"""Device time of each event that has tokens."""
ENGINE_WAIT_SECONDS = 0.2
"""How long requests wait for an engine that is not ready."""
PATIENT = ServiceSettings(engine_wait=ENGINE_WAIT_SECONDS, request_timeout=None, first_token_timeout=None)
"""Settings without time limits of the gateway's own: a machine that is busy enough lets two minutes pass."""
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('an assistant cannot begin') }}{% endif %}"
    "{% if tools %}<|system|>Call these by <tool_call>: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ACME = Tenant("acme")
GLOBEX = Tenant("globex", adapters=("pirate",), limits=Limits(requests_per_minute=3, tokens_per_minute=200))
BILLING = BillingConfig(
    device_hour=Decimal("3.60"),
    prices=(
        Price(Decimal("0.30"), Decimal("1.10"), cached=Decimal("0.03"), adapter="p*"),
        Price(Decimal("0.10"), Decimal("0.40"), lane="batch"),
        Price(Decimal("0.20"), Decimal("0.80")),
    ),
)
INITECH = Tenant("initech")
KEYS = {"sk-acme": ACME, "sk-globex": GLOBEX, "sk-initech": INITECH, "sk-admin": ADMIN_TENANT}


@cache
def tiny_tokenizer(reverse: bool = False) -> Tokenizer:
    """Four special tokens and one token a byte, so that most characters outside ASCII are several tokens. `reverse`
    gives the bytes other ids, as in the tokenizer of another model."""
    return byte_tokenizer(TEMPLATE, reverse=reverse)


def byte_tokenizer(template: str, special: Sequence[str] = (), *, reverse: bool = False) -> Tokenizer:
    """Return a tokenizer like the tiny one, with another template and `special` tokens beside its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    vocab = {token: number for number, token in enumerate([*SPECIAL, *alphabet, *special])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *special)])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[0], extra_special_tokens=SPECIAL[1:], chat_template=template
    )
    return Tokenizer(hf)


def ids_of(text: str) -> tuple[int, ...]:
    return tiny_tokenizer()._encode(text, False)


class FakeStream:
    """A `PlacedStream`, of a request that is under way before it is read."""

    def __init__(self, events: AsyncGenerator[list[TokenEvent], None], ended: Callable[[], object]) -> None:
        self.life, self.engine, self.reason, self.handover = "first", "engine-0", "home", None
        self._events = events
        self._ended = ended

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        return await anext(self._events)

    async def aclose(self) -> None:
        await self._events.aclose()
        self._ended()


class FakeEngine:
    """An `EngineApi` that answers every request with `reply`, a few tokens an event."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or tiny_tokenizer()
        facts = {
            "max_model_len": CONTEXT,
            "vocab_size": 260,
            "hidden_size": FAKE_HIDDEN,
            "dtype": "float32",
            "weights": "Q4_1",
        }
        self.info = pb.EngineInfo(model=BASE, model_hash="abc", **facts)
        self.ready = True
        self.reply: Callable[[Request], str] = lambda request: "Hello, world!"
        self.tokens_per_event = 1
        self.logprob = -0.5
        """Log probability of every token."""
        self.pause = 0.0
        """Seconds between events."""
        self.pauses: dict[str, float] = {}
        """The same for requests of some tenants, by name."""
        self.admit: asyncio.Event | None = None
        """Requests wait for it before their first event."""
        self.go_on: asyncio.Event | None = None
        """Requests wait for it after their first token."""
        self.fail_after: int | None = None
        """Events after which the engine is gone."""
        self.last_words: TokenEvent | None = None
        """Sent in place of an answer."""
        self.cached: Callable[[Request], int] = lambda request: 0
        self.proposals: tuple[ProposalCount, ...] = ()
        """Counts of proposals in each event with tokens."""
        self.requests: list[Request] = []
        self.ends: dict[str, str] = {}
        """How each request ended, by request id: finished, aborted or failed."""
        self.paths: dict[str, str] = {}
        """Loaded adapters: version to path."""
        self.rejected: str = ""
        self.warnings: tuple[str, ...] = ()
        self.loads: list[str] = []
        self.unloaded: list[str] = []
        self.pinned: set[str] = set()
        self.unpinnable: str = ""
        self.goals: dict[Lane, LaneGoals] = {}
        self.picture: pb.EngineStats | None = None
        """What `stats` answers, in place of a few figures."""
        self.generated: Counter[str] = Counter()
        """Tokens by request id."""
        self.cancelled: set[str] = set()
        self.modes = dict.fromkeys(Lane, LaneMode.OPEN)
        self.looks = 0
        self.draining = False
        self.restarts: list[float] = []
        self.added: list[tuple[str, str, str]] = []
        """Name, address and origin of the engines that were added to this one."""

    @property
    def open(self) -> int:
        return len(self.requests) - len(self.ends)

    async def wait_ready(self) -> None:
        while not self.ready:
            await asyncio.sleep(0.002)

    def overviews(self) -> list[EngineOverview]:
        counts = dict.fromkeys(("running", "waiting", "streams", "free_pages", "total_pages", "adapters_on_device"), 0)
        state = "draining" if self.draining else "serving"
        facts = {
            "problem": "",
            "model": BASE,
            "device": "cpu",
            "life": "first",
            "predicted_wait_seconds": 0.5,
            **counts,
        }
        own = EngineOverview("engine-0", "unix:/engine", state, **facts)
        added = [EngineOverview(name, address, "connecting", **facts, added_by=by) for name, address, by in self.added]
        return [own, *added]

    @property
    def addresses(self) -> dict[str, str]:
        return {overview.name: overview.address for overview in self.overviews()}

    async def add(self, name: str, target: EngineTarget, added_by: str, role: Role = Role.BOTH) -> None:
        self.added.append((name, target.address, added_by))

    async def remove(self, name: str) -> None:
        self.added = [engine for engine in self.added if engine[0] != name]

    async def drain(self, name: str, draining: bool, *, restart: bool = False, seconds: float = 0.0) -> None:
        if not self.ready:
            raise EngineUnavailable("gone")
        self.draining = draining
        self.restarts += [seconds] * restart

    def fate(self, life: str) -> pb.PreviousLife | None:
        return pb.PreviousLife(life=life) if self.ready else None

    async def learn_fate(self, life: str) -> pb.PreviousLife:
        await self.wait_ready()
        return pb.PreviousLife(life=life)

    def generate(self, request: Request, session: str = "", handover: Handover | None = None) -> FakeStream:
        self.requests.append(request)
        return FakeStream(self._arriving(request), lambda: self.ends.setdefault(request.id, "aborted"))

    async def _arriving(self, request: Request) -> AsyncGenerator[list[TokenEvent], None]:
        end = "aborted"
        try:
            await self._wait(self.admit, request)
            for number, event in enumerate(self._events(request)):
                if request.id in self.cancelled:
                    end = "cancelled"
                    refusal = Refusal(ErrorCode.CANCELLED, "an administrator cancelled the request")
                    yield [TokenEvent(request.id, finish_reason=FinishReason.ERROR, refusal=refusal)]
                    return
                if number == self.fail_after:
                    end = "failed"
                    raise EngineUnavailable("gone")
                if event.finish_reason is not None:
                    end = "finished"
                self.generated[request.id] += len(event.tokens)
                yield [event]
                await asyncio.sleep(self.pauses.get(request.tenant, self.pause))
                if number == 1:
                    await self._wait(self.go_on, request)
        finally:
            self.ends[request.id] = end

    async def _wait(self, event: asyncio.Event | None, request: Request) -> None:
        while event is not None and not event.is_set() and request.id not in self.cancelled:
            await asyncio.sleep(0.002)

    async def live_requests(self, limit: int) -> pb.RequestsResponse:
        self._check_ready()
        self.looks += 1
        live = [request for request in self.requests if request.id not in self.ends]
        reserved: Counter[str] = Counter()
        for request in live:
            reserved[request.tenant] += request.origin.reserved_tokens
        shown = map(self._live, live[:limit])
        return pb.RequestsResponse(requests=shown, total=len(live), reserved_tokens=reserved)

    def _live(self, request: Request) -> pb.LiveRequest:
        return pb.LiveRequest(
            request_id=request.id,
            origin=origin_to_pb(request.origin),
            tenant=request.tenant,
            lane=LANES[request.lane],
            running=bool(self.generated[request.id]),
            prompt_tokens=len(request.prompt_ids),
            generated_tokens=self.generated[request.id],
            max_tokens=request.params.max_tokens,
            age_seconds=1.5,
        )

    async def cancel(self, request_ids: Iterable[str]) -> int:
        self._check_ready()
        found = {request_id for request_id in request_ids if request_id not in self.ends}
        self.cancelled |= found
        return len(found)

    async def set_lane(self, lane: Lane, mode: LaneMode) -> None:
        self._check_ready()
        self.modes[lane] = mode

    async def set_goals(self, lane: Lane, goals: LaneGoals) -> None:
        self._check_ready()
        self.goals[lane] = goals

    def _check_ready(self) -> None:
        if not self.ready:
            raise EngineUnavailable("gone")

    def _events(self, request: Request) -> list[TokenEvent]:
        cached = self.cached(request)
        admission = TokenEvent(request.id, num_cached=cached)
        if self.last_words is not None:
            return [self.last_words]
        if request.pooling is not None:
            vector = fake_vector(request.adapter_hash, request.pooling, list(request.prompt_ids))
            facts = {"device_seconds": DEVICE_SECONDS, "vector": vector}
            return [admission, TokenEvent(request.id, finish_reason=FinishReason.POOLED, **facts)]
        params = request.params
        scores = self._prompt_logprobs(request)
        if not params.max_tokens:
            *scores, last = scores or [TokenEvent(request.id, device_seconds=DEVICE_SECONDS)]
            return [admission, *scores, last._replace(finish_reason=FinishReason.LENGTH)]
        tokens = [*self.tokenizer._encode(self.reply(request), False), *([] if params.ignore_eos else [EOS])]
        whole = len(tokens) <= params.max_tokens and not params.ignore_eos
        tokens = tokens[len(request.produced) : params.max_tokens]
        steps = [tuple(tokens[i : i + self.tokens_per_event]) for i in range(0, len(tokens), self.tokens_per_event)]
        reason = FinishReason.STOP if whole else FinishReason.LENGTH
        events = [
            TokenEvent(
                request.id,
                step,
                self._logprobs(request, step),
                reason if number == len(steps) else None,
                cached,
                device_seconds=number * DEVICE_SECONDS,
                proposals=self.proposals,
            )
            for number, step in enumerate(steps, 1)
        ]
        return [admission, *scores, *events]

    def _prompt_logprobs(self, request: Request) -> list[TokenEvent]:
        """The log probabilities of a prompt, `tokens_per_event` in an event."""
        width, prompt = request.params.prompt_logprobs, list(request.prompt_ids)
        if width is None:
            return []
        rows = list(fake_rows(request.adapter_hash, prompt, width))
        size = self.tokens_per_event
        parts = [b"".join(rows[i : i + size]) for i in range(request.num_scored, len(rows), size)]
        return [TokenEvent(request.id, prompt_logprobs=part, device_seconds=DEVICE_SECONDS) for part in parts]

    def _logprobs(self, request: Request, step: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        count = request.params.logprobs
        if count is None:
            return ()
        return tuple(TokenLogprobs(self.logprob, tuple((other, -0.5 - other) for other in range(count))) for _ in step)

    async def load_adapter(self, path: str) -> pb.AdapterInfo:
        await asyncio.sleep(0)
        if not self.ready:
            raise EngineUnavailable("gone")
        if self.rejected:
            raise AdapterRejected(self.rejected)
        version = content_hash(Path(path))
        self.paths[version] = path
        self.loads.append(version)
        fields = {"rank": 8, "target_modules": ["q_proj", "v_proj"], "pages": 3, "bytes": 1000}
        return pb.AdapterInfo(adapter=version, warnings=self.warnings, **fields)

    async def unload_adapter(self, adapter: str, drain_seconds: float) -> int:
        if not self.ready:
            raise EngineUnavailable("gone")
        self.paths.pop(adapter, None)
        self.pinned.discard(adapter)
        self.unloaded.append(adapter)
        return 2

    async def pin_adapter(self, adapter: str, pinned: bool) -> None:
        if not self.ready:
            raise EngineUnavailable("gone")
        if self.unpinnable:
            raise AdapterRejected(self.unpinnable)
        (self.pinned.add if pinned else self.pinned.discard)(adapter)

    async def stats(self, *, check: bool = False) -> pb.EngineStats:
        if not self.ready:
            raise EngineUnavailable("gone")
        if self.picture is not None:
            return self.picture
        adapters = [pb.AdapterStats(adapter=version, state="resident", pages=3, running=1) for version in self.paths]
        modes = {lane: LANE_MODES[mode] for lane, mode in self.modes.items()}
        lanes = [
            pb.LaneStats(lane=pb.LANE_INTERACTIVE, running=2, waiting=1, mode=modes[Lane.INTERACTIVE]),
            pb.LaneStats(lane=pb.LANE_BATCH, mode=modes[Lane.BATCH]),
        ]
        violations = ["page 7 is lost"] if check else []
        return pb.EngineStats(
            lanes=lanes,
            adapters=adapters,
            total_pages=100,
            free_pages=50,
            kv_pages=40,
            steps=7,
            violations=violations,
            max_resident_adapters=8,
        )


def content_hash(folder: Path) -> str:
    if not folder.is_dir():
        raise AdapterRejected(f"{folder} is not there")
    return hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file())
    ).hexdigest()


class CountingLimiter(LocalLimiter):
    """A local limiter that records every reservation and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.reserved: list[ReserveRequest] = []
        self.ends: dict[str, list[int]] = {}
        """How often and with how many tokens each lease was settled, by lease."""
        self.rows: list[UsageRow] = []
        """What each settlement counted."""
        self.delay = 0.0
        self.reachable = True

    @property
    def reserved_tokens(self) -> int:
        """Tokens that all reservations asked for."""
        return sum(request.tokens for request in self.reserved)

    async def reserve(self, request: ReserveRequest) -> Grant:
        await asyncio.sleep(self.delay)
        grant = await super().reserve(request)
        self.reserved.append(request)
        self.ends[grant.lease] = []
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            await asyncio.shield(self.settle(grant, 0))
            raise
        return grant

    async def settle(self, grant: Grant, actual_tokens: int) -> None:
        await asyncio.sleep(self.delay)
        self.ends[grant.lease].append(actual_tokens)
        if used := grant.request.used():
            self.rows.append(UsageRow(grant.request.tenant, day_of(grant.day), grant.request.row, used))
        await super().settle(grant, actual_tokens)

    async def trouble(self) -> str:
        return "" if self.reachable else "it gives no answer"


@dataclass
class FakeBooks:
    """`UsageBooks` of what a fake limiter was told."""

    limiter: CountingLimiter

    async def rows(self, tenant: str, since: date, until: date) -> AsyncGenerator[list[UsageRow], None]:
        yield [row for row in self.limiter.rows if tenant in ("", row.tenant) and since <= row.day <= until]


@dataclass
class Watcher:
    """An `Observer` that remembers."""

    records: list[RequestRecord] = field(default_factory=list)
    gaps: Counter[str] = field(default_factory=Counter)

    def inter_token(self, base_model: str, lane: Any, seconds: float) -> None:
        self.gaps[lane.name] += 1

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)


@cache
def grammar_pool() -> GrammarPool:
    """Return the grammar pool that all tests of this process share. Its workers end with the process."""
    return GrammarPool()


@dataclass
class GatewayApp:
    """A gateway with a fake engine and limiter, its HTTP application, and what tests look at afterwards."""

    engine: FakeEngine
    limiter: CountingLimiter
    adapters: AdapterRegistry
    gateway: Gateway
    watcher: Watcher
    metrics: Metrics
    app: Any
    usage: UsageAdmin
    operations: Operations
    services: Services

    def open_again(self, accounts: AccountRegistry | None = None, **settings_of_port: Any) -> None:
        """Make another application of the same services or, if `accounts` are given, with these."""
        self.services = replace(self.services, accounts=accounts or self.services.accounts)
        self.app = create_app(self.services, PortSettings(**settings_of_port))

    def client(self, key: str | None = "sk-acme") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test", headers=headers)

    def openai(self, key: str = "sk-acme") -> AsyncOpenAI:
        return AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=self.client(None), max_retries=0)

    async def assert_empty(self) -> None:
        """Check that nothing runs, every stream is closed, and every reservation ended exactly once."""
        await self.gateway.close()
        async with asyncio.timeout(10):  # a client over a socket has the answer's end before its task has ended
            while self.gateway.active:
                await asyncio.sleep(0.01)
        assert self.engine.open == 0
        assert [ends for ends in self.limiter.ends.values() if len(ends) != 1] == []
        assert await self.limiter.outstanding() == 0


class KeyRing(AccountRegistry):
    """A registry that also admits given callers, of which it has no records."""

    def __init__(self, callers: Mapping[str, Principal], changed: Callable[[Sequence[Tenant]], None]) -> None:
        super().__init__(MemoryRecordStore(ACCOUNTS), changed)
        self._callers = callers

    def authenticate(self, token: str | None) -> Principal:
        return self._callers.get(token or "") or super().authenticate(token)


def key_ring(
    owners: Mapping[str, Tenant] = KEYS, changed: Callable[[Sequence[Tenant]], None] = lambda tenants: None
) -> AccountRegistry:
    """Return a registry that admits the tenants and keys of `owners`, which is keyed by API key, besides those that are
    created in it."""
    owner = Administrator("boss", AdminRole.OWNER)
    principals = {
        key: Principal(tenant, key_id(hash_key(key)), owner if tenant is ADMIN_TENANT else None)
        for key, tenant in owners.items()
    }
    return KeyRing(principals, changed)


def principal(key: str = "sk-acme") -> Principal:
    return key_ring().authenticate(key)


def write_adapter(root: Path, name: str, content: str = "weights") -> Path:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text(f"{name} {content}")
    return folder


async def build_gateway_app(
    root: Path,
    settings: ServiceSettings | None = None,
    observers: Sequence[Observer] = (),
    limiter: Any = None,
    grammars: GrammarPool | None = None,
    others: Mapping[str, FakeEngine] = MappingProxyType({}),
    routes: RouteTable | None = None,
    accounts: AccountRegistry | None = None,
    files: Files | None = None,
    batches: Batches | None = None,
    responses: Responses | None = None,
    audit: AuditLog | None = None,
    listed_in: Redis | None = None,
    **settings_of_port: Any,
) -> GatewayApp:
    """Build a gateway that serves the base and the adapters pirate (alias captain) and poet, from folders below `root`,
    and the base models `others` without adapters, and virtual models for which the base stands.

    The gateway tells `observers` of a request before it tells its own. Files, batches and responses that are not given
    are on a Redis that is away; responses are never stored there. `listed_in` has the list of gateways.
    """
    engine, limiter, watcher = FakeEngine(), limiter or CountingLimiter(), Watcher()
    metrics = Metrics(dict.fromkeys((BASE, *others), DEFAULT_GOALS))
    await limiter.configure([ACME, GLOBEX])
    sources, settings = LocalSources([root]), settings or PATIENT
    served = []
    named = {(BASE, "tiny-alias"): engine, **{(name,): other for name, other in others.items()}}
    for names, its_engine in named.items():
        virtual = frozenset(routes.policies if routes and its_engine is engine else ())
        store = MemoryRecordStore(ADAPTERS)
        registry = AdapterRegistry(its_engine, store, sources, base_names=names, virtual_names=virtual)
        await registry.start()
        await registry.restore()
        pool, tokenizer = grammars or grammar_pool(), its_engine.tokenizer
        served.append(ServedModel(its_engine, tokenizer, registry, grammars=pool, settings=settings))
    adapters = served[0].adapters
    for name in ("pirate", "poet"):
        await adapters.load(name, str(write_adapter(root, name)))
    await adapters.alias("pirate", "captain")
    window = LatencyWindow(metrics.collect)
    directory = EngineDirectory(MemoryRecordStore(MEMBERS), {model.name: model.engine for model in served}, {})
    await directory.start()
    operations = Operations(
        [ModelOperations(one.name, one.engine, window, metrics.static) for one in served], directory
    )
    gateway = Gateway(
        ServedModels(served),
        AdapterAdmin([model.adapters for model in served], sources, {name: f"acme/{name}" for name in (BASE, *others)}),
        limiter,
        settings=settings,
        observers=(*observers, watcher, metrics, operations.recent),
        routes=routes,
    )
    usage = UsageAdmin(FakeBooks(limiter), BILLING)
    away = Redis.from_url(AWAY)
    files = files or build_files(away, root / "stored")
    batches = batches or Batches(BatchStore(away), files, 1)
    services = Services(
        gateway=gateway,
        accounts=accounts or key_ring(),
        metrics=metrics,
        operations=operations,
        gateways=GatewayDirectory(listed_in or away, gateway.lifecycle, lambda: len(gateway.live)),
        usage=usage,
        files=files,
        batches=batches,
        audit=audit or AuditLog(MemoryAuditStore()),
        etas=EtaEstimator(batches, gateway),
        responses=responses or Responses(ResponseStore(away), "never"),
    )
    app = create_app(services, PortSettings(**settings_of_port))
    return GatewayApp(engine, limiter, adapters, gateway, watcher, metrics, app, usage, operations, services)
