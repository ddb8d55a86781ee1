"""Column and row linears on real ranks: the same as one rank's, in every way of communicating."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.config.overlap import DIRECTIONS, ROLES, Method, possible
from hocket.layers.tensor import TensorParallel, Way, column_linear, row_linear
from hocket.predict.tensor_costs import pieces
from hocket.program.mesh import Mesh
from hocket.runtime.comm import make_groups
from hocket.runtime.weights import WgradQueue, collecting, manage
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
TOKENS, HIDDEN, WIDTHS = 16, 24, (32, 8)


def draw(dtype: torch.dtype) -> dict[str, Tensor]:
    """Input, weights of a column layer with two outputs, of a row layer, and the gradient of the result."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.5).to(dtype)

    columns = {f"column{i}": normal(width, HIDDEN) for i, width in enumerate(WIDTHS)}
    return {"x": normal(TOKENS, HIDDEN), **columns, "row": normal(HIDDEN, WIDTHS[0]), "g": normal(TOKENS, HIDDEN)}


def whole(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one rank computes, in fp32."""
    x, a, b, row = (values[name].float().requires_grad_() for name in ("x", "column0", "column1", "row"))
    hidden = F.silu(F.linear(x, a)) * F.linear(x, b).repeat_interleave(WIDTHS[0] // WIDTHS[1], 1)
    y = F.linear(hidden, row)
    y.backward(values["g"].float())
    grads = {name: t.grad for name, t in (("x", x), ("column0", a), ("column1", b), ("row", row))}
    return {"y": y.detach(), **{name: grad for name, grad in grads.items() if grad is not None}}


def one_rank(rank: int, size: int, ways: tuple[Way, Way], dtype: torch.dtype) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    groups = make_groups(Mesh(tp=size), rank, CPU, "gloo")
    tp = TensorParallel.of(groups.tp, CPU)
    values = draw(dtype)
    x = values["x"].chunk(size)[rank].clone().requires_grad_()
    params = {f"column{i}": nn.Parameter(values[f"column{i}"].chunk(size)[rank].clone()) for i in range(2)}
    params["row"] = nn.Parameter(values["row"].chunk(size, 1)[rank].clone())
    queue = WgradQueue()
    for name, param in params.items():
        manage(param, name).value = param.detach()
    with collecting(queue):
        a, b = column_linear(x, (params["column0"], params["column1"]), tp, ways[0])
        hidden = F.silu(a) * b.repeat_interleave(WIDTHS[0] // WIDTHS[1], 1)
        y = row_linear(hidden, params["row"], tp, ways[1])
    y.backward(values["g"].chunk(size)[rank])
    assert len(queue) == 3
    grads = {name: torch.empty_like(param.detach()) for name, param in params.items()}
    queue.drain(lambda weight: grads[weight.name])
    assert x.grad is not None
    groups.destroy()
    return {"y": y.detach(), "x": x.grad, **grads}


def gathered(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from those of all ranks."""
    return {name: torch.cat([found[name] for found in ranks], 1 if name == "row" else 0) for name in ranks[0]}


PLAIN = (Way(), Way())
WAYS = [
    (Way("ring", "bulk"), Way("pipeline", "ring")),
    (Way("ring", "pipeline"), Way("pipeline", "ring")),
    (Way("ring", "pipeline", (2, 2)), Way("pipeline", "ring", (2, 2))),
    (Way("off", "bulk"), Way("pipeline", "off")),
]


def test_layers_of_two_ranks_are_those_of_one() -> None:
    """And the way changes no bit: the sums over ranks are made in one order, and each row's product by itself."""
    wanted = whole(draw(torch.float32))
    plain = gathered(run_ranks(one_rank, 2, 2, PLAIN, torch.float32))
    for name, value in plain.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    for ways in WAYS[:2]:
        found = gathered(run_ranks(one_rank, 2, 2, ways, torch.float32))
        for name, value in found.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ways", WAYS)
def test_four_ranks_in_bf16(ways: tuple[Way, Way]) -> None:
    wanted = whole(draw(torch.bfloat16))
    found = gathered(run_ranks(one_rank, 4, 4, ways, torch.bfloat16))
    for name, value in found.items():
        scale = wanted[name].abs().max()
        assert (value.float() - wanted[name]).abs().max() < 0.02 * scale, name


def test_pieces_are_every_rank_once_and_ones_own_first() -> None:
    for size in (2, 4, 8):
        for splits in (0, 1, 2, size):
            for rank in range(size):
                found = pieces(rank, size, splits)
                assert found[0] == (rank, rank + 1)
                assert sorted(r for low, high in found for r in range(low, high)) == list(range(size))
                assert len(found) <= (splits or size) + 2


def test_every_way_has_a_layer_that_can_do_it() -> None:
    ways = {way for role in ROLES for direction in DIRECTIONS for way in possible(role, direction)}
    assert ways == set(get_args(Method))
