"""Options for the gateway's address: one HTTP address for all commands, from which they learn the gRPC port."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from gateway.outputs import LOCAL_URL as LOCAL_URL
from gateway.outputs import fail, no_gateway
from gateway.trust import TLS_TARGET, chosen_trust

ASK_SECONDS = 10.0

ServerUrl = Annotated[
    str, typer.Option("--url", envvar="LORALANE_URL", help="Address of the gateway: http://HOST:PORT, or https://.")
]
AdminUrl = Annotated[
    str,
    typer.Option(
        "--url",
        "--target",
        envvar="LORALANE_URL",
        help="Address of the gateway: http://HOST:PORT, or https://; HOST:PORT alone is a gRPC port.",
    ),
]


def grpc_target(url: str) -> str:
    """Return the gRPC address of the gateway at `url`, as `Trust.channel` takes it. The gateway itself names the port.

    An address without a scheme already is a gRPC address. Ends the command if no gateway answers.
    """
    if "://" not in url:
        return url
    import httpx

    try:
        with httpx.Client(timeout=ASK_SECONDS, verify=chosen_trust().context()) as http:
            answer = http.get(url.rstrip("/") + "/", headers={"accept": "application/json"})
        grpc = answer.json()["grpc"]
        host, port = urlsplit(url).hostname or "", int(grpc["port"])
        scheme = TLS_TARGET if grpc["tls"] else ""
    except (httpx.TransportError, httpx.InvalidURL) as error:
        fail(no_gateway(url, str(error)))
    except (ValueError, KeyError, TypeError):
        fail(f"What answers at {url} is no gateway, or does not serve gRPC; name another with --url or LORALANE_URL.")
    return f"{scheme}[{host}]:{port}" if ":" in host else f"{scheme}{host}:{port}"
