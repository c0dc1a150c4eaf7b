"""The process that uses Ray: `python -m gateway.cluster.ray_worker ADDRESS HOST`. It reads the engines to run from
standard input, and reports their states. Ray ends them with it."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from gateway.cluster.reports import EngineReport, Reports, Wanted, WantedEngine

# It is a process of its own because Ray's library ends it some 60 s after the head of the cluster is gone.

LOOK_SECONDS = 0.5
"""Seconds between two looks at the actors."""
STOP_SECONDS = 15.0
"""Seconds that an actor may take to stop its engine before it is killed."""
WAITS_FOR_ROOM = "no node of the Ray cluster has room for it now"


@dataclass
class _Hosted:
    """An engine's actor, the placement group that is reserved for it, and the pending call of its method `address`."""

    wanted: WantedEngine
    group: Any
    actor: Any
    asked: Any
    report: EngineReport = field(default_factory=EngineReport)


class RayWorker:
    """Starts and stops actors until they are those in `wanted`, which another thread may set."""

    def __init__(self, ray: Any, host: type) -> None:
        """`ray` is the library, connected to a cluster; `host` is the class of the actors, with the methods `address`
        and `stop`."""
        self.wanted = Wanted({})
        self._ray = ray
        self._host = ray.remote(host)
        self._hosted: dict[str, _Hosted] = {}

    def look(self) -> Reports:
        """Start and stop actors as wanted, and return the state of all after at most LOOK_SECONDS."""
        wanted = self.wanted.engines
        self._stop([name for name, hosted in self._hosted.items() if wanted.get(name) != hosted.wanted])
        for name in wanted.keys() - self._hosted.keys():
            self._hosted[name] = self._start(wanted[name])
        asked = {hosted.asked: hosted for hosted in self._hosted.values()}
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_SECONDS) if asked else ([], [])
        for hosted in asked.values():
            if hosted.asked in answered:
                hosted.report = self._answer(hosted)
                hosted.asked = hosted.actor.address.remote()
            elif not (hosted.report.address or self._has_room(hosted)):
                hosted.report = EngineReport(problem=WAITS_FOR_ROOM)
        return Reports({name: hosted.report for name, hosted in self._hosted.items()})

    def close(self) -> None:
        """Stop all engines."""
        self._stop(list(self._hosted))

    def _start(self, wanted: WantedEngine) -> _Hosted:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([wanted.resources])
        rest = dict(wanted.resources)
        options = {
            "num_cpus": rest.pop("CPU", 0),
            "num_gpus": rest.pop("GPU", 0),
            "memory": rest.pop("memory", None),
            "resources": rest,
            "max_restarts": -1,  # Ray starts the actor again, on another node if need be
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        actor = self._host.options(**options).remote(wanted.orders)
        return _Hosted(wanted, group, actor, actor.address.remote())

    def _answer(self, hosted: _Hosted) -> EngineReport:
        """Return an engine's report from its actor's answer to `address`. If the call failed, the report's problem says
        that Ray starts the engine again."""
        try:
            address, problem = self._ray.get(hosted.asked)
        except self._ray.exceptions.RayError as error:
            return EngineReport(problem=f"Ray starts the engine again ({type(error).__name__})")
        return EngineReport(address, problem)

    def _has_room(self, hosted: _Hosted) -> bool:
        return self._ray.util.placement_group_table(hosted.group).get("state") == "CREATED"

    def _stop(self, names: list[str]) -> None:
        """Stop engines, kill their actors, and release the placement groups that were reserved for them."""
        gone = [self._hosted.pop(name) for name in names]
        stopping = [hosted.actor.stop.remote() for hosted in gone if hosted.report.address]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS)
        for hosted in gone:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(hosted.actor)
            self._ray.util.remove_placement_group(hosted.group)


def main() -> None:
    """Connect to the cluster, and run the engines that the parent names until standard input ends."""
    address, host = sys.argv[1:]
    parent = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints goes to the log, not between the reports
    import ray

    try:
        ray.init(address=address, namespace="loralane", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        _tell(parent, Reports(problem=f"cannot connect to Ray at {address}: {error}"))
        raise SystemExit(1) from None
    module, _, name = host.partition(":")
    worker = RayWorker(ray, getattr(importlib.import_module(module), name))
    _tell(parent, Reports())
    reading = threading.Thread(target=_read, args=(worker,), daemon=True)
    reading.start()
    last = Reports()
    while reading.is_alive():
        began = time.monotonic()
        reports = worker.look()
        if reports != last:
            last = reports
            _tell(parent, reports)
        reading.join(max(0.0, began + LOOK_SECONDS - time.monotonic()))
    worker.close()
    ray.shutdown()


def _read(worker: RayWorker) -> None:
    for line in sys.stdin.buffer:
        worker.wanted = msgspec.json.decode(line, type=Wanted)


def _tell(parent: BinaryIO, reports: Reports) -> None:
    with suppress(BrokenPipeError):  # the parent is gone; the end of standard input says so, too
        parent.write(msgspec.json.encode(reports) + b"\n")
        parent.flush()


if __name__ == "__main__":
    main()
