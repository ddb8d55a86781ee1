"""torch.compile of the bodies of units: hooks stay outside of what is compiled."""

from typing import Any

import pytest
import torch

import hocket
from tests.fsdp.models import WIDTH, Block, Chain
from tests.fsdp.twin import Case, Pair
from tests.helpers.ranks import run_ranks


def compiled(rank: int, backend: str) -> None:
    """`module.compile()` on units, after sharding; kernels may differ in rounding."""
    for strategy in ("optim", "optim_grads_params"):
        pair = Pair(Case("deep", strategy, 2), rank, 2)
        pair.exact = False
        for block in pair.module.blocks:
            block.compile(backend=backend)
        torch.compiler.reset()
        pair.train()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_units(backend):
    run_ranks(compiled, 2, backend)


def compiled_before(rank: int) -> None:
    """Modules wrapped by `torch.compile` before they are sharded; no body is compiled anew in later steps."""
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    plain = Chain(*(Block() for _ in blocks))
    plain.load_state_dict(Chain(*blocks).state_dict())
    wrapped: list[Any] = [torch.compile(block, backend="aot_eager") for block in blocks]
    model = Chain(*wrapped)
    hocket.fully_shard(model, units=blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(3, WIDTH)  # the same on both ranks, so that the mean is one rank's gradient
    counts = []
    for _ in range(3):
        for one, by in ((model, optimizer), (plain, reference)):
            loss = one(x).square().mean()
            loss.backward()
            by.step()
            by.zero_grad()
        counts.append(sum(torch._dynamo.utils.counters["frames"].values()))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert counts[1] == counts[2], counts


def test_units_compiled_before():
    run_ranks(compiled_before, 2)
