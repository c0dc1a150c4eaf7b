"""Tables of `loralane plan`: the candidates by arithmetic, and the plan with what its simulation gave."""

from __future__ import annotations

from rich.table import Table

from engine.core.predict.step_time import share_read
from engine.sizing import GIB
from lab.plans.planning import (
    HEADROOM,
    Candidate,
    Plan,
    Wish,
    adapters_beside,
    binds,
    kv_bytes_of,
    sequences,
    weights_of,
)
from lab.sim.tables import MISSING, duration, share

MILLION = 1e6


def candidates_table(wish: Wish, candidates: list[Candidate]) -> Table:
    table = Table(title=f"{wish.shape.name}, {wish.rate:,.3g} requests/s, by arithmetic")
    for column in ("engines", "device", "weights", "tokens/s each", "decodes at once", "mean ITL", "binds"):
        table.add_column(column, justify="left" if column in ("device", "weights", "binds") else "right")
    for column in ("an hour", "a million tokens"):
        table.add_column(column, justify="right")
    for candidate in candidates:
        hour = MISSING if candidate.cost is None else f"{candidate.cost:,.2f}"
        tokens = f"{candidate.most.rate * wish.traffic.output.mean:,.0f}"
        each = (
            str(candidate.steady.seqs),
            duration(candidate.steady.step_s),
            binds(candidate, wish.demand(candidate.core)),
        )
        table.add_row(
            _engines(candidate),
            candidate.device.name,
            candidate.form,
            tokens,
            *each,
            hour,
            _per_million(candidate, wish),
        )
    return table


def _engines(candidate: Candidate) -> str:
    """Return the text about a candidate's engines: their number or, with split requests, the numbers of prefill and
    decode engines."""
    prefill, decode = candidate.prefill, candidate.engines - candidate.prefill
    return f"{prefill} prefill + {decode} decode" if prefill else f"{candidate.engines}"


def _per_million(candidate: Candidate, wish: Wish) -> str:
    """Return the price of a million output tokens at the wished rate."""
    if candidate.cost is None:
        return MISSING
    return f"{candidate.cost / (wish.rate * wish.traffic.output.mean * 3600) * MILLION:,.3f}"


def _weights(all_bytes: float, fullest: float) -> str:
    """Return the text about the size of an engine's weights, given their bytes on all its devices together and on the
    fullest device, which is named only if several devices share the weights."""
    each = f", {fullest / GIB:,.1f} on the fullest device" if fullest < all_bytes else ""
    return f"{all_bytes / GIB:,.1f} GiB{each}"


def _experts_row(candidate: Candidate, wish: Wish) -> list[tuple[str, str]]:
    """Return, as a list, the table row about the share of a model's experts whose weights one engine step reads. Empty
    for a model without experts."""
    shape, demand = wish.shape, wish.demand(candidate.core)
    if shape.experts is None:
        return []
    tokens = candidate.steady.seqs * (1 + demand.prompt / demand.output)
    read = f"{share_read(shape.chosen, tokens):.0%} by a step of {tokens:,.0f} tokens"
    return [(f"of {shape.experts.count} experts, {shape.experts.top_k} a token", f"{read}, if all are chosen alike")]


def plan_table(plan: Plan, wish: Wish) -> Table:
    candidate, lane, shape, traffic = plan.candidate, plan.lane, wish.shape, wish.traffic
    kv, weights = kv_bytes_of(candidate, shape), weights_of(candidate, shape)
    table = Table(title=f"{_engines(candidate)} x {candidate.device.description}", show_header=False)
    lengths = {"mean": traffic.whole.mean, "p99": traffic.whole.p99, f"{shape.max_position:,}": shape.max_position}
    fit = {name: f"{sequences(candidate, tokens):,}" for name, tokens in lengths.items()}
    rows = [
        ("weights", candidate.form if weights is None else _weights(*weights)),
        ("KV of a token", f"{kv / 1024:,.0f} KiB"),
        ("tokens in pages", f"{candidate.core.num_pages * candidate.core.block_size:,}"),
        (
            f"sequences that fit, {1 - HEADROOM:.0%} spare",
            ", ".join(f"{count} ({name})" for name, count in fit.items()),
        ),
        ("if each had the full length preallocated", fit[f"{shape.max_position:,}"]),
        *_experts_row(candidate, wish),
        ("requests/s, at most", f"{candidate.most.rate:,.3g} each"),
        ("what binds", binds(candidate, wish.demand(candidate.core))),
        ("simulated: TTFT p50, p99", f"{duration(lane.ttft.p50)}, {duration(lane.ttft.p99)}"),
        ("simulated: ITL p50, p99", f"{duration(lane.itl.p50)}, {duration(lane.itl.p99)}"),
        ("in time: first tokens, gaps", f"{share(lane.ttft_attainment)}, {share(lane.itl_attainment)}"),
        ("device busy", " to ".join(dict.fromkeys(f"{part:.0%}" for part in plan.busy))),
    ]
    if wish.rank:
        adapters, host = adapters_beside(candidate, wish.demand(candidate.core), wish.rank)
        rows.append((f"adapters of rank {wish.rank}", f"{adapters:,} in pages beside KV, {host:,} in host memory"))
    if candidate.cost is not None:
        rows.append(
            ("price", f"{candidate.cost:,.2f} an hour, {_per_million(candidate, wish)} a million output tokens")
        )
    for row in rows:
        table.add_row(*row)
    return table
