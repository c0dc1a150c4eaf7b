"""Streaming parser for multipart forms with a file. The file is not kept in memory, and all other parts are limited in
size."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.core.errors import invalid_request

FILE = "file"
MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096
FORM_BYTES = 64 * 2**10
"""Upper bound, in bytes, of everything in a form except the file's content."""
UNNAMED = "upload"
"""Name of a file that is uploaded without one."""


class FileForm:
    """Parser of one `multipart/form-data` body with one part named `file`, at any position among the other parts.
    `filename` and `fields` (by name) are filled while `file` is iterated; `is_whole` says that the form has ended."""

    def __init__(self, content_type: str, checks: Mapping[str, Callable[[str], None]]) -> None:
        """Initialize the parser.

        Args:
            content_type: the request's content-type header.
            checks: functions by field name. Each is called with its field's value as soon as that is complete; an
                exception that it raises ends the parsing.

        Raises:
            ApiError: INVALID_REQUEST, the content type is not multipart/form-data with a boundary.
        """
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.is_whole = False
        self._checks = checks
        self._parser = _parser(content_type, self)
        self._parts = 0
        self._header, self._value, self._disposition = bytearray(), bytearray(), ""
        self._field: str | None = None
        self._text = bytearray()
        self._pieces: list[bytes] = []

    async def file(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Parse the pieces of a body, and yield the content of the file in pieces as it arrives.

        When the generator ends, the whole form has been read, and `filename` and `fields` are complete.

        Raises:
            ApiError: INVALID_REQUEST, the form is malformed or incomplete, has no file or several, or has too many or
                too large other parts; or the error of a check.
        """
        async for data in body:
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise invalid_request(f"this is no valid multipart/form-data: {error}") from error
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                yield piece
        if not self.is_whole:
            raise invalid_request("the form ends before its last boundary")
        if self.filename is None:
            raise invalid_request("file is required", FILE)

    def on_part_begin(self) -> None:
        self._parts += 1
        self._disposition = ""
        if self._parts > MAX_PARTS:
            raise invalid_request(f"a form may have at most {MAX_PARTS} parts")

    def on_header_begin(self) -> None:
        self._header, self._value = bytearray(), bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value.decode("latin-1")

    def on_headers_finished(self) -> None:
        options = {name: value.decode("utf-8", "replace") for name, value in _options(self._disposition).items()}
        name = options.get(b"name", "")
        if name == FILE and self.filename is not None:
            raise invalid_request("there may be one file", FILE)
        self._field = None if name == FILE else name
        if name == FILE:
            self.filename = options.get(b"filename") or UNNAMED

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            raise invalid_request(f"a field may have at most {MAX_FIELD_BYTES} bytes", self._field[:MAX_FIELD_BYTES])

    def on_part_end(self) -> None:
        if self._field is None:
            return
        text = self.fields[self._field] = self._text.decode("utf-8", "replace")
        self._text.clear()
        if self._field in self._checks:
            self._checks[self._field](text)

    def on_end(self) -> None:
        self.is_whole = True


def _parser(content_type: str, form: FileForm) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid_request("the body must be multipart/form-data with a boundary")
    try:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": form.on_part_begin,
                "on_header_begin": form.on_header_begin,
                "on_header_field": form.on_header_field,
                "on_header_value": form.on_header_value,
                "on_header_end": form.on_header_end,
                "on_headers_finished": form.on_headers_finished,
                "on_part_data": form.on_part_data,
                "on_part_end": form.on_part_end,
                "on_end": form.on_end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
    except FormParserError as error:
        raise invalid_request(f"this is no valid multipart/form-data: {error}") from error


def _options(disposition: str) -> dict[bytes, bytes]:
    return parse_options_header(disposition)[1]
