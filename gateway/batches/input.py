"""Validates a batch's input line by line, with the same checks as for requests over HTTP, and builds the batch's index.
Memory grows with the number of lines only by what the index needs of each line."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.api_schema.chats import ChatRequest, CompletionRequest
from gateway.api_schema.vectors import EmbeddingsRequest
from gateway.batches.cpu_budget import MAX_CPU_SECONDS, CpuBudget
from gateway.batches.line_reader import pack_index
from gateway.batches.record import BatchError
from gateway.core.errors import MAX_QUOTED, ApiError, clip, unsupported_parameter
from gateway.core.json_bounds import check_json
from gateway.core.routing import Catalog, ModelQuery, Target, resolve
from gateway.core.tenants import Tenant, UnknownFields
from gateway.embeddings.parse import embeddings_request
from gateway.embeddings.parse import parse as parse_pooled
from gateway.openai.convert import chat_request, completion_request
from gateway.openai.parse import invalid_field, parse
from gateway.requests.types import Chat, GenerateRequest
from gateway.responses.calls import response_request
from gateway.responses.parse import own_names
from gateway.responses.parse import parse as parse_response

PIECE_BYTES = 2**20
"""Number of bytes that are read from the input file at a time."""
MAX_ERRORS = 100
"""Number of errors after which the check of an input file stops."""
MAX_MESSAGE = 300
"""Maximum characters of an error message, which may quote the line. All errors of a batch stay in Redis with it."""
PREFIX_BYTES = 192
"""Bytes of a prompt's prefix by which lines are sorted, so that lines with the same prefix run after each other."""
BOM = b"\xef\xbb\xbf"
"""UTF-8 byte order mark, with which some editors begin a file."""


class BatchLine(Struct, kw_only=True):
    """A line of the input file. `body` is the unparsed JSON of the request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: Raw


class CheckParameters(Struct, kw_only=True):
    """Parameters of the check of an input file: its URL, the endpoint of its lines, the tenant and the models that the
    gateway serves, and the maximum number and length of lines."""

    url: str
    """URL of the input file for fsspec."""
    endpoint: str
    tenant: Tenant
    """Tenant of the batch, whose settings decide about models and unknown fields as they do for a single request."""
    catalogs: tuple[Catalog, ...]
    """Names of each base model of the gateway, in the order of the configuration."""
    max_lines: int
    max_line_bytes: int
    max_cpu_seconds: float = MAX_CPU_SECONDS


class CheckResult(Struct, kw_only=True):
    """Result of the check of an input file: number of lines and their models, or errors."""

    total: int = 0
    model: str | None = None
    """The model or adapter that all lines name. None means that they name several."""
    model_lines: list[tuple[str, int]] = []
    """Base models and virtual models of the lines with their numbers of lines, in the order of the index."""
    errors: list[BatchError] = []


class ReadableFile(Protocol):
    """A binary file that is read from the beginning, in pieces."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, and none at the end of the file."""


class LineBody(Protocol):
    """Body of a line, for any endpoint."""

    @property
    def stream(self) -> bool | None: ...


class BodyParser(Protocol):
    def __call__(self, text: Raw, unknown: UnknownFields) -> tuple[LineBody, GenerateRequest]:
        """Parse and check a line's body, the JSON `text`. Return the body and the request made from it. `unknown` says
        whether unknown fields are refused. Raises ApiError if the body is invalid."""


class LineError(Exception):
    """A line is invalid. Code, message and field are those of `BatchError`."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code, self.message, self.param = code, message, param


def _chat(text: Raw, unknown: UnknownFields) -> tuple[LineBody, GenerateRequest]:
    body = parse(text, ChatRequest, unknown)
    return body, chat_request(body, "")


def _completion(text: Raw, unknown: UnknownFields) -> tuple[LineBody, GenerateRequest]:
    body = parse(text, CompletionRequest, unknown)
    return body, completion_request(body, "")


def _response(text: Raw, unknown: UnknownFields) -> tuple[LineBody, GenerateRequest]:
    body = parse_response(text, unknown)
    if body.background:
        raise unsupported_parameter("background", "is not for lines of a batch, which all run in the background")
    with own_names():
        return body, response_request(body, "")


def _embeddings(text: Raw, unknown: UnknownFields) -> tuple[LineBody, GenerateRequest]:
    body = parse_pooled(text, EmbeddingsRequest, unknown)
    return body, embeddings_request(body, "")


READERS: Mapping[str, BodyParser] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
}
"""Functions that parse and check the bodies of lines, by endpoint."""


class InputCheck:
    """Checks one input file and collects its index. An object is used for one `run`."""

    def __init__(self, parameters: CheckParameters) -> None:
        self._parameters = parameters
        self._decoder = msgspec.json.Decoder(BatchLine)
        self._ids: set[bytes] = set()
        self._models: set[str] = set()
        self._lines: list[tuple[str, Target, bytes, int, int, int]] = []
        """Valid lines: name of the base model or virtual model, what serves it, beginning of the prompt, line number,
        offset and length in bytes."""
        self._errors: list[BatchError] = []

    def run(self, file: ReadableFile) -> tuple[CheckResult, bytes]:
        """Check the file, and return the result and the packed index of the lines in the order in which they should run
        (by base model, adapter and prompt prefix), empty if there are errors. Blank lines are skipped. Raises the
        file's exceptions."""
        budget = CpuBudget(self._parameters.max_cpu_seconds)
        for number, (offset, length, line) in enumerate(split_lines(file, self._parameters.max_line_bytes), 1):
            if length and (line is None or line.strip()):
                self._take(number, offset, length, line)
            if budget.is_spent:
                self._errors.append(too_slow(budget.limit, number))
            if budget.is_spent or len(self._errors) >= MAX_ERRORS or len(self._ids) > self._parameters.max_lines:
                break
            budget.pause_if_due()
        if not self._ids and not self._errors:
            self._errors.append(BatchError("empty_file", "the input file has no requests"))
        if self._errors:
            return CheckResult(errors=self._errors), b""
        model = self._models.pop() if len(self._models) == 1 else None
        in_order = sorted(self._lines, key=_order)
        lines = Counter(name for name, *_ in in_order)
        result = CheckResult(total=len(in_order), model=model, model_lines=list(lines.items()))
        return result, pack_index(line[3:] for line in in_order)

    def _take(self, number: int, offset: int, length: int, line: bytes | None) -> None:
        try:
            self._lines.append((*self._checked(line), number, offset, length))
        except LineError as error:
            self._errors.append(BatchError(error.code, clip(error.message, MAX_MESSAGE), error.param, number))

    def _checked(self, line: bytes | None) -> tuple[str, Target, bytes]:
        """Check one line (None: it is too long), and note its id and model. Return the name of its base model or of its
        virtual model, what will serve it and the beginning of its prompt. Raises LineError."""
        if line is None:
            raise LineError("line_too_long", f"a line has at most {self._parameters.max_line_bytes} bytes")
        request = self._decoded(line)
        self._note_id(request.custom_id)
        if request.method != "POST":
            raise LineError("invalid_method", "method must be POST", "method")
        if request.url != self._parameters.endpoint:
            shown = request.url[:MAX_QUOTED]
            raise LineError("invalid_url", f"url is {shown!r}; this batch is for {self._parameters.endpoint}", "url")
        return self._understood(request.body)

    def _decoded(self, line: bytes) -> BatchLine:
        try:
            check_json(line, "a line")
            return self._decoder.decode(line)
        except ApiError as error:
            raise LineError("invalid_request", error.message) from error
        except msgspec.ValidationError as error:
            refusal = invalid_field(str(error))
            code = "missing_required_parameter" if refusal.message.endswith("is required") else "invalid_request"
            raise LineError(code, refusal.message, refusal.param) from error
        except (msgspec.DecodeError, ValueError) as error:  # the last: broken UTF-8
            raise LineError("invalid_json_line", f"this line is not valid JSON: {error}") from error

    def _note_id(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            shown = custom_id[:MAX_QUOTED]
            raise LineError("duplicate_custom_id", f"custom_id {shown!r} is that of an earlier line", "custom_id")
        self._ids.add(digest)
        if len(self._ids) > self._parameters.max_lines:
            raise LineError("too_many_lines", f"a batch has at most {self._parameters.max_lines} lines")

    def _understood(self, text: Raw) -> tuple[str, Target, bytes]:
        try:
            body, request = READERS[self._parameters.endpoint](text, self._parameters.tenant.unknown_fields)
            if body.stream:
                raise LineError("unsupported_parameter", "lines of a batch are not streamed", "body.stream")
            target = resolve(request.model, self._parameters.catalogs, self._parameters.tenant)
        except ApiError as error:
            param = f"body.{error.param}" if error.param else "body"
            raise LineError(error.code or "invalid_request", error.message, param) from error
        self._models.add(_named(request.model))
        catalog, name = self._parameters.catalogs[target.model], request.model.model
        return name if name in catalog.virtual else catalog.bases[0], target, _beginning(request)


def too_slow(seconds: float, line: int | None = None) -> BatchError:
    """Return the error of an input whose check has used all its processor time at a line (None: it is not known)."""
    message = (
        f"checking the input file took more than the maximum of {seconds:g} s of processor time; split the file into "
        "several batches, or make its lines simpler"
    )
    return BatchError("validation_too_slow", message, None, line)


def _order(line: tuple[str, Target, bytes, int, int, int]) -> tuple[object, ...]:
    """Sort key of valid lines in the index: base model, name of the base or virtual model, adapter, beginning of the
    prompt, line number."""
    name, target, *rest = line
    return (target.model, name, target.adapter or "", *rest)


def split_lines(file: ReadableFile, max_bytes: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield the offset, length (both in bytes) and text of each line, also of empty ones, without the newline. The text
    is None if it is longer than `max_bytes`. A byte order mark at the beginning is skipped."""
    offset, length, kept = 0, 0, bytearray()
    first = True
    while piece := file.read(PIECE_BYTES):
        if first and piece.startswith(BOM):
            piece, offset = piece[len(BOM) :], len(BOM)
        first = False
        start = 0
        while (end := piece.find(b"\n", start)) >= 0:
            length += end - start
            if length <= max_bytes:
                kept += memoryview(piece)[start:end]
            yield offset, length, bytes(kept) if length <= max_bytes else None
            offset, length, start = offset + length + 1, 0, end + 1
            kept.clear()
        length += len(piece) - start
        if length <= max_bytes:
            kept += memoryview(piece)[start:]
        else:
            kept.clear()
    if length:
        yield offset, length, bytes(kept) if length <= max_bytes else None


def _named(query: ModelQuery) -> str:
    """Return the name of the model that a request asks for: the adapter, if one is named beside the model."""
    return query.adapter_id or query.lora_path or query.model


def _beginning(request: GenerateRequest) -> bytes:
    """Return a sort key that puts requests with the same prompt prefix next to each other: up to PREFIX_BYTES of the
    first prompt. Token ids are written as text. Of a chat, a hash of its tools, which chat templates put first,
    precedes the first two messages."""
    prompt = request.prompts[0]
    if isinstance(prompt, tuple):
        return _bytes(" ".join(map(str, prompt[:PREFIX_BYTES])))
    if isinstance(prompt, str):
        return _bytes(prompt)
    return _tools(prompt) + _bytes(
        "\n".join(f"{message['role']} {message['content']}" for message in prompt.messages[:2])
    )


def _tools(chat: Chat) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(chat.tools), digest_size=8).digest() if chat.tools else b""


def _bytes(text: str) -> bytes:
    return text[:PREFIX_BYTES].encode("utf-8", "surrogatepass")[:PREFIX_BYTES]
