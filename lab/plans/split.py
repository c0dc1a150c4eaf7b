"""Candidates of a plan whose engines share the work of each request, by arithmetic: the first ones compute prompts, and
hand over their KV to the others, which continue the answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.core.predict.capacity import HEADROOM
from engine.sizing import GIB
from lab.devices.capacity import prefill_s, rate_within, serve
from lab.devices.device import copy_bytes_per_s
from lab.devices.links import Link
from lab.plans.planning import Candidate, Wish

HOST_BYTES = 16 * GIB
"""Maximum bytes of host memory in which an engine that splits requests with others holds KV on its way between them:
some 130,000 tokens of Llama 3.1 8B."""


def split_candidates(candidates: Iterable[Candidate], wish: Wish, link: Link) -> Iterator[Candidate]:
    """Yield, for each candidate whose engines can exchange KV (single devices that keep KV in host memory), a copy with
    prefill and decode engines. Yield nothing if answers have only one token."""
    for candidate in candidates:
        if candidate.ranks * candidate.stages == 1 and candidate.core.host_pages and wish.traffic.output.mean > 1:
            host_pages = min(candidate.core.host_pages, HOST_BYTES // candidate.device.page_bytes)
            yield _split(replace(candidate, core=replace(candidate.core, host_pages=host_pages)), wish, link)


def with_parts(candidate: Candidate, wish: Wish, prefill: int, decode: int) -> Candidate:
    """Return a candidate with `prefill` engines for prompts and `decode` engines for answers, and with the steady state
    computed anew for one of the latter."""
    answers = replace(wish.demand(candidate.core), prompt=0.0)
    steady = serve(candidate.device, candidate.core, answers, wish.rate / decode / HEADROOM)
    return replace(candidate, engines=prefill + decode, prefill=prefill, steady=steady)


def _split(candidate: Candidate, wish: Wish, link: Link) -> Candidate:
    """Return a copy of a candidate with the numbers of prefill and decode engines that serve the traffic. KV arrives
    over the link, and its copy takes time from decode steps."""
    demand = wish.demand(candidate.core)
    prompt, answers = max(1.0, demand.prompt), replace(demand, prompt=0.0)
    sent = prompt * candidate.device.page_bytes / candidate.core.block_size
    link_rate = link.reached / sent
    prompt_rate = min(link_rate, 1 / prefill_s(candidate.device, candidate.core, math.ceil(prompt), wish.rank))
    copied_s = sent / copy_bytes_per_s(candidate.device)

    def answer_rate(step_rate: float) -> float:
        return min(link_rate, 1 / (1 / step_rate + copied_s))

    within = answer_rate(rate_within(candidate.device, candidate.core, answers, wish.goals.itl_s))
    prefill, decode = (max(1, math.ceil(wish.rate / (HEADROOM * rate))) for rate in (prompt_rate, within))
    most = serve(candidate.device, candidate.core, answers, math.inf)
    served = min(prefill * prompt_rate, decode * answer_rate(most.rate)) / (prefill + decode)
    return with_parts(replace(candidate, most=replace(most, rate=served)), wish, prefill, decode)
