"""Converts the live requests in the engine state to messages for operators."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.pb import engine_pb2 as pb
from engine.wire import LANES, origin_to_pb


def live_requests(state: EngineState, now: float, limit: int) -> pb.RequestsResponse:
    """Return the live requests: running ones first, then waiting ones, at most `limit` of them in full.

    One walk over all of them sums up the tokens that each tenant has reserved, so that a queue of ten thousand requests
    costs a few milliseconds.
    """
    reserved: Counter[str] = Counter()
    for seq in state.sequences.values():
        reserved[seq.request.tenant] += seq.request.origin.reserved_tokens
    shown = islice(chain(state.running.values(), state.waiting), limit)
    return pb.RequestsResponse(
        requests=[_live(seq, seq.id in state.running, now) for seq in shown],
        total=len(state.sequences),
        reserved_tokens=reserved,
    )


def _live(seq: Sequence, running: bool, now: float) -> pb.LiveRequest:
    request = seq.request
    return pb.LiveRequest(
        request_id=request.id,
        origin=origin_to_pb(request.origin),
        tenant=request.tenant,
        lane=LANES[request.lane],
        running=running,
        prompt_tokens=len(request.prompt),
        cached_tokens=seq.num_cached,
        generated_tokens=seq.num_generated,
        max_tokens=request.params.max_tokens,
        age_seconds=max(0.0, now - request.arrival),
        preemptions=seq.num_preemptions,
    )
