"""Shards as an optimizer, a reader and a copier see them, on one rank."""

import copy

import pytest
import torch
from torch import nn

from hocket import ShardOptions, fully_shard
from hocket.fsdp.options import Precision
from tests.fsdp.grouped import BF16, Case, build, gather, grad_of, reduce, values


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=lambda make: make.__name__)
def test_a_group_notices_every_kind_of_optimizer(make, how):
    group, params, buffer = build(Case(precision=Precision(compute=BF16)))
    gather(group, buffer)
    reduce(group, values(1))
    assert not group.stale()
    optimizer = make(group.shards, lr=0.5, **how)
    optimizer.step()
    assert group.stale()
    before = params["w"].clone()
    gather(group, buffer)
    assert not torch.equal(params["w"], before)
    assert torch.equal(params["w"], group.shards[0].to(BF16))
    optimizer.zero_grad()  # reads gradients too
    gather(group, buffer)
    group.shards[2].detach().data.fill_(7)  # leaves no trace
    assert not group.stale()
    group.invalidate()
    assert group.stale()
    gather(group, buffer)
    assert torch.equal(params["norm"], torch.full((11,), 7, dtype=BF16))


def test_an_optimizer_on_shards_is_one_on_whole_parameters():
    group, _, _ = build(Case())
    twins = {name: nn.Parameter(value) for name, value in values(0).items()}
    ours = torch.optim.AdamW(group.shards, lr=0.1)
    plain = torch.optim.AdamW(twins.values(), lr=0.1)
    for step in range(3):
        grads = values(step + 1)
        reduce(group, grads)
        for name, twin in twins.items():
            twin.grad = grads[name]
        ours.step()
        plain.step()
        ours.zero_grad()
    for shard in group.shards:
        assert torch.equal(shard, twins[shard.full_name])


def test_readers_are_settled_first():
    group, _, _ = build(Case())
    seen = []
    group.settle = lambda: seen.append(len(seen))
    reduce(group, values(1))
    assert not seen
    assert group.shards[0].grad is not None
    group.shards[1].grad = None
    assert seen == [0]
    group.shards[1].grad = torch.zeros(1)
    assert seen == [0, 1]
    del group.shards[1].grad
    assert group.shards[1].grad is None


def test_wrong_gradients_are_refused():
    group, _, _ = build(Case())
    group.shards[0].grad = torch.ones(37, 11)  # a whole one
    grad = group.shards[0].grad
    assert grad is not None
    assert torch.equal(grad, torch.ones(37, 11))
    with pytest.raises(ValueError, match=r"shape \(11, 37\) does not fit w, which is \(37, 11\)"):
        group.shards[0].grad = torch.zeros(11, 37)
    frozen, _, _ = build(Case(), frozen=True)
    assert not frozen.learning
    assert frozen.grads.flat is None
    assert not any(shard.requires_grad for shard in frozen.shards)
    frozen.shards[0].grad = None
    assert frozen.shards[0].grad is None
    with pytest.raises(ValueError, match="w is frozen and has no gradient"):
        frozen.shards[0].grad = torch.zeros(407)
    with pytest.raises(AssertionError, match="is frozen"):
        frozen.reduce(torch.zeros(frozen.layout.total))


def test_bound_parameters_take_any_dtype_and_storage_and_keep_their_identity():
    """Autograd gives gradients of the new dtype, also where the parameter had one before."""
    group, params, buffer = build(Case(precision=Precision(compute=BF16)))
    w = params["w"]
    gather(group, buffer)
    assert w is group.members[0].param
    (w * 2).sum().backward()
    assert w.grad is not None
    assert w.grad.dtype == BF16
    w.grad = None
    elsewhere = torch.zeros(group.layout.total, dtype=BF16)
    group.members[0].param.data = elsewhere[: w.numel()].view(w.shape)
    version = w._version
    product = w * w  # saves w for backward
    elsewhere.fill_(3)  # as a gather does in between; a write through w itself would be an error
    assert w._version == version
    product.sum().backward()
    assert torch.equal(grad_of(w), torch.full_like(w, 6))


def test_a_model_on_the_meta_device_gets_values_and_trains():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))

    fully_shard(model, units=nn.Linear, options=ShardOptions(device="cpu"))
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = model(torch.ones(1, 5)).sum()
    assert loss.item() == 3 * (5 + 1) + 1
    loss.backward()
    optimizer.step()
    values = [torch.full((3, 5), 0.5), torch.full((3,), 0.5), torch.full((1, 3), 1 - 0.5 * 6), torch.full((1,), 0.5)]
    for shard, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(shard.detach(), value)


def test_a_copy_of_a_shard_is_an_ordinary_parameter():
    group, _, _ = build(Case())
    reduce(group, values(1))
    twin = copy.deepcopy(group.shards[0])
    assert type(twin) is nn.Parameter
    assert twin.grad is None
    (twin * 2).sum().backward()
    assert torch.equal(grad_of(twin), torch.full((37, 11), 2.0))
    twin.grad = None
    assert twin.grad is None
    assert group.shards[0].group is group


def test_shards_do_not_keep_their_group_alive():
    group, _, _ = build(Case())
    shard = group.shards[0]
    del group
    assert shard.group is None  # at once, without a garbage collection
    assert shard.to_local().shape == (37, 11)
