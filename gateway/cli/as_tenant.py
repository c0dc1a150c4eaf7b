"""The key option shared by the commands that use a gateway as a tenant."""

from __future__ import annotations

from typing import Annotated

import typer

DEMO_KEY = "sk-demo-acme"

UserKey = Annotated[str, typer.Option("--key", envvar="LORALANE_API_KEY", help="API key.")]
