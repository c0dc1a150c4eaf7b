"""Connections of commands to a gateway, with one-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from gateway.client.client import Client, ClientError
from gateway.client.paths import NameRefused
from gateway.terminal.output import exit_with_error, no_gateway_message
from gateway.terminal.tls import chosen_tls_files

ADMIN_TIMEOUT = httpx.Timeout(10.0, read=None)
"""Timeouts in seconds of an administrator's calls. An answer may take as long as an adapter's files do to arrive."""


@contextmanager
def admin(url: str, key: str) -> Iterator[Client]:
    """Yield a client of the gateway at `url` that sends an administrator's `key` and uses the TLS files of the command
    line. If the gateway refuses a call or does not answer, print a one-line error and end the command with status 1.
    Raises TlsFileError if a TLS file cannot be used."""
    if "://" not in url:
        exit_with_error(f"{url} is no HTTP address; name it as http://HOST:PORT with --url or LORALANE_URL")
    http = httpx.Client(timeout=ADMIN_TIMEOUT, verify=chosen_tls_files().context())
    try:
        with Client(url, key, http=http) as client:
            yield client
    except ClientError as error:
        exit_with_error(f"{url}: {error}{_hint(error)}")
    except NameRefused as error:
        exit_with_error(str(error))
    except (httpx.TransportError, httpx.InvalidURL) as error:
        exit_with_error(no_gateway_message(url, str(error)))


def _hint(error: ClientError) -> str:
    """Return what to do where there is no such route: a port may serve everything but administration."""
    is_absent = error.status == 404 and error.code is None
    return "; for administration, name the address of `admin.port` with --url or LORALANE_URL" if is_absent else ""


TIMEOUT = httpx.Timeout(10.0, read=600.0)


def open_http(url: str, key: str) -> httpx.Client:
    """Return an HTTP client for the gateway at `url` that sends the API key `key` and uses the TLS files of the command
    line. Raises TlsFileError if one cannot be used."""
    headers, tls = {"authorization": f"Bearer {key}"}, chosen_tls_files().context()
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, verify=tls)


def unreachable(http: httpx.Client, error: Exception) -> str:
    return no_gateway_message(str(http.base_url).rstrip("/"), str(error))


def refusal(response: httpx.Response) -> str:
    """Return the message of an error response, or its status if it has none. The response must have been read."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
