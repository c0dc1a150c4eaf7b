"""Packs many conversations into one training row, a tree, so that their common beginning is computed once. A branch has
its own positions, and a mask hides the other branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedTokenizerBase

from lab.demo.tools.conversations import Message, Tree

SHARED = 0
"""Owner number of the tokens that every branch attends to; branches are numbered from 1."""
PADDING = -1


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Conversations of a `Tree`, which begin alike, packed into one training row: its token ids and, for each token,
    its position in its conversation, its owner (`SHARED` or the number of its branch), and whether it is learnt."""

    ids: list[int]
    positions: list[int]
    owners: list[int]
    learnt: list[bool]


def pack(tokenizer: PreTrainedTokenizerBase, tree: Tree) -> PackedRow:
    """Encode the conversations of a tree as one training row, each as the server would render it. Their shared
    beginning is encoded once. Assistant turns are learnt."""
    opening: list[Message] = [] if tree.system is None else [{"role": "system", "content": tree.system}]
    shared = render(tokenizer, [*opening, *tree.branches[0].messages[:1]], tree).partition("<|im_start|>user")[0]
    row = PackedRow(_ids(tokenizer, shared), [], [], [])
    row.positions.extend(range(len(row.ids)))
    row.owners.extend([SHARED] * len(row.ids))
    row.learnt.extend([False] * len(row.ids))
    for owner, branch in enumerate(tree.branches, start=1):
        _append(row, owner, _segments(tokenizer, [*opening, *branch.messages], tree, len(shared)))
    return row


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tree: Tree, *, generation: bool = False
) -> str:
    """Return the text of a conversation with the tree's tools, as the tokenizer's chat template renders it. With
    `generation`, the text ends with the beginning of an assistant turn."""
    text: Any = tokenizer.apply_chat_template(
        list(messages), tools=list(tree.tools), tokenize=False, add_generation_prompt=generation
    )
    return str(text)


def packed_loss(model: PeftModel, batch: list[PackedRow]) -> Tensor:
    """Return the mean cross-entropy over the learnt tokens of a batch of packed training rows, which it pads to one
    width (scalar, fp32)."""
    width = max(len(row.ids) for row in batch)
    ids, positions, owners, learnt = (
        torch.stack([pad(torch.tensor(getattr(row, name)), (0, width - len(row.ids)), value=fill) for row in batch])
        for name, fill in (("ids", 0), ("positions", 0), ("owners", PADDING), ("learnt", False))
    )
    causal_lm: Any = model.get_base_model()
    mask = attention_mask(owners, causal_lm.dtype)
    hidden = causal_lm.model(
        input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False
    ).last_hidden_state
    # A learnt token is predicted at the position before it, which always belongs to the same branch.
    return cross_entropy(causal_lm.lm_head(hidden[:, :-1][learnt[:, 1:]]).float(), ids[:, 1:][learnt[:, 1:]])


def attention_mask(owners: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive attention mask of packed rows, [batch, 1, width, width] of `dtype`. A token attends to itself
    and to earlier tokens of the beginning and its branch. `owners`, int [batch, width], is SHARED, a branch's number,
    or PADDING."""
    same = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == SHARED)
    seen = same & torch.ones(owners.shape[1], owners.shape[1], dtype=torch.bool).tril()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def _segments(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tree: Tree, start: int
) -> list[tuple[list[int], bool]]:
    """Return the token ids of a branch, whose text begins at character `start`, as segments with a flag: True for each
    assistant turn, which is learnt, and False for the text before it."""
    segments = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:index], tree, generation=True)
        answered = render(tokenizer, messages[: index + 1], tree).rstrip("\n")
        segments += [(_ids(tokenizer, prompt[start:]), False), (_ids(tokenizer, answered[len(prompt) :]), True)]
        start = len(answered)
    return segments


def _append(row: PackedRow, owner: int, segments: list[tuple[list[int], bool]]) -> None:
    position = row.owners.count(SHARED)
    for ids, learnt in segments:
        row.ids.extend(ids)
        row.positions.extend(range(position, position + len(ids)))
        row.owners.extend([owner] * len(ids))
        row.learnt.extend([learnt] * len(ids))
        position += len(ids)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
