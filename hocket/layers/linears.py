"""A model's products with its weights, on one rank or on tensor-parallel ranks.

A layer names the role of a weight, and a `Linears` computes the product: `Linears` itself with whole weights and all
tokens, or `SplitLinears` with a slice of both.

Shapes: B sequences, S sequence length, T tokens (B * S), D hidden, F output width, V vocabulary, P tensor-parallel
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.config import Config
from hocket.kernels import IGNORED, usable
from hocket.layers.fp8 import Products, fp8_experts, fp8_linears, fp8_mlp
from hocket.layers.functional import embedding, grouped_linear, linear, linears, scale
from hocket.layers.norms import rms_norm
from hocket.layers.tensor import Arriving, TensorParallel, Way, column_linear, gathered_tokens, row_linear, split_norms
from hocket.layers.vocabulary import split_cross_entropy, split_embedding


def new_weight(*shape: int) -> nn.Parameter:
    """A parameter without a value, on the meta device; `model/source.py` defines its initial value."""
    return nn.Parameter(torch.empty(shape, device="meta"))


Role = Literal["qkv", "proj", "fc1", "fc2", "shared_fc1", "shared_fc2", "head"]
"""The role of a weight in a layer: into or out of attention, into or out of an MLP, logits."""
Gate = Callable[..., Tensor]
"""The function between a gated MLP's two layers; for experts it also gets `OfRows`."""
OfRows = tuple[Tensor | None, Tensor | None]
"""The number of valid rows, int32 [1], and the weight of each, fp32 [R]; None: all, and 1."""


class Linears:
    """Whole weights, all tokens."""

    size = 1
    """Number of ranks that share heads, MLP columns and the vocabulary."""

    def __init__(self, loss_pieces: int = 1) -> None:
        """`loss_pieces`: pieces in which tokens pass through the head."""
        self.loss_pieces = loss_pieces

    def of_layer(self, number: int, layers: int) -> Linears:
        """The `Linears` of one of so many layers."""
        return self

    def columns(self, role: Role, x_BSD: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`x @ p.T` for every weight: all tokens of the microbatch, this rank's features, [B, S, F]."""
        return linears(x_BSD, params)

    def row(self, role: Role, x_BSF: Tensor, param: Tensor) -> Tensor:
        """`x @ p.T` summed over the features of all ranks: this rank's tokens."""
        return linear(x_BSF, param)

    def gathered(self, x_BSF: Tensor) -> Tensor:
        """All tokens of the microbatch, for layers whose features every rank reads: [B, S, F]."""
        return x_BSF

    def norms(
        self, xs_BSF: Sequence[Tensor], params: Sequence[Tensor], eps: float, one: bool = False
    ) -> tuple[Tensor, ...]:
        """RMSNorm of each over the features of all ranks; with `one`, times 1 + weight."""
        return tuple(rms_norm(x, p, eps, one) for x, p in zip(xs_BSF, params, strict=True))

    def mlp(self, roles: tuple[Role, Role], x_BSD: Tensor, into: Tensor, out: Tensor, gate: Gate) -> Tensor:
        """`gate` between the products with `into` and `out`: this rank's tokens."""
        (gate_up,) = self.columns(roles[0], x_BSD, (into,))
        return self.row(roles[1], gate(gate_up), out)

    def experts(
        self, rows_RD: Tensor, into: Tensor, out: Tensor, offsets_E: Tensor, of_rows: OfRows, gate: Gate
    ) -> Tensor:
        """`gate` between each expert's products with `into` and `out`."""
        return grouped_linear(gate(grouped_linear(rows_RD, into, offsets_E), *of_rows), out, offsets_E)

    def embedding(self, ids_BS: Tensor, param_VD: Tensor) -> Tensor:
        """Rows of this rank's tokens, from the ids of all tokens."""
        return embedding(ids_BS, param_VD)

    def own(self, values_T: Tensor) -> Tensor:
        """Slices a tensor over all tokens of the microbatch to those of this rank."""
        return values_T

    def total(self, values: Tensor) -> Arriving:
        """Begins the sum over ranks of integers, which each rank has for its own tokens; `values` is not changed.

        The caller must wait for it before its op ends: see `runtime.lanes.SideStream`.
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


class Fp8Linears(Linears):
    """Whole weights, all tokens, with products of layers in fp8; the head's are not."""

    def __init__(self, products: Products, ends: tuple[int, int] = (0, 0), loss_pieces: int = 1) -> None:
        """The first `ends[0]` and the last `ends[1]` layers of the model do not use fp8."""
        super().__init__(loss_pieces)
        self.products, self.ends = products, ends

    def of_layer(self, number: int, layers: int) -> Linears:
        return self if self.ends[0] <= number < layers - self.ends[1] else WHOLE

    def columns(self, role: Role, x_BSD: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if role == "head":
            return super().columns(role, x_BSD, params)
        return fp8_linears(x_BSD, params, self.products)

    def row(self, role: Role, x_BSF: Tensor, param: Tensor) -> Tensor:
        return fp8_linears(x_BSF, (param,), self.products)[0]

    def mlp(self, roles: tuple[Role, Role], x_BSD: Tensor, into: Tensor, out: Tensor, gate: Gate) -> Tensor:
        if self.products.all:
            return fp8_mlp(x_BSD, into, out)
        return super().mlp(roles, x_BSD, into, out, gate)

    def experts(
        self, rows_RD: Tensor, into: Tensor, out: Tensor, offsets_E: Tensor, of_rows: OfRows, gate: Gate
    ) -> Tensor:
        if self.products.forward or self.products.dgrad:
            return fp8_experts(rows_RD, into, out, offsets_E, of_rows, self.products)
        return super().experts(rows_RD, into, out, offsets_E, of_rows, gate)


def linears_of(config: Config) -> Linears:
    """The `Linears` of a resolved configuration with whole weights."""
    p, pieces = config.precision, config.plan.pieces
    if p.compute != "fp8":
        return Linears(pieces) if pieces > 1 else WHOLE
    products = Products(*(name in p.fp8_products for name in ("forward", "dgrad", "wgrad")))
    return Fp8Linears(products, p.fp8_ends, pieces)


_READ_IN_FP8 = ("wq", "wk", "wv", "wo", "w_gate_up", "w_down")
"""Last words of the names of weights that `Fp8Linears` reads."""


def gathered_in_fp8(config: Config) -> Callable[[str], bool] | None:
    """Which weights, by name, are gathered in fp8; None: none."""
    if config.precision.gather != "fp8":
        return None
    linears, layers = linears_of(config), config.model.layers

    def chosen(name: str) -> bool:
        first, *middle, last = name.split(".")
        return first == "layers" and last in _READ_IN_FP8 and linears.of_layer(int(middle[0]), layers) is linears

    return chosen


class SplitLinears(Linears):
    """A slice of the weights. All tokens between column and row layers; elsewhere a slice of them, [1, T / P, D]."""

    def __init__(self, parallel: TensorParallel, ways: Mapping[str, Way], sequences: int) -> None:
        """`ways` by role; roles without one do not overlap. A microbatch has `sequences`."""
        super().__init__()
        self.parallel, self.ways, self.sequences = parallel, dict(ways), sequences
        self.size = parallel.size  # pyrefly: ignore

    def _way(self, role: Role) -> Way:
        return self.ways.get(role, Way())

    def columns(self, role: Role, x_BSD: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outs = column_linear(x_BSD.flatten(0, 1), params, self.parallel, self._way(role))
        return tuple(out.view(self.sequences, -1, out.shape[1]) for out in outs)

    def gathered(self, x_BSF: Tensor) -> Tensor:
        return gathered_tokens(x_BSF.flatten(0, 1), self.parallel).view(self.sequences, -1, x_BSF.shape[-1])

    def row(self, role: Role, x_BSF: Tensor, param: Tensor) -> Tensor:
        return row_linear(x_BSF.flatten(0, 1), param, self.parallel, self._way(role)).unsqueeze(0)

    def norms(
        self, xs_BSF: Sequence[Tensor], params: Sequence[Tensor], eps: float, one: bool = False
    ) -> tuple[Tensor, ...]:
        return tuple(scale(x, p, one) for x, p in zip(split_norms(xs_BSF, self.parallel, eps), params, strict=True))

    def own(self, values_T: Tensor) -> Tensor:
        return values_T.chunk(self.size)[self.parallel.rank]

    def total(self, values: Tensor) -> Arriving:
        return self.parallel.begin_total(values.clone())

    def embedding(self, ids_BS: Tensor, param_VD: Tensor) -> Tensor:
        return split_embedding(ids_BS.flatten(), param_VD, self.parallel).unsqueeze(0)

    def cross_entropy(self, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        return split_cross_entropy(logits_TV, targets_T, self.parallel)
