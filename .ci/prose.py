#!/usr/bin/env python3
"""Check the prose of Python and Markdown files: `python .ci/prose.py FILE_OR_FOLDER...` prints what breaks a rule and
exits with status 1.

The rules are those that a machine can keep: docstrings, comments, messages and documents name their actors, and a
docstring begins with a sentence of its own in place of continuing the name that it belongs to.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

UNNAMED = re.compile(r"\b(nobody|whoever|somebody|everybody|anybody|whom)\b", re.IGNORECASE)
"""Matches words that stand where an actor should be named: client, tenant, operator, gateway, engine."""
CONTINUES_A_NAME = re.compile(r"(Of|That|Those|Who|Whose|Whether|What is|None:)(?=\s)")
"""Matches the openers of docstrings that are no sentences without the name before them."""
LEFT_OUT = re.compile(r"_pb2(_grpc)?\.py$|demo/questions\.py$")
"""Generated code, and the texts on which the demo's adapters are trained."""
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of statements that hold further statements."""


def docstrings(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield every string that stands alone as a statement: docstrings, and those of attributes below an assignment."""
    for statement in (statement for name in BLOCKS for statement in getattr(node, name, ())):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring
            case ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.Return():
                pass
            case _:
                yield from docstrings(statement)


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield every string of a program that users may read, and its docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node


def complaints(source: str) -> Iterator[tuple[int, str]]:
    """Yield a line number and what is wrong there, for each breach of a rule in a file's text."""
    tree = ast.parse(source)
    for docstring in docstrings(tree):
        if found := CONTINUES_A_NAME.match(docstring.value.strip()):
            yield docstring.lineno, f"continues a name in place of beginning a sentence: {found[0]!r}"
    if not UNNAMED.search(source):
        return
    for string in strings(tree):
        if found := UNNAMED.search(string.value):
            yield string.lineno, f"names no actor: {found[0]!r}"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and (found := UNNAMED.search(token.string)):
            yield token.start[0], f"names no actor: {found[0]!r}"


def document_complaints(text: str) -> Iterator[tuple[int, str]]:
    """Yield the same for a Markdown document."""
    for number, line in enumerate(text.splitlines(), 1):
        if found := UNNAMED.search(line):
            yield number, f"names no actor: {found[0]!r}"


def files_in(place: Path) -> list[Path]:
    """Return the file itself, or the Python and Markdown files of a folder. Raises FileNotFoundError."""
    if not place.exists():
        raise FileNotFoundError(place)
    return [place] if place.is_file() else sorted([*place.rglob("*.py"), *place.rglob("*.md")])


def main() -> int:
    files = [file for place in sys.argv[1:] for file in files_in(Path(place))]
    found = [
        f"{file}:{line}: {what}"
        for file in files
        if not LEFT_OUT.search(file.as_posix())
        for line, what in sorted((complaints if file.suffix == ".py" else document_complaints)(file.read_text()))
    ]
    print("\n".join(found) or "Prose: all rules kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
