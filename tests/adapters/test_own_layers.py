"""Layers of one's own, alone and in models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.adapters.source import OwnModel
from hocket.model.parts import ONLY
from hocket.model.source import ChunkPlace
from tests.adapters import own_layers
from tests.adapters.checking import Between, check_layer
from tests.adapters.own_layers import HIDDEN, Dense, Model, Routed

ROOT = Path(__file__).resolve().parents[2]


def test_dense_layer() -> None:
    check_layer(Dense(), HIDDEN, context=own_layers.context)


def test_norms_are_fused_on_gpus() -> None:
    layer = Dense()
    layer.mixer.add_module("norm", torch.nn.RMSNorm(HIDDEN, eps=1e-6))
    source = OwnModel(Between(layer, HIDDEN, own_layers.context))
    for device in ("cpu", "cuda"):
        chunk = source.chunk(ChunkPlace(range(1), True, True, ONLY, torch.device(device)))
        assert ("forward" in vars(chunk.layer(0).layer.mixer.norm)) == (device == "cuda")


class Gated(Dense):
    """No gradient reaches its threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold = torch.nn.Parameter(torch.full((HIDDEN,), 0.1))

    def mlp(self, x_BSD: Tensor) -> Tensor:
        return super().mlp(x_BSD * (x_BSD > self.threshold))


def test_dense_layer_with_a_parameter_that_no_gradient_reaches() -> None:
    check_layer(Gated(), HIDDEN, context=own_layers.context)


def test_layer_with_experts() -> None:
    check_layer(Routed(), HIDDEN, context=own_layers.context)


def test_a_forward_that_fails() -> None:
    with pytest.raises(ValueError, match=r"the forward of layer 0, Dense, fails on \(2, 6, 17\): "):
        check_layer(Dense(), HIDDEN + 1, context=own_layers.context)
    with pytest.raises(ValueError, match="the forward of layer 0, Dense, fails on"):
        check_layer(Dense(), HIDDEN)


class Forgetful(Dense):
    """Its mlp leaves out the scale."""

    def mlp(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.down(torch.nn.functional.gelu(self.up(x_BSD)))

    def forward(self, x_BSD: Tensor, context: Tensor) -> Tensor:
        return super().mlp(self.attention(x_BSD, context))


class Weighted(Routed):
    """Its merge has weights."""

    def merge(self, rows_TD: Tensor, keep: Any) -> Tensor:
        return super().merge(self.shared(rows_TD), keep)


class Unflat(Routed):
    """Its rows are no rows."""

    def route(self, x_BSD: Tensor) -> Any:
        rows_TD, ids_TK, weights_TK, keep = super().route(x_BSD)
        return rows_TD.view_as(x_BSD), ids_TK, weights_TK, keep


class Whole(Routed):
    """Its experts know how many there are."""

    def experts(self, rows_RD: Tensor, ends_L: Tensor) -> Tensor:
        return super().experts(rows_RD, ends_L) * len(ends_L) / own_layers.EXPERTS


class Remembering(Dense):
    """Its second piece reads what the first has left on the module."""

    def attention(self, x_BSD: Tensor, context: Tensor) -> Tensor:
        self.left = super().attention(x_BSD, context)
        return self.left

    def mlp(self, x_BSD: Tensor) -> Tensor:
        return super().mlp(self.left)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Forgetful, r"pieces of layer 0, Forgetful, do not compute what its forward does: the output differs"),
        (Weighted, r"pieces of layer 0, Weighted, do not fit together: merge reads parameters"),
        (Whole, r"the experts of layer 0, Whole, do not compute the same where a rank has half of them; fix: param"),
        (Unflat, r"pieces of layer 0, Unflat, do not fit together"),
        (
            Remembering,
            r"layer 0, Remembering, do not compute what its forward does: the output differs; fix: .* keep nothing",
        ),
    ],
)
def test_pieces_that_do_not_fit(layer: type[torch.nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_layer(layer(), HIDDEN, context=own_layers.context)


def test_a_difference_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the planned step goes wrong, which no comparison of pieces sees."""
    from hocket.layers import functional

    monkeypatch.setattr(functional, "_sum_wgrad", lambda g, out, add, scale: out.fill_(1.0))
    with pytest.raises(AssertionError, match=r"beyond 0:\n.*gradient of layers.0.mixer.into.bias differs"):
        check_layer(Dense(), HIDDEN, context=own_layers.context)


def test_model_of_both_kinds() -> None:
    import hocket

    model = Model([Dense(), Routed(), Dense()])
    step = hocket.plan_model(model, {"train.sequences": 2, "data.sequence_length": 8, "train.microbatches": 2})
    ids = torch.randint(32, (4, 9))
    batch = ids[:, :-1], ids[:, 1:]
    first = step(batch, 1e-2)
    assert step(batch, 1e-2).loss < first.loss
    step.load_into(model)
    logits = model(batch[0])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).item()
    assert step.evaluate(batch) == pytest.approx(loss, rel=1e-5)
