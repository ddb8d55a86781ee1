"""What a model asks of its weights: on one rank, and on tensor-parallel ranks.

A layer names the role of a weight and lets a `Linears` do the rest: `Linears` itself, which has whole weights and all
tokens, or `SplitLinears`, which has a part of both.

Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, F output width, V vocabulary, P tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from hocket.kernels import IGNORED
from hocket.kernels.usable import usable
from hocket.parallel.split_norms import split_norms
from hocket.parallel.tensor import Arriving, Tensors, Way, column_linear, row_linear
from hocket.parallel.vocabulary import split_cross_entropy, split_embedding
from hocket.runtime.functional import embedding, linear, linears, scale
from hocket.runtime.norms import rms_norm

Role = Literal["qkv", "proj", "fc1", "fc2", "shared_fc1", "shared_fc2", "head"]
"""What a weight does in a layer: into attention and out of it, into an MLP and out of it, logits."""


class Linears:
    """Whole weights, all tokens."""

    size = 1
    """Over how many ranks heads, MLP columns and the vocabulary are spread."""

    def columns(self, role: Role, x_BSD: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`x @ p.T` for every weight: all tokens of the microbatch, this rank's features, [B, S, F]."""
        return linears(x_BSD, params)

    def row(self, role: Role, x_BSF: Tensor, param: Tensor) -> Tensor:
        """`x @ p.T` over the features of all ranks: this rank's tokens."""
        return linear(x_BSF, param)

    def norms(self, xs_BSF: Sequence[Tensor], params: Sequence[Tensor], eps: float) -> tuple[Tensor, ...]:
        """RMSNorm of each over the features of all ranks."""
        return tuple(rms_norm(x, p, eps) for x, p in zip(xs_BSF, params, strict=True))

    def embedding(self, ids_BS: Tensor, param_VD: Tensor) -> Tensor:
        """Rows of this rank's tokens, from the ids of all."""
        return embedding(ids_BS, param_VD)

    def own(self, values_T: Tensor) -> Tensor:
        """Of something that all tokens of the microbatch have, this rank's part."""
        return values_T

    def total(self, values: Tensor) -> Arriving:
        """The sum over ranks, on its way, of whole numbers that each has of its own tokens. Leaves `values` alone.

        Whoever asks for it also waits for it before its op ends: see `runtime.lanes.SideStream`.
        """
        return Arriving(values)

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        """Mean over targets, fp32. Consumes the logits: on a GPU, backward overwrites them with their gradient."""
        return cross_entropy(logits_TV, targets_T)


def cross_entropy(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Mean cross-entropy over the targets that are not `IGNORED`, fp32; 0 if there is none.

    Consumes the logits: on a GPU, backward overwrites them with their gradient.
    """
    if usable(logits_TV):
        from hocket.kernels import loss

        return loss.cross_entropy(logits_TV, targets_T)
    count = (targets_T != IGNORED).sum().clamp(min=1)
    return F.cross_entropy(logits_TV.float(), targets_T, ignore_index=IGNORED, reduction="sum") / count


WHOLE = Linears()


class SplitLinears(Linears):
    """A part of the weights; of the tokens, all between columns and rows, and a part elsewhere, [1, T / P, D]."""

    def __init__(self, tensors: Tensors, ways: Mapping[str, Way], sequences: int) -> None:
        """`ways` by role; roles without one do one thing after the other. A microbatch has `sequences`."""
        self.tensors, self.ways, self.sequences = tensors, dict(ways), sequences
        self.size = tensors.size  # pyrefly: ignore

    def _way(self, role: Role) -> Way:
        return self.ways.get(role, Way())

    def columns(self, role: Role, x_BSD: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outs = column_linear(x_BSD.flatten(0, 1), params, self.tensors, self._way(role))
        return tuple(out.view(self.sequences, -1, out.shape[1]) for out in outs)

    def row(self, role: Role, x_BSF: Tensor, param: Tensor) -> Tensor:
        return row_linear(x_BSF.flatten(0, 1), param, self.tensors, self._way(role)).unsqueeze(0)

    def norms(self, xs_BSF: Sequence[Tensor], params: Sequence[Tensor], eps: float) -> tuple[Tensor, ...]:
        return tuple(scale(x, p) for x, p in zip(split_norms(xs_BSF, self.tensors, eps), params, strict=True))

    def own(self, values_T: Tensor) -> Tensor:
        return values_T.chunk(self.size)[self.tensors.rank]

    def total(self, values: Tensor) -> Arriving:
        return self.tensors.begin_total(values.clone())

    def embedding(self, ids_BS: Tensor, param_VD: Tensor) -> Tensor:
        return split_embedding(ids_BS.flatten(), param_VD, self.tensors).unsqueeze(0)

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        return split_cross_entropy(logits_TV, targets_T, self.tensors)
