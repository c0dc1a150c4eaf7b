"""The learned router: the probability that a small member suffices for a prompt, from features of the prompt.

It is a logistic regression over standardised features, whose weights `loralane route train` fits and calibrates (Platt,
"Probabilistic outputs for support vector machines", 1999) and stores as JSON. Nothing but numpy is needed to apply it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from engine.process.small_files import read_small
from gateway.virtual_models.features import NAMES

MOST_BYTES = 8 << 20
MOST_DIMENSIONS = 65_536
CLIP = 4.0
"""Standardised features are clipped to this magnitude, so that a prompt unlike those of the training gets no extreme
probability."""

Share = Annotated[float, Meta(ge=0, le=1)]
Vector = npt.NDArray[np.float64]


class RouterFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """Content of a router's file. Features are those of the text, in the order of `features`, then the vector's."""

    format: Literal[1] = 1
    embedder: Annotated[str, Meta(max_length=512)] = ""
    """Name of the model whose vector of the prompt is used; empty means that the text suffices."""
    pooling: Literal["mean", "last"] = "mean"
    dimensions: Annotated[int, Meta(ge=0, le=MOST_DIMENSIONS)] = 0
    """Elements of the vector; 0 if there is none."""
    features: list[Annotated[str, Meta(max_length=64)]]
    mean: list[float]
    scale: list[float]
    weights: list[float]
    """Weights of the standardised features."""
    intercept: float
    threshold: Share
    """Probability from which on the small member is chosen."""
    figures: dict[str, float] = {}
    """What the training measured on prompts that the router had not seen, by name."""


class LearnedRouter:
    """A router that was loaded from a file, and computes probabilities from it."""

    def __init__(self, file: RouterFile, version: str) -> None:
        """Raises ValueError if parts of the file contradict each other. `version` is the hash of its content."""
        _check(file)
        self.file = file
        self.version = version
        self._mean, self._scale, self._weights = (np.array(part) for part in (file.mean, file.scale, file.weights))

    @property
    def needs_vector(self) -> bool:
        return self.file.dimensions > 0

    @property
    def threshold(self) -> float:
        return self.file.threshold

    def probability(self, text: Vector, vector: npt.NDArray[np.float32] | None = None) -> float:
        """Return the probability that the small member suffices.

        Args:
            text: the text features of the prompt, in the order of NAMES.
            vector: the prompt's vector, of unit length. None only if the router needs none.

        Raises:
            ValueError: the vector has another length than those of the training, or elements that are not finite.
        """
        given = 0 if vector is None else len(vector)
        if given != self.file.dimensions:
            raise ValueError(f"the vector has {given} elements; the router was trained with {self.file.dimensions}")
        row = text if vector is None else np.concatenate((text, vector.astype(np.float64)))
        score = float(standardised(row, self._mean, self._scale) @ self._weights) + self.file.intercept
        if not math.isfinite(score):
            raise ValueError("the vector has elements that are not finite")
        return sigmoid(score)


def standardised(rows: Vector, mean: Vector, scale: Vector) -> Vector:
    """Return features [..., num_features] with mean 0 and deviation 1 over the training's prompts, cut to CLIP."""
    return np.clip((rows - mean) / scale, -CLIP, CLIP)


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else 1 - 1 / (1 + math.exp(score))


def encode_router(file: RouterFile) -> bytes:
    """Return the content of a file. The same router always gives the same bytes, so that their hash is its version."""
    return msgspec.json.format(msgspec.json.encode(file), indent=0) + b"\n"


def decode_router(content: bytes) -> LearnedRouter:
    """Return the router that the content of a file describes. Raises ValueError if it is no router that this version
    can use."""
    try:
        file = msgspec.json.decode(content, type=RouterFile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"it is no router: {error}") from error
    return LearnedRouter(file, content_hash(content))


def content_hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def load_router(path: Path) -> LearnedRouter:
    """Read a router. Raises ValueError, naming the file, if it cannot be read, is too large or invalid."""
    try:
        content = read_small(path, MOST_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    try:
        return decode_router(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check(file: RouterFile) -> None:
    if tuple(file.features) != NAMES:
        raise ValueError("it was trained with other features; train it again with this version")
    if bool(file.embedder) != bool(file.dimensions):
        raise ValueError("embedder and dimensions must both be set, or neither")
    expected = len(NAMES) + file.dimensions
    parts: Mapping[str, list[float]] = {"mean": file.mean, "scale": file.scale, "weights": file.weights}
    for name, values in parts.items():
        if len(values) != expected:
            raise ValueError(f"{name} has {len(values)} elements instead of {expected}")
        if not all(map(math.isfinite, values)):
            raise ValueError(f"{name} has an element that is not finite")
    if not math.isfinite(file.intercept) or min(file.scale) <= 0:
        raise ValueError("intercept must be finite, and scale positive")
