"""Converts core types to messages of engine.proto and back."""

from __future__ import annotations

from engine.core.memory.adapters import HostAdapter
from engine.core.messages.grammar import Grammar, GrammarKind
from engine.core.messages.requests import (
    ErrorCode,
    FinishReason,
    KvSource,
    Lane,
    LaneMode,
    Origin,
    Pooling,
    PoolingKind,
    ProposalCount,
    Refusal,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from engine.pb import engine_pb2 as pb

PROTOCOL = 1
"""Version of `engine.proto`. It changes when an older gateway or engine would misunderstand a newer one."""
GATEWAY = "loralane-gateway"
"""gRPC metadata key of a session's id, by which the engine tells its gateways apart."""

_FINISH: dict[FinishReason | None, pb.FinishReason] = {
    None: pb.FINISH_REASON_NONE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    FinishReason.POOLED: pb.FINISH_REASON_POOLED,
}
LANES = {Lane.INTERACTIVE: pb.LANE_INTERACTIVE, Lane.BATCH: pb.LANE_BATCH}
LANE_MODES = {
    LaneMode.OPEN: pb.LANE_MODE_OPEN,
    LaneMode.PAUSED: pb.LANE_MODE_PAUSED,
    LaneMode.DRAINING: pb.LANE_MODE_DRAINING,
}
_POOLING = {PoolingKind.LAST: pb.Pooling.KIND_LAST, PoolingKind.MEAN: pb.Pooling.KIND_MEAN}
_POOLING_BACK = {number: kind for kind, number in _POOLING.items()}
_FINISH_BACK = {number: reason for reason, number in _FINISH.items()}


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        grammar=pb.Grammar(**{params.grammar.kind.value: params.grammar.text}) if params.grammar else None,
        prompt_logprobs=params.prompt_logprobs,
        single_steps=not params.speculates,
    )


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        grammar=_grammar_from_pb(message.grammar),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        speculates=not message.single_steps,
    )


def _grammar_from_pb(message: pb.Grammar) -> Grammar | None:
    kind = message.WhichOneof("text")
    return None if kind is None else Grammar(GrammarKind(kind), getattr(message, kind))


def adapter_to_pb(host: HostAdapter, load_seconds: float) -> pb.AdapterInfo:
    """Convert an adapter in host memory to a message. `load_seconds` is the time that reading and validating it
    took."""
    return pb.AdapterInfo(
        adapter=host.adapter_hash,
        rank=host.rank,
        target_modules=host.target_modules,
        pages=host.num_pages,
        bytes=host.num_bytes,
        load_seconds=load_seconds,
        invocation=host.invocation,
        warnings=host.warnings,
    )


def request_to_pb(request: Request) -> pb.Submit:
    """Convert a request to a message. Only time differences cross the wire, because clocks are unrelated: it holds the
    seconds from `arrival`, which a gateway leaves at 0, to `deadline`."""
    return pb.Submit(
        request_id=request.id,
        prompt=request.prompt_ids,
        params=params_to_pb(request.params),
        adapter=request.adapter_hash or "",
        lane=LANES[request.lane],
        priority=request.priority,
        tenant=request.tenant,
        weight=request.weight,
        deadline_seconds=None if request.deadline is None else request.deadline - request.arrival,
        ttft_seconds=request.ttft,
        itl_seconds=request.itl,
        whole=request.whole,
        expected_tokens=request.expected_tokens,
        origin=origin_to_pb(request.origin),
        produced=request.produced,
        moves=request.moves,
        suspect=request.suspect,
        cache_salt=request.cache_salt,
        pooling=_pooling_to_pb(request.pooling),
        num_scored=request.num_scored,
        prediction=request.prediction,
        kv_source=pb.KvSource(**request.kv_source._asdict()) if request.kv_source else None,
        request_class=request.request_class,
        class_weight=request.class_weight if request.request_class else None,
    )


def _pooling_to_pb(pooling: Pooling | None) -> pb.Pooling | None:
    if pooling is None:
        return None
    return pb.Pooling(
        kind=_POOLING[pooling.kind],
        dimensions=pooling.dimensions,
        normalize=pooling.normalize,
        shares_pages=pooling.shares_pages,
    )


def _pooling_from_pb(message: pb.Pooling) -> Pooling:
    return Pooling(_POOLING_BACK[message.kind], message.dimensions, message.normalize, message.shares_pages)


def origin_to_pb(origin: Origin) -> pb.Origin:
    return pb.Origin(
        id=origin.id,
        request_id=origin.request_id,
        key=origin.key,
        model=origin.model,
        adapter=origin.adapter,
        reserved_tokens=origin.reserved_tokens,
    )


def _origin_from_pb(message: pb.Origin) -> Origin:
    return Origin(message.id, message.request_id, message.key, message.model, message.adapter, message.reserved_tokens)


def lane_mode_from_pb(mode: pb.LaneMode) -> LaneMode:
    return next(known for known, number in LANE_MODES.items() if number == mode)


def request_from_pb(message: pb.Submit, arrival: float) -> Request:
    """Convert a message to a request. `arrival`, and so the deadline of the result, is on the engine's clock."""
    deadline = _optional(message, "deadline_seconds")
    return Request(
        id=message.request_id,
        prompt_ids=tuple(message.prompt),
        params=params_from_pb(message.params),
        adapter_hash=message.adapter or None,
        lane=Lane(message.lane),
        priority=message.priority,
        tenant=message.tenant,
        weight=message.weight if message.HasField("weight") else 1.0,
        arrival=arrival,
        deadline=None if deadline is None else arrival + deadline,
        ttft=_optional(message, "ttft_seconds"),
        itl=_optional(message, "itl_seconds"),
        origin=_origin_from_pb(message.origin),
        whole=message.whole,
        produced=tuple(message.produced),
        moves=message.moves,
        suspect=message.suspect,
        expected_tokens=message.expected_tokens if message.HasField("expected_tokens") else None,
        cache_salt=message.cache_salt,
        pooling=_pooling_from_pb(message.pooling) if message.HasField("pooling") else None,
        num_scored=message.num_scored,
        prediction=tuple(message.prediction),
        kv_source=_kv_source_from_pb(message.kv_source) if message.HasField("kv_source") else None,
        request_class=message.request_class,
        class_weight=message.class_weight if message.HasField("class_weight") else 1.0,
    )


def _kv_source_from_pb(message: pb.KvSource) -> KvSource:
    return KvSource(message.address, message.seconds, message.computes)


def event_to_pb(event: TokenEvent) -> pb.TokenEvent:
    # The common case, once a token: fields that would have their default are not named.
    if event.finish_reason is None and not (
        event.logprobs or event.wait or event.adapter_wait or event.prompt_logprobs or event.refusal or event.proposals
    ):
        return pb.TokenEvent(
            request_id=event.request_id,
            token_ids=event.tokens,
            cached_tokens=event.num_cached,
            device_seconds=event.device_seconds,
        )
    return pb.TokenEvent(
        request_id=event.request_id,
        token_ids=event.tokens,
        logprobs=[_logprobs_to_pb(item) for item in event.logprobs],
        finish_reason=_FINISH[event.finish_reason],
        cached_tokens=event.num_cached,
        wait_seconds=event.wait,
        adapter_wait_seconds=event.adapter_wait,
        error_code=event.refusal.code.value if event.refusal else "",
        error=event.refusal.message if event.refusal else "",
        retry_after_seconds=event.refusal.retry_after if event.refusal else None,
        device_seconds=event.device_seconds,
        vector=event.vector,
        prompt_logprobs=event.prompt_logprobs,
        proposals=[pb.ProposalCount(**one._asdict()) for one in event.proposals],
    )


def event_from_pb(message: pb.TokenEvent) -> TokenEvent:
    tokens, logprobs, finish, cached = message.token_ids, message.logprobs, message.finish_reason, message.cached_tokens
    # The common case, once a token. Logprobs of the prompt come before it, or together with the first tokens.
    if tokens and not (logprobs or finish or message.wait_seconds or message.prompt_logprobs or message.proposals):
        seconds = message.device_seconds
        return TokenEvent(message.request_id, tuple(tokens), num_cached=cached, device_seconds=seconds)
    return TokenEvent(
        request_id=message.request_id,
        tokens=tuple(tokens),
        logprobs=tuple(_logprobs_from_pb(item) for item in logprobs),
        finish_reason=_FINISH_BACK[finish],
        num_cached=cached,
        wait=message.wait_seconds,
        adapter_wait=message.adapter_wait_seconds,
        refusal=_refusal_from_pb(message) if message.error_code else None,
        device_seconds=message.device_seconds,
        vector=message.vector,
        prompt_logprobs=message.prompt_logprobs,
        proposals=tuple(ProposalCount(one.proposer, one.proposed, one.accepted) for one in message.proposals),
    )


def _refusal_from_pb(message: pb.TokenEvent) -> Refusal:
    return Refusal(ErrorCode(message.error_code), message.error, _optional(message, "retry_after_seconds"))


def _optional(message: pb.Submit | pb.TokenEvent, name: str) -> float | None:
    return getattr(message, name) if message.HasField(name) else None


def _logprobs_to_pb(item: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=item.logprob, top_ids=[t for t, _ in item.top], top_logprobs=[p for _, p in item.top]
    )


def _logprobs_from_pb(item: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(item.logprob, tuple(zip(item.top_ids, item.top_logprobs, strict=True)))
