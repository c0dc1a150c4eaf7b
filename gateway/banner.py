"""What `loralane serve` prints when it is ready: what is served, and calls to copy and paste."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.pb import engine_pb2 as pb
from gateway.config import DEMO_HASHES, DEMO_KEYS, Config
from gateway.service import Gateway

QUESTION = "What is the capital of France?"


class Banner:
    """Shows a key only if it is the demo's, which everybody knows."""

    def __init__(self, config: Config, gateway: Gateway, info: pb.EngineInfo, http_port: int, grpc_port: int) -> None:
        self._config = config
        self._gateway = gateway
        self._info = info
        self._http = f"{config.http.host}:{http_port}"
        self._grpc = f"{config.grpc.host}:{grpc_port}"

    def print(self, console: Console) -> None:
        console.print("\n[bold green]loralane is ready[/bold green]")
        console.print(self._facts())
        for title, text in self._calls().items():
            console.print(f"\n[bold]{title}[/bold]")
            # Never wrapped or cut: these lines are there to be copied.
            console.print(text, soft_wrap=True, markup=False, highlight=False)
        console.print("\n[dim]Ctrl-C stops it.[/dim]\n")

    def _facts(self) -> Table:
        info, table = self._info, Table.grid(padding=(0, 2))
        gib = info.num_pages * info.page_bytes / 2**30
        rows = {
            "base model": f"{self._gateway.base_name}  ({info.architecture}, {info.dtype} on {info.device})",
            "adapters": ", ".join(sorted(self._gateway.adapters.records)) or "none yet",
            "context": f"{info.max_model_len} tokens, {info.max_seqs} sequences at once",
            "page pool": f"{info.num_pages} pages of {info.block_size} tokens, {gib:.1f} GiB, for KV and adapters",
            "tenants": ", ".join(sorted(self._config.tenants)),
            "HTTP": f"http://{self._http}",
            "gRPC": self._grpc,
            "console": f"http://{self._http}/console",
        }
        for name, value in rows.items():
            table.add_row(Text(name, style="dim"), value)
        return table

    def _calls(self) -> dict[str, str]:
        key, model = self._key(), next(iter(sorted(self._gateway.adapters.records)), self._gateway.base_name)
        message = f'{{"role": "user", "content": "{QUESTION}"}}'
        return {
            "curl": f"curl http://{self._http}/v1/chat/completions -H 'authorization: Bearer {key}' \\\n"
            f"  -H 'content-type: application/json' \\\n"
            f'  -d \'{{"model": "{model}", "messages": [{message}], "stream": true}}\'',
            "openai": f"from openai import OpenAI\n"
            f'client = OpenAI(base_url="http://{self._http}/v1", api_key="{key}")\n'
            f'answer = client.chat.completions.create(model="{model}", messages=[{message}])\n'
            f"print(answer.choices[0].message.content)",
            "gRPC": f"grpcurl -plaintext -H 'authorization: Bearer {key}' \\\n"
            f'  -d \'{{"model": "{model}", "chat": {{"messages": [{message}]}}}}\' \\\n'
            f"  {self._grpc} loralane.v1.Generation/GenerateStream",
            "terminal": f"loralane chat --url http://{self._http} --model {model}",
        }

    def _key(self) -> str:
        held = {key for entry in self._config.tenants.values() for key in entry.keys}
        return DEMO_KEYS[0] if held & DEMO_HASHES else "YOUR_KEY"
