"""How many rows a token sends to experts on other ranks: one per expert, or one per rank that has some of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hocket.config import ModelConfig


def ranks_per_token(model: ModelConfig, ep: int) -> float:
    """Ranks that have some of a token's experts, on average, where all sets of `top_k` experts are equally likely.

    A rank has none of them in C(E - E / ep, K) of C(E, K) cases.
    """
    e, k = model.experts, model.top_k
    return ep * (1 - math.comb(e - e // ep, k) / math.comb(e, k))


def label_bytes(top_k: int) -> int:
    """Bytes that a row sent once per rank has behind its hidden state (`parallel/per_rank.py`): a place, int32, and a
    weight, fp32, for each choice, padded so that rows stay aligned.
    """
    return -(-8 * top_k // 64) * 64


@dataclass(frozen=True, slots=True)
class Copies:
    """What a token sends. Elements count numbers of the compute dtype."""

    count: float
    """Rows per token, on average."""
    room: int
    """Rows per token that the tensor of sent rows has, as many as there can be."""
    label: int = 0
    """Elements of a row's label."""
    per_rank: bool = False
    """Weights travel in labels, and rows are weighted and summed before they return."""


def copies_of(model: ModelConfig, ep: int, per_rank: bool, dtype_bytes: int) -> Copies:
    """What a token sends, one way or the other."""
    if not per_rank or ep == 1:
        return Copies(model.top_k, model.top_k)
    label = label_bytes(model.top_k) // dtype_bytes
    return Copies(ranks_per_token(model, ep), min(model.top_k, ep), label, True)


def elements_sent(model: ModelConfig, copies: Copies) -> float:
    """Elements that a token sends to experts and gets back, whether to another rank or not."""
    return copies.count * (2 * model.hidden + copies.label)
