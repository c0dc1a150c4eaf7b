"""Prefix keys of the pages of a sequence, by which the prefix cache finds them (see memory/prefix.py)."""

from __future__ import annotations

from engine.core.memory.prefix import activated_key, next_key, root_key
from engine.core.messages.requests import PrefixKey
from engine.core.state.sequence import Sequence


def page_keys(seq: Sequence, num_full_pages: int, block_size: int) -> list[PrefixKey]:
    """Return the prefix-cache keys of the first `num_full_pages` KV pages of a sequence, all of them full; none if the
    sequence shares no pages. New keys are computed and stored in `seq.page_keys`."""
    keys = seq.page_keys
    if not seq.shares_pages:
        return keys
    while len(keys) < num_full_pages:
        start = len(keys) * block_size
        keys.append(_page_key(seq, keys, start, start + block_size))
    return keys[:num_full_pages]


def _page_key(seq: Sequence, keys: list[PrefixKey], start: int, end: int) -> PrefixKey:
    """Return the prefix-cache key of the page that holds a sequence's tokens from `start` up to but without `end`, and
    follows the pages with the keys `keys`."""
    begin, adapter_hash = seq.adapter_begin, seq.request.adapter_hash
    parent = keys[-1] if keys else root_key(adapter_hash if not begin else None, seq.realm)
    if adapter_hash and begin and start <= begin < end:
        parent = activated_key(parent, adapter_hash, begin - start)
    return next_key(parent, seq.tokens[start:end])


def tail_key(seq: Sequence, block_size: int) -> PrefixKey | None:
    """Return the key by which a sequence with the same prompt finds the KV of the prompt's end, to copy its page: the
    key of the tokens after the last full page, without the prompt's last token, which every sequence computes to sample
    the next one. None means that there are none, or that the sequence shares no pages."""
    count = len(seq.request.prompt_ids) - 1
    full = count // block_size
    if not seq.shares_pages or full * block_size == count:
        return None
    return _page_key(seq, page_keys(seq, full, block_size), full * block_size, count)
