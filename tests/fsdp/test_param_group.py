"""The bytes of a unit on gloo ranks: gathered, reduced, forgotten and read, against whole tensors."""

import pytest
import torch
from torch import Tensor

from hocket.fsdp.options import Precision
from tests.fsdp.grouped import (
    BF16,
    FP16,
    FP32,
    SHAPES,
    Case,
    added,
    build,
    expect_grads,
    gather,
    grad_of,
    reduce,
    values,
)
from tests.helpers.ranks import run_ranks

CASES = [
    Case(),
    Case((3,)),
    Case((3,), "no_shard"),
    Case((2, 2)),
    Case((1, 2)),
    Case((2, 1)),
    Case((2, 2), precision=Precision(FP32, BF16, BF16, FP32)),
    Case((2, 2), precision=Precision(FP32, BF16, FP32, FP32)),
    Case((2,), precision=Precision(BF16, BF16, BF16, FP32)),
    Case((2,), precision=Precision(FP32, FP16, FP32, BF16)),
]


def every(rank, check, cases):
    """Run a check of all cases in one set of processes."""
    found = []
    for case in cases:
        try:
            found.append(check(rank, case))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return found


WORLDS = {world: [case for case in CASES if case.world == world] for world in (1, 2, 3, 4)}


def _weights(rank, case):
    group, params, buffer = build(case)
    assert [shard.dtype for shard in group.shards] == [case.precision.main] * len(SHAPES)
    gather(group, buffer)
    for name, value in values(0).items():
        assert params[name].dtype == group.compute_dtype
        assert torch.equal(params[name], value.to(group.compute_dtype)), name
    pointer = params["w"].data_ptr()
    assert not group.stale()
    with torch.no_grad():
        torch._foreach_add_(list[Tensor](group.shards), 2.0)  # what an optimizer does
    assert group.stale()
    if not group.whole:
        buffer.free()
        assert buffer.flat.untyped_storage().nbytes() == 0
    gather(group, buffer)
    assert not group.stale()
    for name, value in values(0).items():
        assert torch.equal(params[name], (value + 2).to(group.compute_dtype)), name
    if group.whole:
        assert params["w"].data_ptr() == pointer == group.weight.data_ptr()
    covered = sum(map(len, group.spans))
    assert group.main.count_nonzero() <= covered
    apart = group.whole and group.compute_dtype != case.precision.main
    assert (group.weight is group.main) != apart
    return [(member.name, span.lo, span.hi) for member, span in zip(group.members, group.spans, strict=True)]


@pytest.mark.parametrize("world", WORLDS)
def test_weights_are_gathered_as_the_optimizer_left_them(world):
    by_rank = run_ranks(every, world, _weights, WORLDS[world])
    for case, ranges in zip(WORLDS[world], zip(*by_rank, strict=True), strict=True):
        check_ranges(case, ranges)


def check_ranges(case, ranges):
    """Together the ranks keep every element, each in as many copies as there are replicas."""
    kept = {name: sorted((lo, hi) for rank in ranges for n, lo, hi in rank if n == name and lo < hi) for name in SHAPES}
    for name, shape in SHAPES.items():
        unique = sorted(set(kept[name]))
        assert sum(hi - lo for lo, hi in unique) == torch.Size(shape).numel()  # once each, over all ranks
        assert [lo for lo, _ in unique] == [0, *(hi for _, hi in unique)][:-1]
    if case.sizes and case.sizes[-1] > 1 and case.strategy != "no_shard":
        assert any(lo == hi for rank in ranges for _, lo, hi in rank)  # there are empty shards


def _grads(rank, case):
    group, _, _ = build(case, divide=2.0)
    world = case.world
    round_ = [[values(10 * i + r + 1) for r in range(world)] for i in range(4)]
    wanted = [{name: value / 2 for name, value in added(*ranks).items()} for ranks in round_]
    expect_grads(group, {})
    reduce(group, round_[0][rank])
    expect_grads(group, wanted[0])
    reduce(group, round_[1][rank], outer=False)  # more microbatches follow
    reduce(group, round_[2][rank])
    expect_grads(group, added(*wanted[:3]))
    group.reduce_outer().wait()  # nothing is left to exchange
    expect_grads(group, added(*wanted[:3]))
    views = [grad_of(shard) for shard in group.shards]
    assert all(shard.grad is view for shard, view in zip(group.shards, views, strict=True))
    before, kept = [view.clone() for view in views], group.nbytes
    for shard in group.shards:
        shard.grad = None
    expect_grads(group, {})
    freed = group.layout.shard * group.formats.accumulate.itemsize
    assert kept - group.nbytes >= freed  # the memory is given back
    reduce(group, round_[3][rank])
    expect_grads(group, wanted[3])
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))  # theirs who hold them
    group.shards[0].grad = None  # one parameter alone
    reduce(group, round_[0][rank])
    expect_grads(group, {**added(wanted[3], wanted[0]), "w": wanted[0]["w"]})
    for shard in group.shards:  # zero_grad(set_to_none=False)
        grad_of(shard).zero_()
    reduce(group, round_[1][rank])
    expect_grads(group, wanted[1])
    for shard in group.shards:  # clipping
        grad_of(shard).mul_(0.5)
    reduce(group, round_[2][rank], outer=False)
    reduce(group, {})
    expect_grads(group, {name: wanted[1][name] / 2 + wanted[2][name] for name in SHAPES})
    for shard in group.shards:
        shard.grad = torch.full_like(shard, 3)
    reduce(group, round_[0][rank])
    expect_grads(group, {name: wanted[0][name] + 3 for name in SHAPES})
    reduce(group, round_[1][rank], outer=False)
    for shard in group.shards:  # an abandoned step
        shard.grad = None
    reduce(group, round_[2][rank])
    expect_grads(group, wanted[2])
    group.forget_gradients()
    expect_grads(group, {})
    reduce(group, round_[3][rank])
    expect_grads(group, wanted[3])


@pytest.mark.parametrize("world", WORLDS)
def test_gradients_add_up_and_are_forgotten(world):
    run_ranks(every, world, _grads, WORLDS[world])


@pytest.mark.parametrize("accumulate", [FP32, BF16], ids=str)
def test_what_is_done_to_all_gradients_at_once_is_seen_by_readers(accumulate):
    group, _, _ = build(Case(precision=Precision(accumulate=accumulate)))
    reduce(group, values(1))
    expect_grads(group, values(1))
    group.main_grad.mul_(2)
    expect_grads(group, added(values(1), values(1)))


def _local(rank, case):
    group, _, _ = build(case)
    rounds = [[values(10 * i + r + 1) for r in range(case.world)] for i in range(3)]
    for i in range(2):
        for k, name in enumerate(SHAPES):
            if (i, name) != (1, "odd"):
                group.local.add(k, rounds[i][rank][name].to(group.compute_dtype))
    assert group.local
    expect_grads(group, {})
    flat = torch.zeros(group.layout.total, dtype=group.formats.wire)
    views = group.layout.views(flat)
    for name, view in zip(SHAPES, views, strict=True):
        view.copy_(rounds[2][rank][name])
    group.local.merge(views)
    assert not group.local
    group.make_grads()
    group.reduce(flat).wait()
    group.reduce_outer().wait()
    total = [added(*ranks) for ranks in rounds]
    wanted = added(*total)
    wanted["odd"] = wanted["odd"] - total[1]["odd"]
    expect_grads(group, wanted)
    mine = group.local.views[0]
    for times in (1, 2):  # what was merged is not there any more
        group.local.add(0, torch.ones_like(mine, dtype=group.compute_dtype))
        assert torch.equal(mine, torch.full_like(mine, times))
    assert mine.dtype == case.precision.accumulate
    group.forget_gradients()
    assert not group.local


@pytest.mark.parametrize("case", [Case((2,)), Case((2, 2)), CASES[-1]], ids=str)
def test_gradients_added_up_without_communication_join_the_next_reduction(case):
    run_ranks(_local, case.world, case)


def _wire(rank):
    """What is sent is rounded to the wire dtype, what is added up is not."""
    group, _, _ = build(Case((2,), precision=Precision(FP32, FP32, BF16, FP32)))
    torch.manual_seed(rank)
    mine = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    reduce(group, mine)
    reduce(group, mine)
    wanted = {}
    for name, shape in SHAPES.items():
        parts = []
        for r in range(2):
            torch.manual_seed(r)
            parts.append({n: torch.randn(s) for n, s in SHAPES.items()}[name].to(BF16).float())
        once = parts[0] + parts[1]
        wanted[name] = once + once
        assert wanted[name].shape == shape
    expect_grads(group, wanted)


def test_the_wire_rounds_and_the_sum_does_not():
    run_ranks(_wire, 2)


def _memory(rank):
    for case, each in [
        (Case((2, 2)), 4),
        (Case((2, 2), precision=Precision(compute=BF16)), 4),
    ]:
        group, _, _ = build(case)
        assert group.nbytes == group.layout.shard * each
        reduce(group, values(rank))
        assert group.nbytes == group.layout.shard * each + group.layout.shard * 4
        group.forget_gradients()
        assert group.nbytes == group.layout.shard * each
        assert group.layout.shard * 2 == group.layout.total
        assert group.total_bytes == group.layout.total * group.compute_dtype.itemsize
        assert group.layout.total - sum(value.numel() for value in values(0).values()) < 64 * 2 * len(SHAPES)


def test_bytes_of_shards():
    run_ranks(_memory, 4)
