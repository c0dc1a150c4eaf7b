"""The policy `learned`: a trained router predicts whether the small member suffices for a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from engine.core.messages.requests import Lane
from gateway.virtual_models.features import text_features
from gateway.virtual_models.policy import Asked, NoVector, Shadow, Step, Vector
from gateway.virtual_models.router import LearnedRouter
from gateway.virtual_models.router_source import router_source


@dataclass(frozen=True, slots=True)
class Learned:
    """Asks the router of a file for the probability that the small member suffices. Where it is below the threshold,
    the large one answers. If the chosen member fails before its first token, the other one is tried."""

    policy: ClassVar[str] = "learned"

    router: Path
    """File that `loralane route train` wrote. It is read again when it changes."""
    small: str
    large: str
    threshold: float | None = None
    """Probability from which on the small member answers. None means that of the file."""
    undecided: Literal["small", "large"] = "large"
    """Member that answers if the prompt's vector does not come, or not in time."""
    patience: float = 1.0
    """An interactive request waits for its vector at most this many times the TTFT goal of the small member."""
    shadow: Shadow | None = None

    def __post_init__(self) -> None:
        if self.small == self.large:
            raise ValueError("small and large must be two members")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be from 0 to 1, not {self.threshold}")
        if not self.patience > 0:
            raise ValueError(f"patience must be positive, not {self.patience}")
        router_source(self.router)

    @property
    def members(self) -> Sequence[str]:
        return (self.small, self.large)

    @property
    def embedder(self) -> str:
        """Name of the model that computes the prompts' vectors for the router. Empty means that the router needs
        none."""
        return self._current().file.embedder

    async def plan(self, request: Asked) -> Sequence[Step]:
        if len(request.members) < 2:
            return [Step(member, "only") for member in request.members]
        suffices, reason = await self._decide(request, self._current())
        first, second = (self.small, self.large) if suffices else (self.large, self.small)
        return (Step(first, reason), Step(second, "next"))

    def explain(self) -> str:
        router = self._current()
        bound = router.threshold if self.threshold is None else self.threshold
        source = f"the text and its vector by {router.file.embedder}" if router.needs_vector else "the text"
        return f"{self.small} if router {router.version} gives {bound:.3g} or more, from {source}; else {self.large}"

    def _current(self) -> LearnedRouter:
        return router_source(self.router).current()

    async def _decide(self, request: Asked, router: LearnedRouter) -> tuple[bool, str]:
        """Return whether the small member is to answer, and the reason: `small` or `large` if the router decided, else
        `late`, `no_vector` or `misfit`, because it could not."""
        try:
            vector = await self._vector(request, router) if router.needs_vector else None
            chance = router.probability(text_features(request.facts()), vector)
        except TimeoutError:
            return self.undecided == "small", "late"
        except NoVector:
            return self.undecided == "small", "no_vector"
        except ValueError:
            return self.undecided == "small", "misfit"
        suffices = chance >= (router.threshold if self.threshold is None else self.threshold)
        return suffices, "small" if suffices else "large"

    async def _vector(self, request: Asked, router: LearnedRouter) -> Vector:
        """Return the prompt's vector for the router. Raises TimeoutError if it does not come in time, and NoVector if
        it cannot come."""
        most = self.patience * request.state(self.small).ttft_s if request.lane is Lane.INTERACTIVE else None
        async with asyncio.timeout(most):
            return await request.vector(router.file.embedder, router.file.pooling)
