"""Any elementwise torch optimizer; its groups are the user's; norms over several meshes."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hocket
from tests.fsdp.test_parity import train
from tests.fsdp.twin import OPTIMIZERS, Case, Pair, naming
from tests.helpers.ranks import run_ranks


def test_optimizers():
    """Under one strategy each: a shard's elements, or all of them, make no difference to what is elementwise."""
    strategies = ("no_shard", "optim_grads_params")
    train(2, [Case("stack", strategies[i % 2], 2, optimizer=one) for i, one in enumerate(OPTIMIZERS)])


def closures(rank: int) -> None:
    """LBFGS-like use: the optimizer runs forward and backward itself."""
    pair = Pair(Case("stack", optimizer="momentum"), rank, 2)
    losses = []

    def closure() -> Any:
        pair.optimizer.zero_grad()
        loss = pair.forward()
        loss.backward()
        losses.append(loss)
        return loss

    for step in range(3):
        returned = pair.optimizer.step(closure)
        assert returned is losses[-1]
        pair.optimizer.zero_grad()
        pair.expect(losses[step])
        pair.twin.step()
        pair.steps += 1
        pair.compare()


def test_closures():
    run_ranks(closures, 2)


def groups_untouched(rank: int) -> None:
    pair = Pair(Case("stack"), rank, 2)
    named = dict(pair.module.named_parameters())
    decayed = [p for n, p in named.items() if n.endswith("weight")]
    rest = [p for n, p in named.items() if not n.endswith("weight")]
    optimizer = torch.optim.AdamW([{"params": decayed, "lr": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=0.02)
    pair.forward().backward()
    optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], decayed, strict=True))
    assert all(a is b for a, b in zip(optimizer.param_groups[1]["params"], rest, strict=True))
    assert dict(pair.module.named_parameters()).keys() == named.keys()
    assert all(p is named[n] for n, p in pair.module.named_parameters())


def test_parameter_groups_are_the_users():
    run_ranks(groups_untouched, 2)


def clip(rank: int, cases: list[Case]) -> None:
    for case in cases:
        with naming(case):
            pair = Pair(case, rank, dist.get_world_size())
            pair.microbatch()
            totals = [gradient.total for gradient in pair.twin.gradients.values()]
            whole = math.sqrt(sum(float(total.double().square().sum()) for total in totals if total is not None))
            before = [p.grad.clone() for p in pair.module.parameters() if p.grad is not None]
            for limit in (1e6, 0.05):  # the first changes nothing
                norm = hocket.clip_grad_norm_(pair.ctx, limit)
                assert math.isclose(float(norm), whole, rel_tol=1e-5), (float(norm), whole)
                factor = min(1.0, limit / (whole + 1e-6))
                after = [p.grad for p in pair.module.parameters() if p.grad is not None]
                for a, b in zip(before, after, strict=True):
                    torch.testing.assert_close(b, a * factor)


def test_clipping_measures_the_whole_norm():
    """Over one mesh, over two meshes (experts), and with replicas."""
    cases = [
        Case("stack"),
        Case("unused"),
        Case("frozen"),
        Case("odd"),
        Case("stack", "no_shard"),
        Case("moe", experts=2),
        Case("stack", mesh=(2, 2)),
        Case("moe", "no_shard", experts=2),
        Case("moe", "optim", experts=4),
    ]
    run_ranks(clip, 4, cases)


def clip_is_public(rank: int) -> None:
    """The module does as well as its context; a second reading of gradients changes nothing."""
    pair = Pair(Case("stack"), rank, 2)
    pair.microbatch()
    assert torch.equal(hocket.clip_grad_norm_(pair.module, 1e9), hocket.clip_grad_norm_(pair.ctx, 1e9))
    pair.step()


def test_clipping_takes_module_or_context():
    run_ranks(clip_is_public, 2)


def sparse(rank: int) -> None:
    """Gradients of `nn.Embedding(sparse=True)` are sent dense."""
    models = []
    for is_sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 6, sparse=is_sparse), nn.Linear(6, 6))
        hocket.fully_shard(model, units=nn.Linear)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.arange(4) + rank + step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    for ours, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, wanted)


def test_sparse_gradients():
    run_ranks(sparse, 2)
