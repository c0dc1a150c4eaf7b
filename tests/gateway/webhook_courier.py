"""A process that delivers webhooks until it is killed: `python webhook_courier.py SOCKET URL SECRET`."""

import asyncio
import sys

from redis.asyncio import Redis

from gateway.batches.webhooks.delivery import DeliveryTiming, delivering
from gateway.config.webhooks import WebhookConfig


async def main(socket: str, url: str, secret: str) -> None:
    endpoint = WebhookConfig(url, secret, allow_http=True, allow_private=True)
    async with delivering(
        Redis.from_url(socket), "t:", {"acme": endpoint}, print, timing=DeliveryTiming(poll=0.02, lease=1.0)
    ):
        await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
