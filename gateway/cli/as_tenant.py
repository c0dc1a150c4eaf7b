"""What the commands of a tenant share: which gateway, and by which key."""

from __future__ import annotations

from typing import Annotated

import typer

LOCAL_URL = "http://127.0.0.1:8000"
DEMO_KEY = "sk-demo-acme"

ServerUrl = Annotated[str, typer.Option("--url", help="Base URL of the gateway.")]
UserKey = Annotated[str, typer.Option("--key", envvar="LORALANE_API_KEY", help="API key.")]
