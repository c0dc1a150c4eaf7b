"""The chat templates of adapters that were trained with another one than their base model's. Only operators choose
them; the text is part of the adapter's record, for all gateways."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

from gateway.adapters.own_text import read_own_text
from gateway.adapters.record import AdapterRecord
from gateway.core.errors import ApiError, invalid_request
from gateway.text.chat_template import read_template
from gateway.text.compiled_template import ChatTemplate

FIELD = "chat_template"
AUTO, BASE = "auto", "model"
"""What an operator writes for the template in the adapter's folder, and for that of the base model."""
SEPARATOR = "\n"
"""Separates the source in a seed from what its template is."""
MOST_CHARACTERS = 131_072
"""Maximum length of a template. Those of models have up to 20,000 characters."""


async def with_template(record: AdapterRecord, folder: Path, choice: str | None) -> AdapterRecord:
    """Return an adapter's record with a chat template: AUTO means the one in `folder`, BASE the base model's, None what
    the record says, and other text is the template itself. Raises ApiError (INVALID_REQUEST) if it cannot be used."""
    is_own = record.own_template if choice is None else choice == AUTO
    if choice == BASE or (choice is None and not is_own):
        return replace(record, own_template=False, chat_template="" if choice else record.chat_template)
    template = (await asyncio.to_thread(read_own_text, folder)).template if is_own else choice or ""
    await asyncio.to_thread(_check, template, is_own)
    return replace(record, own_template=is_own, chat_template=template)


def _check(template: str, is_own: bool) -> None:
    """Raise ApiError (INVALID_REQUEST) if a template cannot be used. `is_own` says that it is the one in the adapter's
    folder. Blocks for some milliseconds."""
    if is_own and not template:
        raise _unusable(f"the adapter's folder has none: send the template itself, or {BASE}")
    if not template.strip() or len(template) > MOST_CHARACTERS:
        raise _unusable(f"it must have 1 to {MOST_CHARACTERS} characters")
    try:
        ChatTemplate(template)
    except ValueError as error:
        raise _unusable(f"{'that of the adapter' if is_own else 'it'} is no valid Jinja: {error}") from error


def _unusable(reason: str) -> ApiError:
    return invalid_request(f"{FIELD}: {reason}", FIELD)


async def configured_template(file: Path | None) -> str:
    """Return what to ask `with_template` for where the configuration names a `file`: its text, or AUTO if it is None.
    Raises ApiError (INVALID_REQUEST) if it cannot be read."""
    if file is None:
        return AUTO
    try:
        return await asyncio.to_thread(read_template, file)
    except (OSError, ValueError) as error:
        raise invalid_request(f"adapters.chat_templates: {error}", FIELD) from error


def seed_of(source: str, template: str | None) -> str:
    """Return the seed of an adapter that the configuration lists: its source and, unless the configuration says nothing
    of it (None), what its template is."""
    if template is None:
        return source
    return f"{source}{SEPARATOR}{template if template == AUTO else hashlib.sha256(template.encode()).hexdigest()}"


def source_of(seed: str) -> str:
    """Return the source in a seed."""
    return seed.partition(SEPARATOR)[0]


def template_name(record: AdapterRecord) -> str:
    """Return which template renders the chats of an adapter: AUTO, BASE, or `given` for one that an operator sent."""
    return AUTO if record.own_template else "given" if record.chat_template else BASE
