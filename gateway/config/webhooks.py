"""The webhook settings in the configuration: where a tenant is notified when a batch has ended."""

from __future__ import annotations

import binascii
from base64 import b64decode
from dataclasses import dataclass, field

from gateway.core.safe_url import SafeUrl, UnsafeUrl, check_addresses, is_address, parse_url

EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
SECRET_PREFIX = "whsec_"
SECRET_BYTES = (24, 64)
"""Minimum and maximum length of a key, from the Standard Webhooks specification."""


@dataclass(frozen=True, slots=True)
class WebhookConfig:
    """The webhook endpoint of one tenant. Raises ValueError for an invalid event, URL or secret."""

    url: str = field(repr=False)
    secret: str = field(repr=False)
    """Signing key: whsec_, followed by 24 to 64 bytes in base64."""
    events: tuple[str, ...] = EVENTS
    allow_http: bool = False
    """Allow http:// URLs. Events sent without TLS can be read on the network, but are still signed."""
    allow_private: bool = False
    """Allow endpoints on this machine or in a private network."""

    def __post_init__(self) -> None:
        for event in self.events:
            if event not in EVENTS:
                raise ValueError(f"events must be some of {', '.join(EVENTS)}, not {event!r}")
        self._check_place()
        self.key  # noqa: B018 - raises

    def _check_place(self) -> None:
        """Raise ValueError if the URL is malformed, or its host is an IP address to which requests may not go."""
        try:
            host = self.place.host
            if is_address(host):
                check_addresses(host, [host], inner=self.allow_private)
        except UnsafeUrl as error:
            raise ValueError(f"url: {error}") from None

    @property
    def place(self) -> SafeUrl:
        return parse_url(self.url, plain=self.allow_http)

    @property
    def key(self) -> bytes:
        """The decoded signing key. Raises ValueError if `secret` is not valid."""
        least, most = SECRET_BYTES
        try:
            secret = b64decode(self.secret.removeprefix(SECRET_PREFIX), validate=True)
        except binascii.Error:
            secret = b""
        if not self.secret.startswith(SECRET_PREFIX) or not least <= len(secret) <= most:
            raise ValueError(f"secret must be {SECRET_PREFIX} and {least} to {most} bytes in base64")
        return secret
