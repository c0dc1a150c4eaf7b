"""The section `cluster`: engines that a gateway starts on other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.routing.router import MAX_REPLICAS


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The engines that a gateway has Ray start, as actors on the nodes of a Ray cluster."""

    address: str = "auto"
    """Address of the cluster's head, as `host:6379` if the gateway runs on a node of the cluster, else as
    `ray://host:10001`. `auto` finds the cluster that runs on this machine, or that RAY_ADDRESS names."""
    min: int = 1
    """Number of engines of a base model that there are always."""
    max: int = 1
    """Number of engines of a base model up to which more are started when a lane's predicted delay nears its goal."""
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """What each engine takes of its node, by Ray's names: `CPU`, `GPU`, or a resource that the nodes declare."""

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max <= MAX_REPLICAS:
            raise ValueError(f"min and max must be 1 <= min <= max <= {MAX_REPLICAS}, not {self.min} and {self.max}")
        if not self.resources or any(amount <= 0 for amount in self.resources.values()):
            raise ValueError("resources must name what an engine takes, with amounts above 0, as in {GPU: 1}")


@dataclass(frozen=True, slots=True)
class RayShare:
    """How many engines of one base model Ray runs, and on what, where that differs from the section `cluster.ray`: None
    means no difference."""

    min: int | None = None
    max: int | None = None
    resources: Mapping[str, float] | None = None

    def within(self, common: RayConfig) -> RayConfig:
        """Return `common` with these values. Raises ValueError if they do not fit together."""
        return replace(
            common,
            min=common.min if self.min is None else self.min,
            max=common.max if self.max is None else self.max,
            resources=common.resources if self.resources is None else self.resources,
        )


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Where engines run beside the gateway's own machine."""

    ray: RayConfig | None = None
    """None means that Ray is not used."""
