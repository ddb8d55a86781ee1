"""From device meshes to process groups, and meshes that don't fit."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hocket
from hocket.fsdp import shard_groups
from hocket.fsdp.options import ShardOptions
from hocket.fsdp.shard_groups import Placement, shard_groups_for
from hocket.runtime.comm import Group
from hocket.runtime.transports import Gloo, Local, Null
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pipe", "replicate", "shard")[-len(sizes) :])


def _check(group, value):
    """A group that works is one that adds up; each rank puts in `value`, known to all as a function of the rank."""
    total = torch.full((1,), float(value(dist.get_rank())))
    group.all_reduce(total).wait()
    assert total.item() == sum(value(rank) for rank in group.ranks)


def _one_axis(rank, strategy, sizes):
    groups = shard_groups_for(Placement(mesh_of(*sizes) if sizes else None, None), strategy, ShardOptions(), CPU)
    everyone, alone = tuple(range(4)), (rank,)
    whole = strategy == "no_shard"
    assert groups.gather.ranks == (alone if whole else everyone)
    assert groups.reduce.ranks == everyone
    assert groups.outer.ranks == alone
    assert (groups.gather.rank, groups.outer.rank) == (0 if whole else rank, 0)
    assert groups.divide == 4.0
    assert groups.replicas == groups.alike == (4 if whole else 1)
    for group in dict.fromkeys((groups.gather, groups.reduce, groups.outer)):
        assert isinstance(group.transport, Gloo if group.size > 1 else Local)
        assert not group.calls
        _check(group, lambda rank: 10**rank)
    if strategy != "no_shard":
        gather, reduce = groups.gather.transport, groups.reduce.transport
        assert isinstance(gather, Gloo)
        assert isinstance(reduce, Gloo)
        assert gather.group is not reduce.group


@pytest.mark.parametrize("sizes", [None, (4,), (1, 4)], ids=str)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_all_ranks_on_one_axis(strategy, sizes):
    run_ranks(_one_axis, 4, strategy, sizes)


def _two_axes(rank):
    groups = shard_groups_for(Placement(mesh_of(2, 2), None), "optim", ShardOptions(), CPU)
    assert groups.gather.ranks == ((0, 1), (2, 3))[rank // 2]
    assert groups.outer.ranks == ((0, 2), (1, 3))[rank % 2]
    assert groups.replicas == 2
    assert groups.divide == 4.0
    for group in (groups.gather, groups.reduce, groups.outer):
        _check(group, lambda rank: 10**rank)
    none = shard_groups_for(Placement(mesh_of(2, 2), None), "no_shard", ShardOptions(), CPU)
    assert none.gather.ranks == (rank,)
    assert none.reduce.ranks == (0, 1, 2, 3)
    assert none.outer.ranks == (rank,)


def test_two_axes():
    run_ranks(_two_axes, 4)


def _slices(rank):
    """Each rank sees only its own row of the mesh, and still all ranks make the groups of all rows."""
    mesh = mesh_of(2, 1, 2)
    shard = shard_groups_for(Placement(mesh["shard"], 2), "optim_grads", ShardOptions(), CPU)
    assert shard.gather.ranks == ((0, 1), (2, 3))[rank // 2]
    assert shard.divide == 2.0
    pipe = shard_groups_for(Placement(mesh["pipe"], 8), "optim_grads", ShardOptions(), CPU)
    assert pipe.gather.ranks == ((0, 2), (1, 3))[rank % 2]
    assert pipe.divide == 8.0
    both = shard_groups_for(Placement(mesh["replicate", "shard"], None), "optim", ShardOptions(), CPU)
    assert both.gather.ranks == shard.gather.ranks
    assert both.outer.ranks == (rank,)
    for groups in (shard, pipe, both):
        _check(groups.gather, lambda rank: 10**rank)


def test_slices_of_a_larger_mesh():
    run_ranks(_slices, 4)


def _again(rank):
    mesh = mesh_of(2)
    first = shard_groups_for(Placement(mesh, None), "optim", ShardOptions(), CPU)
    assert shard_groups_for(Placement(mesh, None), "optim_grads", ShardOptions(), CPU) is first
    assert shard_groups_for(Placement(None, 2.0), "optim", ShardOptions(), CPU) is first
    assert shard_groups_for(Placement(mesh, 4), "optim", ShardOptions(), CPU) is not first
    null = shard_groups_for(Placement(mesh, None), "optim", ShardOptions(transport="null"), CPU)
    assert isinstance(null.gather.transport, Null)
    dist.destroy_process_group()
    alone = shard_groups_for(Placement(None, None), "optim", ShardOptions(), CPU)
    assert alone.gather.size == 1
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert shard_groups_for(Placement(None, None), "optim", ShardOptions(), CPU) is not alone


def test_the_same_placement_gets_the_same_groups_of_the_same_world():
    run_ranks(_again, 2)


def test_one_rank_needs_no_process_group():
    groups = shard_groups_for(Placement(None, None), "optim_grads_params", ShardOptions(), CPU)
    for group in (groups.gather, groups.reduce, groups.outer):
        assert isinstance(group.transport, Local)
    assert groups.divide == 1.0
    assert not dist.is_initialized()


def _mistakes(rank):
    with pytest.raises(ValueError, match=r"the mesh has 3 axes \(pipe=2, replicate=1, shard=1\).*_flatten"):
        shard_groups_for(Placement(mesh_of(2, 1, 1), None), "optim", ShardOptions(), CPU)
    with pytest.raises(ValueError, match=r"divide=0 must be above 0"):
        shard_groups_for(Placement(mesh_of(2), 0), "optim", ShardOptions(), CPU)
    for transport in ("nccl", "copy_engine"):
        with pytest.raises(
            ValueError, match=rf"transport='{transport}' moves bytes between GPUs, .*on cpu: use 'gloo'"
        ):
            shard_groups_for(Placement(mesh_of(2), None), "optim", ShardOptions(transport=transport), CPU)
    with pytest.raises(ValueError, match=r"transport='gloo' moves bytes between CPUs, .*on cuda:0: use 'nccl'"):
        shard_groups_for(Placement(mesh_of(2), None), "optim", ShardOptions(transport="gloo"), torch.device("cuda:0"))


def test_mistakes_name_what_is_wrong_and_the_fix():
    run_ranks(_mistakes, 2)


def _contradiction(rank):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 1] if rank == 0 else [0, 1, 2], _init_backend=False)
    with pytest.raises(ValueError, match=r"ranks \[0, 1\] are in \[0, 1\] and in \[0, 1, 2\]"):
        shard_groups_for(Placement(mesh, None), "optim", ShardOptions(), CPU)


def test_meshes_of_different_ranks_must_fit():
    run_ranks(_contradiction, 3)


def _outside(rank):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0], _init_backend=False)
    if rank == 1:
        with pytest.raises(ValueError, match=r"rank 1 is not in the mesh: .* with ranks \[0\]"):
            shard_groups_for(Placement(mesh, None), "optim", ShardOptions(), CPU)


def test_a_rank_outside_of_the_mesh_is_told():
    run_ranks(_outside, 2)


def asked_again(rank: int) -> list[str]:
    """Stages of a pipeline ask as often as they have units."""
    lists: list[Any] = []

    def tried(purposes: Any, device: torch.device, limit: float, groups: Any) -> str:
        lists.append(groups)
        return "tried"

    mine = (0, 1) if rank < 2 else (2, 3)
    with patch.object(shard_groups, "why_no_copies", tried):
        found = [shard_groups.why_not_copies(mine, torch.device("cuda")) for _ in range(3 if rank < 2 else 1)]
    assert lists == [[(0, 1), (2, 3)]]
    return found


def test_ranks_try_copies_once_however_often_each_asks():
    assert run_ranks(asked_again, 4) == [["tried"] * 3] * 2 + [["tried"]] * 2


def alive(rank: int) -> list[int]:
    """How often a number is added up over ranks, where copies seem to move all else."""
    with patch.object(Group, "copies", True):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        ctx = hocket.fully_shard(model, units=torch.nn.Linear)
        group, counts = ctx.groups.reduce, []
        group.forget_calls()
        for _ in range(2):
            with ctx.no_sync():
                model(torch.ones(2, 4)).sum().backward()
            counts.append(group.calls["all_reduce"])
            model(torch.ones(2, 4)).sum().backward()
            counts.append(group.calls["all_reduce"])
            ctx.finish_step()
    return counts


def test_a_backward_that_reduces_shows_life_once():
    assert run_ranks(alive, 2) == [[0, 1, 1, 2]] * 2
