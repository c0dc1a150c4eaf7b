"""lm-eval's `local-completions` against a gateway: with the gateway's tokenizer, in the batch lane, and with waits
where the gateway asks for them. Importing this module needs lm-eval, an optional dependency."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

import lab.evaluation.tasks
from gateway.cli.http import refusal, unreachable
from gateway.terminal.tls import chosen_tls_files
from lab.evaluation.models import EvalError, Model
from lab.evaluation.scores import Results

os.environ.setdefault("TQDM_DISABLE", "1")  # before lm-eval imports tqdm: there is a progress bar already

from lm_eval import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

PROMPTS_PER_REQUEST = 8
CONCURRENT_REQUESTS = 8
TIMEOUT_S = 600
MAX_WAITS = 60
"""Maximum number of attempts of one request. Each refusal that gives a time to retry is followed by another attempt."""
BOOTSTRAP_SAMPLES = 1000
CACHED_TEXTS = 10_000
BATCH_LANE = "flex"
FEWSHOT_SEED = 1234
"""Seed that chooses the few-shot examples; it is lm-eval's own default."""

Moved = Callable[[int, int], None]
"""Progress callback of (prompts done, prompts in all). The latter grows from task to task."""


class GatewayTokenizer:
    """Tokenizer of a model that a gateway serves, as the part of lm-eval's interface that `LocalCompletionsAPI` uses.
    Texts are encoded without special tokens."""

    eos_token = None
    """None means that no end-of-text mark is added to stop strings: a gateway ends answers there itself."""

    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self._model = model
        self._encoded = lru_cache(CACHED_TEXTS)(self._encode)

    def encode(self, text: str) -> list[int]:
        return list(self._encoded(text))

    def batch_decode(self, prompts: Iterable[Sequence[int]]) -> list[str]:
        return [self.decode(ids) for ids in prompts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._post("/detokenize", {"tokens": list(ids)})["prompt"])

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Return the text of a chat, rendered with the model's chat template. Without a generation prompt, the text
        ends with the last message left open, to be continued."""
        flags = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        return self.decode(self._post("/tokenize", {"messages": messages, **flags})["tokens"])

    @property
    def bos_token_id(self) -> int:
        """The special token that the gateway's tokenizer puts before a text, which lm-eval takes as the context of a
        text without one. Raises EvalError: the tokenizer puts none there."""
        ids = self._post("/tokenize", {"prompt": "", "add_special_tokens": True})["tokens"]
        if not ids:
            raise EvalError(
                "this task scores whole texts, which begin with a special token: name the tokenizer with --tokenizer"
            )
        return int(ids[0])

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"])

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            response = self._http.post(path, json={"model": self._model, **body})
        except httpx.TransportError as error:
            raise EvalError(unreachable(self._http, error)) from error
        if response.is_error:
            raise EvalError(f"{self._model}: {refusal(response)}")
        return response.json()


class GatewayModel(LocalCompletionsAPI):
    """lm-eval's interface to a model that a gateway serves. Prompts go to the gateway's /v1/completions."""

    def __init__(self, http: httpx.Client, model: Model, tokenizer: str, moved: Moved) -> None:
        """`tokenizer` is a folder or a Hugging Face id; empty means the gateway's own."""
        super().__init__(
            model=model.id,
            base_url=f"{str(http.base_url).rstrip('/')}/v1/completions",
            tokenizer=tokenizer or None,
            tokenizer_backend="huggingface" if tokenizer else None,
            batch_size=PROMPTS_PER_REQUEST,
            num_concurrent=CONCURRENT_REQUESTS,
            max_length=model.max_model_len,
            max_retries=1,
            timeout=TIMEOUT_S,
            header={"authorization": http.headers["authorization"]},
            verify_certificate=chosen_tls_files().context(),
        )
        self._http = http
        self._moved = moved
        self._done = self._total = 0
        self._own: GatewayTokenizer | None = None
        if not tokenizer:
            self._own = self.tokenizer = GatewayTokenizer(http, model.id)
            self.tokenizer_backend, self.tokenized_requests = "remote", True

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> Any:
        if self._own is None:
            return super().apply_chat_template(chat_history, add_generation_prompt)
        return self._own.chat(chat_history, add_generation_prompt)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    async def get_batched_requests(self, requests: list[Any], cache_keys: list[Any], **options: Any) -> Any:
        self._total += len(requests)
        self._move(0)
        return await super().get_batched_requests(requests, cache_keys, **options)

    async def amodel_call(
        self,
        session: Any,
        sem: asyncio.Semaphore,
        messages: list[Any],
        *,
        generate: bool = True,
        cache_keys: list[Any] | None = None,
        ctxlens: list[int] | None = None,
        gen_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Send prompts in one request, and return the text of each answer or, unless `generate` is set, the log
        probability of each continuation and whether it is the greedy one. Raises EvalError."""
        asked = self._create_payload(
            self.create_message(messages),
            generate=generate,
            gen_kwargs=copy.deepcopy(gen_kwargs),
            seed=self._seed,
            eos=self.eos_string,
            **options,
        )
        async with sem:
            outputs = await self._answer(session, {**asked, "service_tier": BATCH_LANE})
        self._move(len(messages))
        if generate:
            return [text or "" for text in self.parse_generations(outputs=outputs)]
        return self.parse_logprobs(outputs=outputs, tokens=messages, ctxlens=ctxlens)

    async def _answer(self, session: Any, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request, which is sent again after the time that a refusal gives. Raises EvalError."""
        for _ in range(MAX_WAITS):
            try:
                async with session.post(self.base_url, json=body, headers=self.header) as response:
                    if response.ok:
                        return await response.json()
                    text, wait = await response.text(), response.headers.get("retry-after-ms")
            except (TimeoutError, OSError) as error:
                raise EvalError(unreachable(self._http, error)) from error
            if wait is None:
                break
            await asyncio.sleep(int(wait) / 1000)
        raise EvalError(f"{self.model}: {refusal(httpx.Response(response.status, text=text))}")

    def _move(self, count: int) -> None:
        self._done += count
        self._moved(self._done, self._total)


class Harness:
    """Tasks of lm-eval, with which models are scored."""

    def __init__(
        self,
        http: httpx.Client,
        tasks: Sequence[str],
        include_paths: Sequence[Path],
        limit: int | None,
        num_fewshot: int | None,
        *,
        chat: bool,
        tokenizer: str,
    ) -> None:
        """Find the tasks. Raises EvalError: there is no such folder, or no such task."""
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        for folder in include_paths:
            if not folder.is_dir():
                raise EvalError(f"--include-path {folder}: there is no such folder")
        self._tasks = _loaded(tasks, _manager(tasks, include_paths), num_fewshot)
        self._http = http
        self._tokenizer = tokenizer
        self._limit = limit
        self._chat = chat
        self.settings = {
            "lm_eval": version("lm_eval"),
            "tasks": list(tasks),
            "limit": limit,
            "num_fewshot": num_fewshot,
            "chat": chat,
        }
        """Settings on which the results depend besides the models, as the results file stores them."""

    def results(self, model: Model, moved: Moved) -> Results:
        """Score a model on all tasks. Return lm-eval's results of the tasks and of their groups. Raises EvalError."""
        found = evaluate(
            GatewayModel(self._http, model, self._tokenizer, moved),
            self._tasks,
            limit=self._limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
            apply_chat_template=self._chat,
            fewshot_as_multiturn=self._chat,
        )
        return {**found.get("groups", {}), **found["results"]}


def _manager(names: Sequence[str], include_paths: Sequence[Path]) -> TaskManager:
    """Return a manager that knows all tasks of these names. lm-eval's own tasks are indexed only if needed, which takes
    seconds. Raises EvalError: --tasks is empty, or names an unknown task."""
    if not names:
        raise EvalError("--tasks names no task")
    folders = [Path(lab.evaluation.tasks.__path__[0]), *include_paths]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if set(names) <= set(manager.all_tasks):
        return manager
    manager = TaskManager(include_path=folders)
    for name in names:
        if name not in manager.all_tasks:
            nearest = get_close_matches(name, manager.all_tasks, 3)
            hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
            raise EvalError(f"there is no task {name!r}{hint}")
    return manager


def _loaded(names: Sequence[str], manager: TaskManager, num_fewshot: int | None) -> Any:
    """Return tasks and groups with their data, as `evaluate` takes them. `num_fewshot` replaces the number of examples
    in prompts of a task, unless the task says that there are none. Raises EvalError: the data cannot be had."""
    try:
        loaded = manager.load(list(names))
    except (OSError, ValueError) as error:
        raise EvalError(f"tasks cannot be loaded: {error}") from error
    for task in loaded["tasks"].values():
        given = task.get_config("num_fewshot")
        if given is None or (num_fewshot is not None and given != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded
