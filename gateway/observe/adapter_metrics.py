"""Prometheus metrics by adapter name: the traffic that a gateway counts, and where its engine holds each adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from engine.pb import engine_pb2 as pb
from gateway.core.errors import Fault
from gateway.observe.vllm_requests import MODEL
from gateway.requests.progress import Work
from gateway.requests.record import RequestRecord

MAX_ADAPTERS = 100
"""Maximum number of adapters with a label of their own. A gateway's counts label the adapters that it sees first; later
ones share `other`. An engine's gauges label the adapters that the most requests have used; the others are left out."""
OTHER = "other"
VERSION_DIGITS = 12
"""Number of leading hexadecimal digits of an adapter's content hash that metrics show as its version."""


class AdapterTraffic:
    """Counts ended requests, charged tokens, proposed tokens and invalid outputs by adapter name: of the first
    `MAX_ADAPTERS` names seen, and of all others together. Of requests of the base model, it counts only proposed tokens
    and invalid outputs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen: set[str] = set()
        self._requests = Counter(
            "loralane_adapter_requests",
            "Requests of an adapter that have ended, by finish reason.",
            [MODEL, "adapter", "finish"],
            registry=registry,
        )
        self._tokens = Counter(
            "loralane_adapter_tokens",
            "Tokens charged for requests of an adapter.",
            [MODEL, "adapter", "direction"],
            registry=registry,
        )
        self._invalid = Counter(
            "loralane_invalid_outputs",
            "Requests that ended because the model's output was NaN or infinite.",
            [MODEL, "adapter"],
            registry=registry,
        )
        self._proposals = Counter(
            "loralane_speculated_tokens",
            "Proposed tokens that steps computed for requests that have ended, by proposer and outcome.",
            [MODEL, "adapter", "proposer", "outcome"],
            registry=registry,
        )

    def finished(self, record: RequestRecord) -> None:
        """Count the proposed tokens and the invalid output of an ended request. If it used an adapter, also count the
        request itself and, if the caller is charged for them, its tokens."""
        served, work = record.served, record.work
        labels = (served.base_model, self._label(served.adapter) if served.adapter else "")
        self._count_proposals(labels, work)
        if record.outcome.error_code == Fault.MODEL_OUTPUT_INVALID.row.code:
            self._invalid.labels(*labels).inc()
        if not served.adapter:
            return
        self._requests.labels(*labels, record.outcome.finish).inc()
        if record.bill.is_due:
            self._tokens.labels(*labels, "prompt").inc(work.prompt_tokens)
            self._tokens.labels(*labels, "completion").inc(work.completion_tokens)

    def _count_proposals(self, labels: tuple[str, str], work: Work) -> None:
        for count in chain.from_iterable(work.proposals.values()):
            self._proposals.labels(*labels, count.proposer, "accepted").inc(count.accepted)
            self._proposals.labels(*labels, count.proposer, "refused").inc(count.proposed - count.accepted)

    def _label(self, name: str) -> str:
        if len(self._seen) < MAX_ADAPTERS:
            self._seen.add(name)
        return name if name in self._seen else OTHER


def adapter_gauges(stats: pb.EngineStats, names: Mapping[str, Sequence[str]]) -> Iterator[Metric]:
    """Yield gauges of the `MAX_ADAPTERS` adapters that the most requests used: tier, version, number of copies to the
    device and of reads from disk. `names` maps an adapter hash to the names under which the adapter is reported.

    They are gauges instead of counters, because the set of these adapters may change.
    """
    tier = GaugeMetricFamily("loralane_adapter_tier", "1 for the tier an adapter is in.", labels=["adapter", "tier"])
    copies = GaugeMetricFamily(
        "loralane_adapter_device_copies", "Times the adapter was copied to the device.", labels=["adapter"]
    )
    reads = GaugeMetricFamily(
        "loralane_adapter_disk_reads", "Times the adapter was read from disk.", labels=["adapter"]
    )
    info = GaugeMetricFamily(
        "loralane_adapter_info", "1; `version` begins the adapter's content hash.", labels=["adapter", "version"]
    )
    used = sorted(stats.adapters, key=lambda entry: (-entry.hits - entry.loads, entry.adapter))
    for entry in used[:MAX_ADAPTERS]:
        for name in names.get(entry.adapter, ()):
            tier.add_metric([name, entry.state], 1)
            copies.add_metric([name], entry.loads)
            reads.add_metric([name], entry.fetches)
            info.add_metric([name, entry.adapter[:VERSION_DIGITS]], 1)
    yield from (tier, copies, reads, info)
