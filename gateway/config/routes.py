"""The section `routes` of the configuration: virtual models, each with the policy that chooses its members."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.config.file import ConfigError, Problems, as_mapping, build, read_each, resolve
from gateway.config.models import ModelSettings, check_entry
from gateway.virtual_models.cascade import Cascade
from gateway.virtual_models.learned import Learned
from gateway.virtual_models.policies import POLICIES
from gateway.virtual_models.policy import Policy

ROUTER = "router"
"""Name of the setting `router` of a learned policy. Errors about the embedding model that the router file names are
reported at this setting. The embedding model must be one of this gateway, because upstreams embed no chats."""


def read_routes(value: Any, env: Mapping[str, str], base: Path) -> dict[str, Policy]:
    """Convert the section `routes`: policies by the names of the virtual models. Raises ConfigError with all problems
    of all entries, except for members that do not exist (`check_routes`)."""
    section = as_mapping(resolve(value, env, "routes"), "routes")
    return read_each(section, lambda name, item: _policy(name, item, base))


def _policy(name: str, value: Any, base: Path) -> Policy:
    check_entry("routes", name)
    where = f"routes.{name}"
    section = dict(as_mapping(value, where))
    policy = section.pop("policy", None)
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigError(f"{where}.policy: must be one of {', '.join(POLICIES)}")
    return build(POLICIES[policy], section, where, base)


def check_routes(
    routes: Mapping[str, Policy], models: Mapping[str, ModelSettings], upstreams: Collection[str] = ()
) -> None:
    """Raise ConfigError, with all problems, if a virtual model has the name of a base model, an upstream or an adapter
    that is loaded at start, or if a member is none of these and no `base:adapter`."""
    problems = Problems()
    taken = {*models, *upstreams, *(adapter for settings in models.values() for adapter in settings.preload)}
    for name, policy in routes.items():
        with problems.noting():
            if name in taken:
                raise ConfigError(f"routes.{name}: is also the name of a base model, an adapter or an upstream")
        with problems.noting():
            if isinstance(policy, Cascade) and policy.accept.logprob is not None:
                _refuse_unscored(name, policy, upstreams)
        for place, member in named_members(policy):
            elsewhere = () if place == ROUTER else upstreams
            with problems.noting():
                if member not in elsewhere and home_of(member, models) is None:
                    kinds = "no base model" if place == ROUTER else "no base model, no upstream"
                    what = f"{member!r} is {kinds} and no adapter of adapters.preload"
                    raise ConfigError(f"routes.{name}.{place}: {what}; write a later adapter as BASE:ADAPTER")
    problems.raise_all()


def _refuse_unscored(name: str, policy: Cascade, upstreams: Collection[str]) -> None:
    """Raise ConfigError if an upstream is a member whose answers a cascade judges by log probabilities, because the
    gateway requests none from upstreams."""
    for member in policy.members[:-1]:
        if member in upstreams:
            raise ConfigError(f"routes.{name}.accept.logprob: {member!r} is an upstream and tells no log probabilities")


def named_members(policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield (setting, name) for each model that a policy names: its members, and those of its shadow, verifier and
    router."""
    yield from (("members", member) for member in policy.members)
    if policy.shadow is not None:
        yield "shadow.member", policy.shadow.member
    if isinstance(policy, Cascade) and policy.accept.verifier is not None:
        yield "accept.verifier.member", policy.accept.verifier.member
    if isinstance(policy, Learned) and policy.embedder:
        yield ROUTER, policy.embedder


def home_of(member: str, models: Mapping[str, ModelSettings]) -> str | None:
    """Return the name of the base model that serves a member; None means that it is no model of this gateway."""
    if member in models:
        return member
    owners = (name for name, settings in models.items() if member in settings.preload)
    if (owner := next(owners, None)) is not None:
        return owner
    base, colon, _ = member.rpartition(":")
    return base if colon and base in models else None


def virtual_names(routes: Mapping[str, Policy], models: Mapping[str, ModelSettings], model: str) -> frozenset[str]:
    """Return the names of the virtual models that the base model `model` represents in lists and checks. A virtual
    model is represented by the base model of its first member that this gateway serves or, if there is none, by the
    default model."""
    return frozenset(name for name, policy in routes.items() if _home(policy.members, models) == model)


def _home(members: Sequence[str], models: Mapping[str, ModelSettings]) -> str:
    homes = filter(None, (home_of(member, models) for member in members))
    return next(homes, next(iter(models)))
