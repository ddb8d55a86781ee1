"""A process that has used the copy engine and ends in one of several ways: started by a test with torchrun."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from hocket.environment import prepare
from hocket.program.mesh import Mesh
from hocket.runtime.comm import make_groups
from hocket.runtime.world import join_world, leave_world

N = 1 << 22


def main(ending: str) -> None:
    prepare(os.environ, int(os.environ["LOCAL_WORLD_SIZE"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    join_world(True, 60.0)
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = make_groups(Mesh(dp=world), rank, device, "copy_engine")
    shard, out = torch.full((N,), float(rank), device=device), torch.empty(world * N, device=device)
    full = torch.ones(world * N, device=device)
    into = torch.zeros(N, device=device)
    groups.gather_dense.all_gather(out, shard)
    groups.reduce_dense.reduce_sum(full, into, 1.0)
    torch.cuda.synchronize()
    assert out.view(world, N)[:, 0].tolist() == list(range(world))
    assert into.eq(world).all()
    if ending == "groups":
        groups.destroy()
        dist.destroy_process_group()
    else:
        leave_world()
    print(f"rank {rank} ends ({ending})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
