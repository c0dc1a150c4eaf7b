"""Webhook events in OpenAI's format, signed according to the Standard Webhooks specification."""

from __future__ import annotations

import hmac
from base64 import b64encode
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

USER_AGENT = f"loralane/{version('loralane')}"


@dataclass(frozen=True, slots=True)
class Event:
    """The end of a batch, of which a tenant is notified. The event's id is derived from the batch id and is the same
    for every gateway and every attempt."""

    status: str
    """Final status of the batch: completed, failed, expired or cancelled."""
    batch_id: str
    ended_at: int
    """Time of the batch's end, in Unix seconds on Redis's clock."""

    @classmethod
    def parse(cls, word: str) -> Event:
        """Parse an event from the text that `encoded` returns. Raises ValueError for other text."""
        status, batch_id, ended_at = word.split(" ")
        return cls(status, batch_id, int(ended_at))

    @property
    def encoded(self) -> str:
        return f"{self.status} {self.batch_id} {self.ended_at}"

    @property
    def id(self) -> str:
        return f"evt_{self.batch_id.removeprefix('batch_')}"

    @property
    def type(self) -> str:
        return f"batch.{self.status}"

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": "event",
                "type": self.type,
                "created_at": self.ended_at,
                "data": {"id": self.batch_id},
            }
        )


def signed_headers(event: Event, body: bytes, key: bytes, now: int) -> dict[str, str]:
    """Return the HTTP headers of a delivery of `event` with the body `body`, signed with `key`. `now` is the Unix time
    in seconds: receivers reject signatures that are more than five minutes old, so each attempt is signed anew."""
    signed = f"{event.id}.{now}.".encode() + body
    signature = b64encode(hmac.digest(key, signed, "sha256")).decode()
    return {
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        "webhook-id": event.id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{signature}",
    }
