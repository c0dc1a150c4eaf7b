"""A fake engine that dies of a poisonous prompt, for one gateway or several."""

from __future__ import annotations

import asyncio

from engine.arrivals import EngineLost


class MortalEngine:
    """Wraps a fake engine that dies, with everything it is doing, of a poisonous prompt."""

    def __init__(self, engine, poison, same=None):
        """`same`: wraps another gateway's fake of the same engine. The two die together."""
        self.generate_within, self.poison = engine.generate, poison
        self.open = same.open if same else set()
        self.died_with = []
        """Numbers of requests that were under way at each death."""
        engine.generate = self.generate

    def generate(self, request):
        size = len(self.poison)
        is_deadly = self.poison in {request.prompt[at : at + size] for at in range(len(request.prompt))}
        return MortalStream(self, self.generate_within(request), is_deadly)

    def die(self):
        self.died_with.append(len(self.open))
        for stream in self.open:
            stream.is_lost = True


class MortalStream:
    def __init__(self, engine, stream, is_deadly):
        self.engine, self.stream, self.is_deadly = engine, stream, is_deadly
        self.is_lost = False
        engine.open.add(self)

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0.02)
        if self.is_deadly and not self.is_lost:
            self.engine.die()
        if self.is_lost:
            raise EngineLost("the engine stopped while the request ran")
        return await anext(self.stream)

    async def aclose(self):
        self.engine.open.discard(self)
        await self.stream.aclose()
