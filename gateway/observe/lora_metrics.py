"""Metrics of adapters under vLLM's names, from which the routers of clusters choose an engine that has an adapter.

The endpoint pickers of llm-d and of the Gateway API Inference Extension read `vllm:lora_requests_info`: an adapter in
`running_lora_adapters` needs no load, and an engine with fewer than `max_lora` adapters has room for another one. The
other metrics are those proposed in vllm-project/vllm#54830.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.pb import engine_pb2 as pb
from gateway.observe.vllm_requests import ENGINE, LABELS

LEVELS = {"resident": "gpu", "host": "cpu"}
"""Tier of an adapter in our statistics -> its level in vLLM's metrics. Levels of adapters on disk are not reported."""


def lora_metrics(stats: pb.EngineStats, names: Mapping[str, Sequence[str]], model: str) -> Iterator[Metric]:
    """Yield `vllm:lora_requests_info`, the level of each adapter in memory, the number and the maximum number of
    adapters in device memory, and the number and total time of copies to the device.

    Args:
        names: adapter hash -> all its names; an adapter is reported under each of them.
        model: name of the base model.
    """
    yield _requests_info(stats, names)
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded",
        "1 for each adapter in device memory (level gpu) or in host memory only (level cpu).",
        labels=(*LABELS, "adapter_name", "level", "pinned", "rank"),
    )
    for adapter in stats.adapters:
        if level := LEVELS.get(adapter.state):
            for name in names.get(adapter.adapter, ()):
                loaded.add_metric([model, ENGINE, name, level, str(adapter.pinned).lower(), str(adapter.rank)], 1)
    yield loaded
    resident = sum(adapter.state == "resident" for adapter in stats.adapters)
    yield _gauge("num_gpu_loaded_lora_adapters", "Adapters in device memory.", resident, model)
    most = stats.max_resident_adapters
    yield _gauge("max_gpu_lora_adapters", "Maximum number of adapters in device memory.", most, model)
    seconds = HistogramMetricFamily(
        "vllm:lora_adapter_load_seconds", "Time spent copying adapters to the device.", labels=LABELS
    )
    # The engine reports the number and the total of the loads, and not each of them, so the only bucket is +Inf.
    seconds.add_metric([model, ENGINE], [("+Inf", stats.adapter_loads)], stats.adapter_load_seconds)
    yield seconds


def _requests_info(stats: pb.EngineStats, names: Mapping[str, Sequence[str]]) -> Metric:
    """Return a gauge whose labels list the adapters that need no load, with running requests or idle in device memory,
    and those with waiting requests. The value is a Unix time, as in vLLM: the series with the highest is the newest."""
    ready = _names((entry.adapter for entry in stats.adapters if entry.running or entry.state == "resident"), names)
    waiting = _names((entry.adapter for entry in stats.adapters if entry.waiting), names)
    labels = {
        "max_lora": str(stats.max_resident_adapters),
        "running_lora_adapters": ready,
        "waiting_lora_adapters": waiting,
    }
    info = GaugeMetricFamily(
        "vllm:lora_requests_info", "Adapters in device memory, and adapters of waiting requests.", labels=list(labels)
    )
    info.add_metric(list(labels.values()), time.time())
    return info


def _names(hashes: Iterable[str], names: Mapping[str, Sequence[str]]) -> str:
    return ",".join(sorted({name for adapter_hash in hashes for name in names.get(adapter_hash, ())}))


def _gauge(name: str, help: str, value: float, model: str) -> Metric:
    family = GaugeMetricFamily(f"vllm:{name}", help, labels=LABELS)
    family.add_metric([model, ENGINE], value)
    return family
