"""Every field of the API's operations: those of JSON bodies, forms, paths, queries, heads and framing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.fuzz.cases import all_operations
from tests.fuzz.growth.json_fields import json_fields, valid_body
from tests.fuzz.growth.requests import BODY_SIZES, HEAD_SIZES, Field, HttpRequest
from tests.fuzz.growth.values import GROWTHS

JSON_TYPE = (b"content-type", b"application/json")
FORM_TYPE = (b"content-type", b"multipart/form-data; boundary=edge")
FRAMED = ("POST /v1/chat/completions", "POST /v1/files", "GET /v1/models", "GET /health")
"""Operations whose heads and framing grow: one of each way to read a body."""
Operation = Mapping[str, Any]
Grown = Mapping[str, Callable[[int], HttpRequest]]
UPLOAD_SIZES = (*BODY_SIZES, 2**25)


def http_fields() -> Iterator[Field]:
    for method, path, operation in all_operations():
        name = f"{method} {path}"
        key = "sk-admin" if path.startswith("/admin") or "lora_adapter" in path else "sk-acme"
        base = _base(method, path, operation)
        yield from _json(name, operation, base, key)
        if "multipart/form-data" in _content(operation):
            yield from _form(name, base, key)
        for parameter in operation.get("parameters", ()):
            place = parameter["in"]
            grown = _PLACES[place](base, parameter["name"], path)
            yield Field(name, f"{place} {parameter['name']}", f"{place} {parameter['name']}", grown, key, HEAD_SIZES)
        if name in FRAMED:
            yield Field(name, "head", f"head of {name}", _head(base), key, HEAD_SIZES)
            yield Field(name, "framing", f"framing of {name}", _framing(base), key, UPLOAD_SIZES)


def _content(operation: Operation) -> Mapping[str, Any]:
    content: Mapping[str, Any] = operation.get("requestBody", {}).get("content", {})
    return content


def _base(method: str, path: str, operation: Operation) -> HttpRequest:
    """Return a valid request of this operation, but for its key and for names in its path."""
    target, content = path.replace("{", "").replace("}", "").encode(), _content(operation)
    if "application/json" in content:
        body = json.dumps(valid_body(content["application/json"]["schema"])).encode()
        return HttpRequest(method, target, (JSON_TYPE,), body)
    if "multipart/form-data" in content:
        return HttpRequest(method, target, (FORM_TYPE,), _parts(_part("purpose", b"batch"), _file(b"{}\n")))
    return HttpRequest(method, target)


def _json(name: str, operation: Operation, base: HttpRequest, key: str) -> Iterator[Field]:
    content = _content(operation)
    if "application/json" not in content:
        return
    for field in json_fields(content["application/json"]["schema"]):
        growths = {
            way: lambda size, f=field, g=GROWTHS[way]: replace(
                base, body=f.grown(g(size, f.shape)).encode("utf-8", "surrogatepass")
            )
            for way in field.growths
        }
        yield Field(name, field.path or "body", field.kind, growths, key)


def _path_parameter(base: HttpRequest, name: str, path: str) -> Grown:
    around = path.replace(f"{{{name}}}", "@").replace("{", "").replace("}", "").encode()
    return {
        way: lambda size, p=piece: replace(base, target=around.replace(b"@", _fill(p, size)))
        for way, piece in PIECES.items()
    }


def _query_parameter(base: HttpRequest, name: str, path: str) -> Grown:
    begin = base.target + b"?" + name.encode() + b"="
    one = name.encode() + b"=1&"
    return {
        **{way: lambda size, p=piece: replace(base, target=begin + _fill(p, size)) for way, piece in PIECES.items()},
        "many": lambda size: replace(base, target=base.target + b"?" + _fill(one, size)),
        "many others": lambda size: replace(
            base, target=base.target + b"?" + b"&".join(b"%x" % n for n in range(size // 5))
        ),
        "commas": lambda size: replace(base, target=begin + b"," * size),
    }


def _header(base: HttpRequest, name: str, path: str) -> Grown:
    def with_header(value: bytes) -> HttpRequest:
        return replace(base, headers=(*base.headers, (name.encode(), value)))

    return {
        "letters": lambda size: with_header(b"a" * size),
        "digits": lambda size: with_header(b"9" * size),
        "spaces": lambda size: with_header(b" " * size + b"1"),
        "bytes": lambda size: with_header(b"\xff" * size),
        "many": lambda size: replace(base, headers=(*base.headers, *((name.encode(), b"1"),) * (size // 10))),
    }


PIECES = {
    "letters": b"a",
    "escapes": b"%00",
    "bytes": b"%FF",
    "dots": b"../",
    "slashes": b"/",
    "digits": b"9",
    "plus": b"+",
}
_PLACES = {"path": _path_parameter, "query": _query_parameter, "header": _header}


def _fill(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece) + 1)


def _head(base: HttpRequest) -> Grown:
    """Return the growths of a request's head beyond what the document says of it."""
    named = (
        "authorization",
        "x-request-id",
        "traceparent",
        "tracestate",
        "accept",
        "content-type",
        "origin",
        "cookie",
        "expect",
    )
    grown: dict[str, Callable[[int], HttpRequest]] = {
        "many headers": lambda size: replace(
            base, headers=(*base.headers, *((b"h%d" % number, b"1") for number in range(size // 8)))
        ),
        "a long name": lambda size: replace(base, headers=(*base.headers, (b"h" * size, b"1"))),
        "a long method": lambda size: replace(base, method="A" * size),
        "folded": lambda size: replace(base, headers=(*base.headers, (b"h", b"1\r\n " * (size // 4)))),
        "a query without a name": lambda size: replace(base, target=base.target + b"?" + b"=&" * (size // 2)),
    }
    for name in named:
        for way, make in _header(base, name, "").items():
            grown[f"{name}: {way}"] = make
    return grown


def _framing(base: HttpRequest) -> Grown:
    """Return the growths of what lies around a body's bytes, and of bodies beyond every limit."""
    return {
        "one byte a chunk": lambda size: replace(base, body=b" " * (size // 6), chunk=1),
        "trailers": lambda size: replace(base, body=base.body or b"{}", chunk=64, trailers=b"a:b\r\n" * (size // 5)),
        "a long trailer": lambda size: replace(
            base, body=base.body or b"{}", chunk=64, trailers=b"a:" + b"b" * size + b"\r\n"
        ),
        "spaces": lambda size: replace(base, body=b" " * size + base.body),
        "beyond the limit": lambda size: replace(base, body=b"a" * size * 2),
        "beyond the limit, in chunks": lambda size: replace(base, body=b"a" * size * 2, chunk=2**16),
        "requests in a row": lambda size: replace(base, body=base.body + base.to_bytes() * (size // 200)),
    }


def _part(name: str, data: bytes, more: bytes = b"") -> bytes:
    return b'--edge\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (name.encode(), more, data)


def _file(data: bytes, name: bytes = b"a.jsonl") -> bytes:
    return _part("file", data, b'; filename="' + name + b'"')


def _parts(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--edge--\r\n"


def _form(name: str, base: HttpRequest, key: str) -> Iterator[Field]:
    purpose, small = _part("purpose", b"batch"), _file(b"{}\n")

    def sent(*parts: bytes) -> HttpRequest:
        return replace(base, body=_parts(*parts))

    files: Grown = {
        "letters": lambda size: sent(purpose, _file(b"a" * size)),
        "lines": lambda size: sent(purpose, _file(b"\n" * size)),
        "edges": lambda size: sent(purpose, _file(_fill(b"\r\n--edg", size))),
        "almost ends": lambda size: sent(purpose, _file(_fill(b"\r\n--", size))),
        "returns": lambda size: sent(purpose, _file(b"\r" * size)),
        "a long name": lambda size: sent(purpose, _file(b"{}\n", b"a" * size)),
        "escapes in its name": lambda size: sent(purpose, _file(b"{}\n", b'\\"' * (size // 2))),
        "many": lambda size: sent(purpose, small * (size // len(small))),
        "small lines": lambda size: sent(purpose, _file(_fill(b'{"a":[]}\n', size))),
    }
    fields: Grown = {
        "letters": lambda size: sent(_part("purpose", b"a" * size), small),
        "many": lambda size: sent(purpose * (size // len(purpose)), small),
        "other parts": lambda size: sent(*(_part(f"p{number}", b"") for number in range(size // 60)), purpose, small),
        "a long name": lambda size: sent(_part("p" * size, b""), purpose, small),
        "headers": lambda size: sent(_part("purpose", b"batch", b"\r\nh: 1" * (size // 6)), small),
        "a long header": lambda size: sent(_part("purpose", b"batch", b"\r\nh: " + b"a" * size), small),
        "parameters": lambda size: sent(_part("purpose", b"batch", b"; a=b" * (size // 5)), small),
        "nothing but edges": lambda size: sent(b"--edge\r\n\r\n" * (size // 10)),
        "a beginning": lambda size: sent(b"a" * size, purpose, small),
        "an end": lambda size: sent(purpose, small, b"--edge--\r\n" + b"a" * size),
    }
    yield Field(name, "file", "form file", files, key, UPLOAD_SIZES)
    yield Field(name, "purpose", "form purpose", fields, key)
    for other in ("expires_after[anchor]", "expires_after[seconds]"):
        more: Grown = {
            "letters": lambda size, o=other: sent(purpose, _part(o, b"a" * size), small),
            "digits": lambda size, o=other: sent(purpose, _part(o, b"9" * size), small),
        }
        yield Field(name, other, f"form {other}", more, key)
