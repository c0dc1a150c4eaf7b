"""Merges events of one request into one event, and splits such an event again. A message with several tokens of one
request costs little more than a message with one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from engine.core.messages.requests import TokenEvent, TokenLogprobs


def merge_events(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """Merge the events of several steps, given in order, so that each request has one. A final event without a token
    or logprobs of the prompt stays a separate event."""
    runs: list[list[TokenEvent]] = []
    own: dict[str, list[TokenEvent]] = {}
    for event in events:
        run = own.get(event.request_id)
        if run is not None and (event.tokens or event.prompt_logprobs):
            run.append(event)
        else:
            run = own[event.request_id] = [event]
            runs.append(run)
    return [merge_request_events(run) for run in runs]


def merge_request_events(events: Sequence[TokenEvent]) -> TokenEvent:
    """Merge the events of one request, given in order, into one: tokens and logprobs are joined, `num_cached` is the
    least and `device_seconds` the greatest value, the waits are those of the first event, all else of the last."""
    if len(events) == 1:
        return events[0]
    return events[-1]._replace(
        tokens=tuple(chain.from_iterable(event.tokens for event in events)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        prompt_logprobs=b"".join(event.prompt_logprobs for event in events),
        num_cached=min(event.num_cached for event in events),
        device_seconds=max(event.device_seconds for event in events),
        wait=events[0].wait,
        adapter_wait=events[0].adapter_wait,
    )


def split_per_token(event: TokenEvent) -> Sequence[TokenEvent]:
    """Split an event into one for each token, with its log probabilities. The first has those of the prompt, the last
    the finish reason and the refusal, and all the other fields. An event of fewer than two tokens stays whole."""
    if len(event.tokens) < 2:
        return (event,)
    rest = event.num_cached, None, event.device_seconds, event.wait, event.adapter_wait
    logprobs: list[tuple[TokenLogprobs, ...]] = [(item,) for item in event.logprobs] or [()] * len(event.tokens)
    pieces = [
        TokenEvent(event.request_id, (token,), own, None, *rest, proposals=event.proposals)
        for token, own in zip(event.tokens, logprobs, strict=True)
    ]
    if event.prompt_logprobs:
        pieces[0] = pieces[0]._replace(prompt_logprobs=event.prompt_logprobs)
    pieces[-1] = pieces[-1]._replace(finish_reason=event.finish_reason, refusal=event.refusal)
    return pieces
