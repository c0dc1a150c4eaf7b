"""Reads SentencePiece's files of models (`tokenizer.model`), as Llama 2, Mistral and Gemma have. What would change
token ids and is not followed is refused. Source: sentencepiece_model.proto."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from engine.model.tokenizers.equal_scores import check_equal_scores
from engine.model.tokenizers.pretokenizers import DEFAULT, PRE_TOKENIZERS
from engine.model.tokenizers.vocabulary import MOST_CHARACTERS, MOST_TOKENS, PIECES, Kind, Vocabulary, check_merged
from engine.process.small_files import read_small

MOST_BYTES = 16 << 20
"""Maximum size of a file: three times that of Gemma 3, with 262,144 pieces."""
BPE = 2
MODEL_TYPES = {1: "unigrams", 3: "words", 4: "characters"}
"""Types of models that are refused. The library tokenizers chooses otherwise among unigrams of equal score."""
NUMBER, INTEGER, BOOLEAN, TEXT, MESSAGE, BYTES = 2, 5, 8, 9, 11, 12
OPTIONAL, REPEATED = 1, 3
"""Types and labels of fields in protobuf's descriptors."""
FIELDS: dict[str, list[tuple[int, str, int, str]]] = {
    "Piece": [(1, "piece", BYTES, ""), (2, "score", NUMBER, ""), (3, "type", INTEGER, "1")],
    "Trainer": [
        (3, "model_type", INTEGER, "1"),
        (24, "treat_whitespace_as_suffix", BOOLEAN, "false"),
        (45, "unk_piece", TEXT, "<unk>"),
        (46, "bos_piece", TEXT, "<s>"),
        (47, "eos_piece", TEXT, "</s>"),
        (48, "pad_piece", TEXT, "<pad>"),
    ],
    "Normalizer": [
        (2, "precompiled_charsmap", BYTES, ""),
        (3, "add_dummy_prefix", BOOLEAN, "true"),
        (4, "remove_extra_whitespaces", BOOLEAN, "true"),
        (5, "escape_whitespaces", BOOLEAN, "true"),
    ],
}
"""The fields that are read, of each message: number, name, type and default."""
PARTS = (
    (1, "pieces", "Piece", REPEATED),
    (2, "trainer_spec", "Trainer", OPTIONAL),
    (3, "normalizer_spec", "Normalizer", OPTIONAL),
    (5, "denormalizer_spec", "Normalizer", OPTIONAL),
)
"""The messages of which a file consists: number, name, type and label."""


def read_sentencepiece(path: Path) -> Vocabulary:
    """Read the vocabulary of a file. Raises ValueError, which names the file, if it is damaged or its tokenizer is of a
    kind, or has a setting, that is not followed."""
    try:
        model = _model_class().FromString(read_small(path, MOST_BYTES))
    except DecodeError as error:
        raise ValueError(f"{path} is no model of SentencePiece: fetch it again") from error
    try:
        _check(model)
        return _vocabulary(model, _tokens(model))
    except ValueError as error:
        raise ValueError(f"{path} {error}: fetch the model's tokenizer.json") from error


def _tokens(model: Any) -> list[str]:
    """Return the texts of the pieces. Raises ValueError, to whose message the caller adds the file's name."""
    try:
        tokens = [piece.piece.decode() for piece in model.pieces]
    except UnicodeDecodeError as error:
        raise ValueError("has a piece that is not UTF-8") from error
    pieces = list(zip(tokens, (piece.type for piece in model.pieces), strict=True))
    _check_pieces(pieces)
    check_merged(text for text, kind in pieces if kind in (Kind.NORMAL, Kind.UNUSED))
    check_equal_scores(pieces, [piece.score for piece in model.pieces])
    return tokens


def _vocabulary(model: Any, tokens: Sequence[str]) -> Vocabulary:
    kinds = [piece.type for piece in model.pieces]
    special = dict(_special(model.trainer_spec, tokens, kinds))
    return Vocabulary(
        PIECES,
        tokens,
        kinds,
        [piece.score for piece in model.pieces],
        merges=(),
        pre=PRE_TOKENIZERS[DEFAULT],
        special=special,
        adds_bos="bos" in special,
        adds_eos=False,
        adds_space=model.normalizer_spec.add_dummy_prefix,
        strips=False,
        is_sentencepiece=True,
        drops_spaces=model.normalizer_spec.remove_extra_whitespaces,
    )


def _special(trainer: Any, tokens: Sequence[str], kinds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the special tokens by transformers' names. They are found by their texts, as SentencePiece does: the ids
    that a file also has are those of its training."""
    for name in ("unk", "bos", "eos", "pad"):
        text = getattr(trainer, f"{name}_piece")
        if text in tokens and kinds[token_id := tokens.index(text)] in (Kind.CONTROL, Kind.UNKNOWN):
            yield name, token_id


def _check(model: Any) -> None:
    """Raise ValueError, to whose message the caller adds the file's name, unless a model's ids can be given."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if len(model.pieces) > MOST_TOKENS:
        raise ValueError(f"has more than {MOST_TOKENS:,} pieces")
    if trainer.model_type != BPE:
        found = MODEL_TYPES.get(trainer.model_type, f"type {trainer.model_type}")
        raise ValueError(f"is a model of {found}, and SentencePiece's files are read of byte-pair encoding")
    if normalizer.precompiled_charsmap or model.denormalizer_spec.precompiled_charsmap:
        raise ValueError("replaces characters (precompiled_charsmap), which is not followed")
    if not normalizer.escape_whitespaces or trainer.treat_whitespace_as_suffix:
        raise ValueError("writes spaces otherwise than before words, which is not followed")
    if not all(math.isfinite(piece.score) for piece in model.pieces):
        raise ValueError("has scores that are no numbers")


def _check_pieces(pieces: Sequence[tuple[str, int]]) -> None:
    ids = dict(pieces)
    if not pieces or "" in ids or len(ids) < len(pieces):
        raise ValueError("has no pieces, an empty one, or one twice")
    if max(map(len, ids)) > MOST_CHARACTERS:
        raise ValueError(f"has a piece of more than {MOST_CHARACTERS} characters")
    if list(ids.values()).count(Kind.UNKNOWN) != 1:
        raise ValueError("has not one unknown piece")
    for text, kind in pieces:
        if kind == Kind.UNUSED and any(text[:cut] in ids and text[cut:] in ids for cut in range(1, len(text))):
            raise ValueError(f"has the unused piece {text[:80]!r}, which others spell")


def _model_class() -> Any:
    """Return protobuf's class of a file, with the fields that are read."""
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece_file", package="sentencepiece_file")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for number, field, kind, default in fields:
            message.field.add(number=number, name=field, type=kind, label=OPTIONAL, default_value=default)
    whole = file.message_type.add(name="Model")
    for number, field, name, label in PARTS:
        whole.field.add(number=number, name=field, type=MESSAGE, label=label, type_name=f".{file.package}.{name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Model"))
