"""Connections and error messages shared by the clients of a gateway's HTTP API."""

from __future__ import annotations

import httpx

from gateway.outputs import no_gateway
from gateway.trust import chosen_trust

TIMEOUT = httpx.Timeout(10.0, read=600.0)


def open_http(url: str, key: str) -> httpx.Client:
    """Return an HTTP client for the gateway at `url` that sends `key`. Raises TrustError."""
    headers, tls = {"authorization": f"Bearer {key}"}, chosen_trust().context()
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, verify=tls)


def unreachable(http: httpx.Client, error: Exception) -> str:
    return no_gateway(str(http.base_url).rstrip("/"), str(error))


def refusal(response: httpx.Response) -> str:
    """Return the message of an error response, or its status if it has none. The response must have been read."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
