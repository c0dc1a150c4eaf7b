"""The neighbour of a measured case, in a process of its own: `python -m tests.fuzz.growth.beside URL`.

It streams one chat after the other and prints, for each event, the time and the seconds since the event before it, or
since the request. A stream that is not whole is a line with an error.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx

from tests.fuzz.neighbour import CHAT, KEY

NEIGHBOUR = "initech"
PACE_SECONDS = 0.025
"""Time that the fake engine takes for a step of the neighbour's, as an engine on a processor does."""
HANG_SECONDS = 120.0


async def main(url: str) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, timeout=HANG_SECONDS, headers=headers) as client:
        while True:
            try:
                await _stream(client)
            except httpx.HTTPError as error:
                _say(error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(PACE_SECONDS)


async def _stream(client: httpx.AsyncClient) -> None:
    before, whole = time.monotonic(), False
    async with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        async for line in response.aiter_lines():
            if line:
                now, whole = time.monotonic(), line == "data: [DONE]"
                _say(at=now, gap=now - before)
                before = now
    if not whole:
        _say(error=f"status {response.status_code}, and a stream that is not whole")


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
