"""Links between engines, over which KV moves: their data sheets, and transfers on a virtual clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

LINK_SHARE = 0.8
"""Assumed fraction of a link's bandwidth that copies of whole pages reach."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link over which a device sends or receives. Rates are for one direction, by the data sheet."""

    name: str
    bytes_per_s: float
    latency_s: float
    """Seconds until a copy's first byte arrives, plus those until the receiver notices that all bytes have arrived."""

    @property
    def reached(self) -> float:
        """Bandwidth, in bytes per second, that copies of KV pages reach on this link."""
        return LINK_SHARE * self.bytes_per_s


LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink", 450e9, 20e-6),
        Link("pcie5", 63e9, 30e-6),
        Link("infiniband-400", 50e9, 50e-6),
        Link("ethernet-100", 12.5e9, 200e-6),
        Link("ethernet-10", 1.25e9, 200e-6),
    )
}
"""Links by name. NVLink: half of the 900 GB/s that NVIDIA's data sheet of the H100 SXM gives for both directions. PCIe:
16 lanes of generation 5 (32 GT/s, 128b/130b). InfiniBand NDR and Ethernet: their names' bits per second. Latencies are
assumed: microseconds of the wire, and the calls and polls of software at both ends."""


class Transfers:
    """Simulates the copies of KV between replicas on a virtual clock. Each replica sends over one link and receives
    over one, each of which carries one copy at a time, in the order in which they were begun."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sends_until: defaultdict[int, float] = defaultdict(float)
        self._receives_until: defaultdict[int, float] = defaultdict(float)
        self.bytes = 0.0
        """Bytes of all copies."""

    def send(self, source: int, target: int, num_bytes: float, ready: float) -> float:
        """Simulate a copy of `num_bytes` that are ready at `ready` from one replica to another, and return when all
        have arrived. Both times are in virtual seconds."""
        begin = max(ready, self._sends_until[source], self._receives_until[target])
        end = begin + num_bytes / self._link.reached
        self._sends_until[source] = self._receives_until[target] = end
        self.bytes += num_bytes
        return end + self._link.latency_s
