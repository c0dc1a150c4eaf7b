"""News of requests put together and taken apart: sent on, several tokens of one request cost little more than one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from engine.core.types import TokenEvent, TokenLogprobs


def joined(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """Events of several steps, those of one request in one. An end that brings no token stays by itself."""
    runs: list[list[TokenEvent]] = []
    own: dict[str, list[TokenEvent]] = {}
    for event in events:
        run = own.get(event.request_id)
        if run is not None and event.tokens:
            run.append(event)
        else:
            run = own[event.request_id] = [event]
            runs.append(run)
    return [united(run) for run in runs]


def united(events: Sequence[TokenEvent]) -> TokenEvent:
    """Events of one answer, in order, as one."""
    if len(events) == 1:
        return events[0]
    return events[-1]._replace(
        tokens=tuple(chain.from_iterable(event.tokens for event in events)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        num_cached=min(event.num_cached for event in events),
        device_seconds=max(event.device_seconds for event in events),
        wait=events[0].wait,
        adapter_wait=events[0].adapter_wait,
    )


def apart(event: TokenEvent) -> Sequence[TokenEvent]:
    """An event for each token, with its log probabilities; the last of them has the end."""
    if len(event.tokens) < 2:
        return (event,)
    rest = event.num_cached, None, event.device_seconds, event.wait, event.adapter_wait
    logprobs: list[tuple[TokenLogprobs, ...]] = [(item,) for item in event.logprobs] or [()] * len(event.tokens)
    pieces = [
        TokenEvent(event.request_id, (token,), own, None, *rest)
        for token, own in zip(event.tokens, logprobs, strict=True)
    ]
    pieces[-1] = pieces[-1]._replace(finish_reason=event.finish_reason, refusal=event.refusal)
    return pieces
