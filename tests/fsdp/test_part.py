"""What programs compute by hand from shards and their gradients, beside the same of whole tensors."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import hocket
from tests.helpers.ranks import run_ranks

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x.norm(),
    "norm of order 1": lambda x: torch.norm(x.detach(), 1),
    "norm of order inf": lambda x: x.norm(p=float("inf")),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3.0),
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "data.norm": lambda x: x.data.norm(2),
    "squares": lambda x: (x**2).sum(),
    "sum in fp64": lambda x: x.sum(dtype=torch.float64),
    "mean": lambda x: x.abs().mean(),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "amax": lambda x: x.amax(),
    "any": lambda x: (x > 0.4).any(),
    "all": lambda x: torch.isfinite(x).all(),
    "count": lambda x: (x > 0).count_nonzero(),
    "how many": lambda x: (x > 0).sum(),
    "std": lambda x: x.std(),
    "var": lambda x: x.var(unbiased=False),
    "var by position": lambda x: x.var(False),
    "std by position": lambda x: torch.std(x, False),
    "all elements": lambda x: x[...].sum() + x[:].sum(),
    "masked": lambda x: x.masked_fill(x > 0.1, 3.0).sum(),
    "dot": lambda x: torch.sum(x * x.clone()),
    "nan": lambda x: torch.where(x > 0, torch.nan, x).max(),
    "foreach": lambda x: torch._foreach_norm([x])[0],
    "foreach of another": lambda x: torch._foreach_mul([x.data, x.detach()], 0.5)[1].norm(),
    "foreach of two": lambda x: torch._foreach_norm(torch._foreach_add([x.data], [x.data], alpha=2))[0],
    "isclose": lambda x: torch.isclose(x, x.clone().mul_(2)).all(),
    "clone": lambda x: x.clone().mul_(2).norm(),
    "deepcopy": lambda x: copy.deepcopy(x).norm(),
    "mean by hand": lambda x: (x**2).sum() / x.numel(),
    "by rows": lambda x: x.sum() / len(x) + x.sum() / x.shape[0] + x.sum() / x.size(-1) + x.sum() * x.ndim,
    "view": lambda x: x.view(-1).mul(2).norm(),
    "other views": lambda x: x.reshape(x.shape).flatten().unsqueeze(0).sum() + x.view_as(x).reshape(1, -1).sum(),
    "beside a whole": lambda x: (x * torch.arange(1.0, x.numel() + 1).view(x.shape)).sum(),
    "a whole beside": lambda x: torch.where(torch.ones(x.shape) > 0, x, 9.0).sum(),
}  # fmt: skip
FLAT = ("by rows", "beside a whole", "a whole beside")
"""Where ranks keep whole weights, torch sees them, gradients and `data` as 1-D."""
ALIKE: dict[str, Callable[[Tensor], bool]] = {
    "equal": lambda x: torch.equal(x, x.clone()),
    "one element differs": lambda x: torch.equal(x, torch.where(x == x.max(), 0.0, x)),
    "equal by name": lambda x: torch.equal(input=x, other=x.clone()),
    "close": lambda x: torch.allclose(x, x * (1 + 1e-7)),
    "close by name": lambda x: torch.allclose(x, other=x * (1 + 1e-7)),
    "not close": lambda x: x.allclose(torch.where(x == x.max(), 0.0, x), rtol=1e-3),
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "median": lambda x: x.median(),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: [*x.sort()],
    "kthvalue": lambda x: x.flatten().kthvalue(3).values,
    "cat": lambda x: torch.cat([x.view(-1), x.view(-1)]),
    "argmax": lambda x: x.argmax(),
    "sum along": lambda x: x.sum(0),
    "mean along": lambda x: x.mean(dim=-1, keepdim=True),
    "singular value": lambda x: torch.linalg.norm(x, 2),
    "norm of order 0": lambda x: x.norm(p=0),
    "product": lambda x: x.view(1, -1) @ x.view(-1, 1),
    "mse_loss": lambda x: nn.functional.mse_loss(x, torch.zeros(x.shape)),
    "selected": lambda x: x.masked_select(x < 9),
    "normalize": lambda x: nn.functional.normalize(x.view(-1), dim=0),
    "softmin": lambda x: nn.functional.softmin(x, dim=0),
    "var_mean": lambda x: [*torch.var_mean(x)],
    "where": lambda x: [*torch.where(x > 0)],
    "unique": lambda x: x.unique_consecutive(),
    "max and where": lambda x: [*x.view(-1).max(0)],
}
"""What all ranks compute with the whole."""
REFUSED: dict[str, Callable[[Any], object]] = {
    "item": lambda x: x.item(),
    "some": lambda x: x[:100],
    "chosen": lambda x: x[x < 9],
    "narrow": lambda x: x.narrow(0, 0, 1),
    "index_fill": lambda x: x.index_fill_(0, torch.tensor([0]), 1.0),
    "put": lambda x: x.put_(torch.tensor([0]), torch.tensor([1.0])),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "list": lambda x: [*x],
    "split": lambda x: x.split(1),
    "turned": lambda x: x.T if x.ndim > 1 else x.tolist(),
    "diagonal": lambda x: x.diagonal() if x.ndim > 1 else x.tolist(),
    "rows": lambda x: x.unbind(),
    "data_ptr": lambda x: x.data_ptr(),
    "a whole changed": lambda x: torch.zeros(x.shape).add_(x) if x.ndim > 1 else x.tolist(),
    "some written": lambda x: x.__setitem__(0, torch.tensor(1.0)),
    "slice written": lambda x: x.__setitem__(slice(0, 1), 1.0),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def numbers(rank: int, replicas: int) -> None:
    mesh = init_device_mesh("cpu", (replicas, 2 // replicas)) if replicas > 1 else None
    plain, sharded = model(), model()
    hocket.fully_shard(sharded, units=nn.Linear, mesh=mesh)
    x = torch.randn(4, 7)
    for one in (plain, sharded):
        one(x).square().sum().backward()
    for (name, whole), shard in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert whole.grad is not None
        assert shard.grad is not None
        for key, of in NUMBERS.items():
            with torch.no_grad():
                for ours, wanted in ((shard, whole), (shard.data, whole.data), (shard.grad, whole.grad)):
                    if replicas > 1 and key in FLAT:
                        continue
                    value = of(ours)
                    assert type(value) is Tensor, (name, key)
                    torch.testing.assert_close(value, of(wanted), equal_nan=True, msg=lambda text: f"{key}: {text}")  # noqa: B023
        for key, of_both in ALIKE.items():
            for ours in (shard.data, shard.grad):
                assert of_both(ours) is ("differs" not in key and "not" not in key), (name, key)
        assert torch.equal(shard, whole.detach())  # as a whole tensor
        assert not torch.equal(shard, whole.detach() * (whole != whole.max()))
        for of in REFUSED.values():
            for ours in (shard.data, shard.grad) if replicas == 1 else ():
                refused = f"{name}, of which this rank has|equal|converted to Scalar"
                with pytest.raises((ValueError, RuntimeError), match=refused):
                    of(ours)
        for key, of in WHOLE.items() if replicas == 1 else ():
            for ours, wanted in ((shard.data, whole.data), (shard.grad, whole.grad)):
                if key != "singular value" or whole.ndim > 1:
                    torch.testing.assert_close(of(ours), of(wanted), msg=lambda text: f"{key}: {text}")  # noqa: B023


def rows(rank: int) -> None:
    plain, sharded = model(), cast(Any, model())
    ctx = hocket.fully_shard(sharded, units=nn.Linear)
    whole: Any = plain[0].weight
    shard: Any = next(sharded.parameters())
    with torch.no_grad():
        for i in range(-5, 5):
            torch.testing.assert_close(shard[i].norm(), whole[i].norm())
            torch.testing.assert_close(shard[i].mul(2).max(), 2 * whole[i].max())
        for one in (whole, shard):
            one[1] = 3.0
            one[-1].fill_(4)
            one[one > 3.5] = 5.0
        with pytest.raises(ValueError, match=r"__setitem__ of a part of 0\.weight"):
            shard[0] = torch.ones(7)
    with ctx.gathered():
        assert torch.equal(sharded[0].weight, whole)


def test_rows_of_a_matrix() -> None:
    run_ranks(rows, 2)


def test_numbers_are_those_of_the_whole() -> None:
    run_ranks(numbers, 2, 1)


def test_replicas_hold_the_whole() -> None:
    run_ranks(numbers, 2, 2)


def others(rank: int) -> None:
    sharded, apart = model(), model()
    hocket.fully_shard(sharded, units=nn.Linear)
    hocket.fully_shard(apart, options=hocket.ShardOptions(bucket=20), units=nn.Linear)
    sharded(torch.randn(4, 7)).sum().backward()
    first, second = sharded.parameters(), sharded.parameters()
    weight, bias = next(first), [*second][3]
    assert weight.grad is not None
    with pytest.raises(ValueError, match=r"parts of 0\.weight and 1\.bias, of which this rank has other elements"):
        torch.add(weight.data, bias.data)
    with pytest.raises(ValueError, match=r"parts of 0\.weight and 1\.bias, of which this rank has other elements"):
        torch._foreach_add([weight.data], [bias.data])
    refused = r"parts of 0\.weight and 1\.bias, of which this rank has other elements"
    for change in (
        lambda: torch._foreach_add_([weight.data], [bias.data]),
        lambda: torch._foreach_copy_([weight.data], [bias.data]),
        lambda: weight.data.copy_(bias.data),
        lambda: weight.data.__setitem__(slice(None), bias.data),
        lambda: setattr(weight, "data", bias.data),
        lambda: setattr(weight, "grad", bias.data),
    ):
        with pytest.raises(ValueError, match=refused):
            change()
    was, whole = weight.grad.clone(), torch.arange(35.0).view(5, 7)
    weight.grad.copy_(whole)
    assert torch.equal(weight.grad, whole)
    weight.grad = whole + 1
    assert torch.equal(weight.grad, whole + 1)
    weight.grad = was
    assert repr(weight.grad).startswith("Part(0.weight: elements ")
    flat, place = torch.zeros(7), bias.place  # pyrefly: ignore[missing-attribute]
    flat[place.span.lo : place.span.hi] = bias.data
    assert torch.equal(place.span.of(flat), bias.to_local())  # pyrefly: ignore[missing-attribute]
    # What leaves the program is a plain tensor of what is here.
    buffer = io.BytesIO()
    torch.save({"grad": weight.grad, "weight": weight.data.clone(), "state": sharded.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert torch.equal(saved["grad"], weight.grad.to_local())  # pyrefly: ignore[missing-attribute]
    assert type(sharded.state_dict()["0.weight"]) is type(torch.zeros_like(weight)) is Tensor
    assert weight.grad is weight.grad
    weight.grad *= 2
    assert torch.equal(weight.grad, 2 * saved["grad"])
    # A penalty has the value of the whole, and is an error in backward.
    penalty = weight.square().sum()
    torch.testing.assert_close(penalty.detach(), model().get_parameter("0.weight").detach().square().sum())
    rows_of, spread = weight.max(dim=1).values.sum(), torch.var_mean(weight)[0]  # tuples keep the graph, too
    for number in (penalty, torch.linalg.matrix_norm(weight), rows_of, spread, weight.topk(2).values.sum()):
        with pytest.raises(ValueError, match="a gradient reached the shard"):
            number.backward()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.layer = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def scalars(rank: int) -> None:
    """One rank has the element, and all ranks read it."""
    sharded = Scaled()
    hocket.fully_shard(sharded)
    sharded(torch.ones(2, 7)).sum().backward()
    scale = next(sharded.parameters())
    assert float(scale) == 0.5
    assert int(scale.data * 4) == 2
    assert bool(scale > 0.4)
    assert scale.grad is not None
    assert not math.isnan(scale.grad)
    with pytest.raises(ValueError, match="of which this rank has"):
        np.asarray(next(sharded.layer.parameters()).data)


def test_a_parameter_of_one_element_has_a_value_on_all_ranks() -> None:
    run_ranks(scalars, 2)


def test_parts_of_other_elements_and_what_leaves_the_program() -> None:
    run_ranks(others, 2)
