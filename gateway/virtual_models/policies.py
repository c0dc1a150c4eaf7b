"""All policies of virtual models, by the value of the setting `policy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gateway.virtual_models.by_lane import ByLane
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.fallback import Fallback
from gateway.virtual_models.learned import Learned
from gateway.virtual_models.policy import Policy
from gateway.virtual_models.split import Split

POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {kind.policy: kind for kind in (Split, Fallback, ByLane, Cascade, Learned)}
)


def members_of_batches(policy: Policy) -> Sequence[str]:
    """Return the members that may answer requests in the batch lane."""
    return (policy.batch,) if isinstance(policy, ByLane) else policy.members
