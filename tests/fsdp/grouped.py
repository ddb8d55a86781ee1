"""A group of parameters of its own, and its gradients, without units, hooks or contexts."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hocket.fsdp.buffers import FullBuffer
from hocket.fsdp.dtensors import spec_of
from hocket.fsdp.members import Member
from hocket.fsdp.options import Precision, ShardOptions
from hocket.fsdp.param_group import ParamGroup
from hocket.fsdp.shard_groups import Placement, shard_groups_for
from hocket.fsdp.sharded_parameter import make_parameter
from tests.fsdp.elements import here, local

CPU = torch.device("cpu")
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
PLAIN = Precision()
SHAPES = {"w": (37, 11), "scalar": (), "norm": (11,), "odd": (2, 5, 3), "row": (1, 4)}


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...] = ()
    strategy: str = "optim_grads"
    precision: Precision = PLAIN

    @property
    def world(self):
        return int(torch.tensor(self.sizes).prod()) if self.sizes else 1


def values(seed, shapes=SHAPES):
    """Small whole numbers: sums of them are exact in every dtype, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-4, 5, shape, generator=generator).float() for name, shape in shapes.items()}


def build(case, frozen=False, divide=1.0):
    """The group, bound, and its full parameters by name."""
    axes = ("replicate", "shard")[-len(case.sizes) :]
    mesh = init_device_mesh("cpu", case.sizes, mesh_dim_names=axes) if case.sizes else None
    groups = shard_groups_for(Placement(mesh, divide), case.strategy, ShardOptions(), CPU)
    params = {name: nn.Parameter(value, requires_grad=not frozen) for name, value in values(0).items()}
    members = [Member(name, param) for name, param in params.items()]
    group = ParamGroup(members, groups, case.precision, CPU)
    group.shards = [make_parameter(group, i, spec_of(group, i)) for i in range(len(members))]
    buffer = FullBuffer(0 if group.whole else group.layout.total, group.compute_dtype, CPU)
    buffer.allocate()
    group.bind(group.weight if group.whole else buffer.flat)
    return group, params, buffer


def gather(group, buffer):
    """Whatever is stale is refreshed first."""
    if group.stale():
        group.refresh()
    if not group.whole:
        buffer.allocate()
        group.gather(buffer.flat).wait()


def reduce(group, grads, outer=True):
    """Reduce whole gradients by name; those missing are zero."""
    flat = torch.full((group.layout.total + 7,), float("nan"), dtype=group.formats.wire)
    for lo, hi in group.layout.gaps:
        flat[lo:hi] = 0
    for member, view in zip(group.members, group.layout.views(flat), strict=True):
        view.copy_(grads.get(member.name, torch.zeros(())))
    group.make_grads()
    group.reduce(flat).wait()
    if outer:
        group.reduce_outer().wait()


def expect_grads(group, wanted):
    for shard in group.shards:
        if wanted.get(shard.full_name) is None:
            assert shard.grad is None, shard.full_name
            continue
        part = here(shard, wanted[shard.full_name])
        assert shard.grad.dtype == shard.dtype == group.formats.main
        assert torch.equal(local(shard.grad), part.to(shard.dtype)), shard.full_name


def grad_of(param):
    assert param.grad is not None
    return param.grad


def added(*many):
    return {name: sum(one[name] for one in many) for name in SHAPES}
