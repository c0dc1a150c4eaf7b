"""Answers prompts with llama.cpp, in a process of its own: `python llama_cpp_worker.py GGUF`.

Reads a JSON object from standard input: `texts`, and `length`, the tokens of each answer. Prints, for each text, its
token ids, the greedy tokens of the answer, and by how much each one's log probability exceeds the second one's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import xllamacpp

CONTEXT = 1024


def serve(gguf: Path) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.port = CONTEXT, 1, 0, 0
    params.cpuparams.n_threads, params.verbosity, params.warmup = 1, -1, False
    params.swa_full, params.cache_prompt = True, False
    return xllamacpp.Server(params)


def post(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return json.load(answer)


def answer(url: str, text: str, length: int) -> dict[str, Any]:
    ids = post(f"{url}/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    body = {
        "prompt": ids,
        "n_predict": length,
        "temperature": 0,
        "ignore_eos": True,
        "n_probs": 2,
        "cache_prompt": False,
    }
    rows = post(f"{url}/completion", body)["completion_probabilities"]
    tops = [[one["logprob"] for one in row["top_logprobs"]] for row in rows]
    return {"ids": ids, "tokens": [row["id"] for row in rows], "leads": [first - second for first, second in tops]}


def main() -> None:
    asked = json.load(sys.stdin)
    server = serve(Path(sys.argv[1]))
    found = [answer(server.listening_address, text, asked["length"]) for text in asked["texts"]]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
