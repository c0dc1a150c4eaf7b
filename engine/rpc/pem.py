"""Reads and checks the PEM files of a TLS port, and notices when they change. What is wrong with a file is said in
words for an operator, because OpenSSL's own words seldom name the file."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from pathlib import Path

from engine.process.small_files import read_small

CERTIFICATE, PRIVATE_KEY, ENCRYPTED = b"-----BEGIN CERTIFICATE-----", b"PRIVATE KEY-----", b"ENCRYPTED"
MISMATCH = "the first certificate of a file is the server's own, and the key has to be that one's"

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of the last change (in nanoseconds) of each file that exists."""


class KeyMismatch(ValueError):
    """A private key does not belong to the first certificate of the file beside it."""


def read_certificates(file: Path) -> bytes:
    """Return the contents of a PEM file of certificates. Raises ValueError if it cannot be read or has none."""
    return _pem(file, CERTIFICATE, "certificate")


def read_key(file: Path) -> bytes:
    """Return the contents of a PEM file of a private key. Raises ValueError if it cannot be read, has no key, or has an
    encrypted one."""
    key = _pem(file, PRIVATE_KEY, "private key")
    if ENCRYPTED in key:
        raise ValueError(f"{file} is encrypted, and a server cannot ask for its password")
    return key


def trust(context: ssl.SSLContext, authorities: Path) -> None:
    """Let `context` trust the certificate authorities of a file. Raises ValueError if it has no usable certificate."""
    try:
        context.load_verify_locations(authorities)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"{authorities} has no usable certificate: {error}") from error


def show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Let `context` present a certificate chain, with its private key, to the other side of a connection. Raises
    KeyMismatch if the two files do not belong together, ValueError if they cannot be used."""
    pair = f"{certificate} and {key}"
    try:
        context.load_cert_chain(certificate, key, password="")  # else OpenSSL would ask at the terminal
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise KeyMismatch(f"{pair} do not belong together; {MISMATCH}") from error
        raise ValueError(f"{pair} cannot be used: {error}") from error


def stamp_of(files: Iterable[Path]) -> Stamp:
    """Return the stamp of some files, which changes when one of them is changed, replaced or removed."""
    return tuple(stamp for file in files if (stamp := _file_stamp(file)))


def _pem(file: Path, mark: bytes, what: str) -> bytes:
    try:
        content = read_small(file)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    if mark not in content:
        raise ValueError(f"{file} has no {what} in PEM, which would say {mark.decode().strip('-')}")
    return content


def _file_stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
