"""Imported once by the fork server, so that ranks start with torch and hocket already in memory."""

import contextlib
import ctypes
import gc
import importlib
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROCESS = os.getpid()
"""Who has imported this."""
LIBRARIES = [
    "torch.distributed.checkpoint",
    "torch._dynamo",  # the first optimizer of a process imports it, which takes a second
    "torch._inductor.pattern_matcher",  # likewise the first that compiles
    "hypothesis",
    "pytest",
    "transformers.models.llama.modeling_llama",  # with what models of all families import, more than a second
]
SHARED = ["tests.fsdp.twin", "tests.helpers.parity"]
"""What many tests' functions import."""


def hocket_modules() -> list[str]:
    """Dotted names of all modules of hocket, except the one that runs on import, and peers: they may start CUDA."""
    paths = sorted((ROOT / "hocket").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__") and ".peers." not in name]


def into_huge_pages() -> None:
    """Have Linux put this process's memory into pages of 2 MiB, so that a fork copies few entries of its page table.

    Kernels that cannot leave pages as they are.
    """
    collapse, size = 25, 1 << 21  # MADV_COLLAPSE
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, _, _, _, *file = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        start, end = -(-start // size) * size, end // size * size
        if "w" in rights and start < end and file in ([], ["[heap]"]):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), collapse)


gc.disable()  # what is imported stays
for name in [*LIBRARIES, *hocket_modules(), *SHARED]:
    # A module that cannot be imported must fail the test that uses it, not the fork server.
    with contextlib.suppress(Exception):
        importlib.import_module(name)


def use_dtensors() -> None:
    """What the first operations with DTensors find, but for what depends on a rank.

    Torch remembers layouts by mesh, and a mesh knows its rank: this one has a name that no other has.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("made before ranks",))
    param = torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False))
    param.grad = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)
    optimizers = (
        torch.optim.AdamW([param], foreach=False),
        torch.optim.AdamW([param], foreach=True),
        torch.optim.SGD([param], 0.1),
    )
    for optimizer in optimizers:
        optimizer.step()
    norm: Any = torch.stack([param.norm(), param.grad.norm()]).norm()
    norm.full_tensor()
    dist.destroy_process_group()


with contextlib.suppress(Exception):
    use_dtensors()

gc.enable()
gc.collect()
gc.freeze()  # ranks, which inherit all of this, need not look through it again and again
into_huge_pages()
