"""What the clients of a gateway's own HTTP API share: how it is reached, and how it refuses."""

from __future__ import annotations

import httpx

from gateway.outputs import no_gateway
from gateway.trust import chosen_trust

TIMEOUT = httpx.Timeout(10.0, read=600.0)


def open_http(url: str, key: str) -> httpx.Client:
    """Raises TrustError."""
    headers, tls = {"authorization": f"Bearer {key}"}, chosen_trust().context()
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, verify=tls)


def unreachable(http: httpx.Client, error: Exception) -> str:
    return no_gateway(str(http.base_url).rstrip("/"), str(error))


def refusal(response: httpx.Response) -> str:
    """What a gateway says for itself; the response has been read."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
