"""What is told: an event in OpenAI's shape, signed by the Standard Webhooks specification."""

from __future__ import annotations

import hmac
from base64 import b64encode
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

USER_AGENT = f"loralane/{version('loralane')}"


@dataclass(frozen=True, slots=True)
class Event:
    """The end of a batch, which has only one: its id is the event's, whoever tells of it and how often."""

    status: str
    """completed, failed, expired or cancelled."""
    batch_id: str
    ended_at: int
    """Unix seconds, on Redis's clock."""

    @classmethod
    def parse(cls, word: str) -> Event:
        """As the outbox has it. Raises ValueError."""
        status, batch_id, ended_at = word.split(" ")
        return cls(status, batch_id, int(ended_at))

    @property
    def word(self) -> str:
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
    """`now`: Unix seconds; receivers refuse what is more than five minutes old, so each try has its own."""
    signed = f"{event.id}.{now}.".encode() + body
    signature = b64encode(hmac.digest(key, signed, "sha256")).decode()
    return {
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        "webhook-id": event.id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{signature}",
    }
