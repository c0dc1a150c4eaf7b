"""The text that `loralane serve` prints when it is ready: what it serves, and example calls to copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from gateway.config.capacity import capacity_of_info, capacity_rows
from gateway.config.keys import DEMO_HASHES, DEMO_KEYS
from gateway.config.models import ModelSettings
from gateway.config.sections import TlsConfig
from gateway.config.whole import Config
from gateway.core.tenants import hash_key
from gateway.requests.served_model import ServedModel
from gateway.requests.service import Gateway
from gateway.serve.addresses import Ports
from gateway.terminal.console import Console
from gateway.terminal.output import LOCAL_URL, command_as_called

DEMO_ADMIN_KEY = DEMO_KEYS[2]
DEMO_ADMIN_HASH = hash_key(DEMO_ADMIN_KEY)
QUESTION = "What is the capital of Japan?"


class Banner:
    """The text that `print` shows: what a gateway serves, and example calls. API keys are shown only if they are the
    demo's, which are public."""

    def __init__(self, config: Config, gateway: Gateway, ports: Sequence[Ports]) -> None:
        """`ports` are those of the public endpoint, followed by those of the
        admin endpoint if it has its own."""
        self._config = config
        self._gateway = gateway
        self._http = _url(config.http.host, ports[0].http, config.http.tls)
        self._grpc = f"{config.grpc.host}:{ports[0].grpc}"
        self._admin = _url(config.admin.host, ports[1].http, config.admin.tls) if ports[1:] else self._http
        self._admin_grpc = f"{config.admin.host}:{ports[1].grpc}" if ports[1:] else ""

    def print(self, console: Console) -> None:
        console.print("\n[bold green]loralane is ready[/bold green]")
        console.print(self._facts())
        for title, text in self._calls().items():
            console.print(f"\n[bold]{title}[/bold]")
            # Not wrapped or cut, because users copy these lines.
            console.print(text, soft_wrap=True, markup=False, highlight=False)
        console.print("\n[dim]Ctrl-C stops it.[/dim]\n")

    def _facts(self) -> Table:
        table = Table.grid(padding=(0, 2))
        rows = {
            "tenants": ", ".join(sorted(self._config.tenants)),
            "HTTP": self._http + _clients(self._config.http.tls),
            "gRPC": self._grpc + (", TLS" if self._config.grpc.tls else "") + _clients(self._config.grpc.tls),
            "console": self._console() + _clients(self._config.admin.tls),
        }
        if self._admin_grpc:
            rows["admin gRPC"] = self._admin_grpc + (", TLS" if self._config.admin.tls else "")
        served = self._config.served
        of_models = [row for model in self._gateway.models for row in _model_facts(model, served.get(model.name))]
        for name, value in (*of_models, *rows.items()):
            table.add_row(Text(name, style="yellow" if name == "note" else "dim"), Text(value, overflow="fold"))
        return table

    def _console(self) -> str:
        """Return the URL of the web console. If the demo's admin key is accepted, the URL contains it, in the fragment,
        which browsers do not send."""
        is_demo = DEMO_ADMIN_HASH in self._config.admin.keys
        return f"{self._admin}/console" + (f"#key={DEMO_ADMIN_KEY}" if is_demo else "")

    def _calls(self) -> dict[str, str]:
        key, model = self._key(), _example_model(self._gateway.models.default)
        message = f'{{"role": "user", "content": "{QUESTION}"}}'
        return {
            "curl": f"curl {self._http}/v1/chat/completions -H 'authorization: Bearer {key}' \\\n"
            f"  -H 'content-type: application/json' \\\n"
            f'  -d \'{{"model": "{model}", "messages": [{message}], "stream": true}}\'',
            "openai": f"from openai import OpenAI\n"
            f'client = OpenAI(base_url="{self._http}/v1", api_key="{key}")\n'
            f'answer = client.chat.completions.create(model="{model}", messages=[{message}])\n'
            f"print(answer.choices[0].message.content)",
            "gRPC": f"grpcurl{' ' if self._config.grpc.tls else ' -plaintext '}-H 'authorization: Bearer {key}' \\\n"
            f'  -d \'{{"model": "{model}", "chat": {{"messages": [{message}]}}}}\' \\\n'
            f"  {self._grpc} loralane.v1.Generation/GenerateStream",
            "terminal": self._commands(model),
        }

    def _commands(self, model: str) -> str:
        """Return example CLI commands for this gateway, one in a line. Unless its URL is the CLI's default, they set
        LORALANE_URL or, if administration has a port of its own, have --url."""
        called = command_as_called()
        lines = [f"{called} {rest}" for rest in (f"chat --model {model}", "adapters ls", "lanes ls --watch")]
        if self._http == LOCAL_URL and self._admin == LOCAL_URL:
            return "\n".join(lines)
        if self._admin == self._http:
            return "\n".join([f"export LORALANE_URL={self._http}", *lines])
        return "\n".join([f"{lines[0]} --url {self._http}", *(f"{line} --url {self._admin}" for line in lines[1:])])

    def _key(self) -> str:
        held = {key for entry in self._config.tenants.values() for key in entry.keys}
        return DEMO_KEYS[0] if held & DEMO_HASHES else "YOUR_KEY"


def _model_facts(model: ServedModel, settings: ModelSettings | None) -> Iterator[tuple[str, str]]:
    """Yield the banner's lines about one base model, as pairs of topic and text. `settings` is None for a model that
    the configuration does not name."""
    info = model.engine.info
    records = {name: record for name, record in model.adapters.records.items() if record.version}
    waiting = sorted(model.adapters.records.keys() - records)
    yield "base model", f"{model.name}  ({info.architecture}, {info.weights}, {info.dtype} on {info.device})"
    yield "adapters", ", ".join(sorted(records)) or "none yet"
    if waiting:
        yield "not loaded", f"{', '.join(waiting)}; `loralane adapters show NAME` says why"
    yield "context", f"{info.max_model_len} tokens"
    capacity = capacity_of_info(info)
    if capacity is not None and settings is not None:
        yield from capacity_rows(settings, capacity, [record.rank for record in records.values()])


def _example_model(model: ServedModel) -> str:
    """Return the model's first adapter by name, or the model itself if it has none."""
    return next((name for name, record in sorted(model.adapters.records.items()) if record.version), model.name)


def _url(host: str, port: int, tls: TlsConfig | None) -> str:
    return f"{'https' if tls else 'http'}://{host}:{port}"


def _clients(tls: TlsConfig | None) -> str:
    """Return the remark, shown after a port's URL, that clients need a certificate; empty if the port requires none."""
    return f"  (clients show a certificate of {tls.client_ca.name})" if tls and tls.client_ca else ""
