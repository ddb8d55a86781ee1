"""What a forward and a backward of the model are of."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from hocket.model.documents import Told


@dataclass(frozen=True)
class Microbatch:
    """Token ids and the tokens to predict, both of shape [B, S].

    Targets that are `IGNORED` count for nothing, and attention stays inside of `documents`, where they are given. Where
    ranks share sequences, an engine makes a rank's part of each, with a `context.Context` in place of documents.
    """

    ids: Tensor
    targets: Tensor
    documents: Told | None = field(default=None, kw_only=True)
