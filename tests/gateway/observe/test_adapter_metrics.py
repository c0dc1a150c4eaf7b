"""Series by adapter have a bounded number of labels, whatever the number of adapters."""

from prometheus_client import CollectorRegistry
from records import make_record

from engine.core.messages.requests import ProposalCount
from engine.pb import engine_pb2 as pb
from gateway.observe.adapter_metrics import MAX_ADAPTERS, OTHER, AdapterTraffic, adapter_gauges
from gateway.requests.record import Charge


def record(adapter, **fields):
    known = {"finish": "stop", "submitted": 1.0, "charge": Charge.DUE, "prompt_tokens": 3, "completion_tokens": 5}
    return make_record(base_model="tiny", adapter=adapter, **known | fields)


def test_traffic_is_counted_by_adapter_and_what_is_late_shares_a_label():
    registry = CollectorRegistry()
    traffic = AdapterTraffic(registry)
    for number in range(MAX_ADAPTERS + 2):
        traffic.finished(record(f"a{number}"))
    traffic.finished(record("a0", finish="error", charge=Charge.WAIVED))
    traffic.finished(record(None))

    def value(name, **labels):
        return registry.get_sample_value(f"loralane_adapter_{name}_total", {"model_name": "tiny", **labels})

    assert (value("requests", adapter="a0", finish="stop"), value("requests", adapter="a0", finish="error")) == (1, 1)
    assert value("tokens", adapter="a0", direction="completion") == 5, "what was given back was not charged"
    assert value("requests", adapter=OTHER, finish="stop") == 2
    assert value("tokens", adapter=OTHER, direction="prompt") == 6
    labels = {sample.labels["adapter"] for family in registry.collect() for sample in family.samples}
    assert len(labels) == MAX_ADAPTERS + 1


def test_proposed_tokens_are_counted_by_adapter_and_proposer():
    registry = CollectorRegistry()
    traffic = AdapterTraffic(registry)
    answers = {0: (ProposalCount("prompt", 9, 4), ProposalCount("grammar", 2, 2)), 1: (ProposalCount("prompt", 1, 1),)}
    traffic.finished(record("a0", proposals=answers))
    traffic.finished(record(None, proposals=answers))
    values = {
        tuple(sample.labels.values())[1:]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "loralane_speculated_tokens_total"
    }
    assert values == {
        (adapter, proposer, outcome): count
        for adapter in ("a0", "")
        for proposer, outcome, count in (
            ("prompt", "accepted", 5),
            ("prompt", "refused", 5),
            ("grammar", "accepted", 2),
            ("grammar", "refused", 0),
        )
    }


def test_the_engine_tells_of_the_adapters_that_were_used_most():
    adapters = [
        pb.AdapterStats(adapter=f"v{number}", state="host", hits=number, loads=number, fetches=1)
        for number in range(MAX_ADAPTERS + 50)
    ]
    names = {f"v{number}": [f"a{number}"] for number in range(MAX_ADAPTERS + 50)}
    names[f"v{MAX_ADAPTERS}"] = ["one", "two"]
    tier, copies, reads, info = adapter_gauges(pb.EngineStats(adapters=adapters), names)
    told = {sample.labels["adapter"]: sample.value for sample in copies.samples}
    assert len(told) == MAX_ADAPTERS + 1 and "a0" not in told and told["a149"] == 149
    assert told["one"] == told["two"] == MAX_ADAPTERS
    assert {sample.labels["tier"] for sample in tier.samples} == {"host"}
    assert {sample.value for sample in reads.samples} == {1}
    assert len(info.samples) == MAX_ADAPTERS + 1
    assert {"adapter": "one", "version": f"v{MAX_ADAPTERS}"} in [sample.labels for sample in info.samples]
