"""Copy engines bring the same rows as NCCL, whichever rank is late, in one round or in several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hocket.layers.dispatch import Splits, group_rows
from hocket.program.mesh import Mesh
from hocket.runtime.blocks import host_blocks
from hocket.runtime.comm import CommOptions, RowTable, make_groups
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
WIDTH = 512
TABLES = [
    [[300, 200], [100, 700]],
    [[0, 1000], [0, 900]],
    [[0, 0], [0, 0]],
    [[5, 0], [0, 5]],
    [[900, 1], [2, 3]],
]


def exchanges(rank: int, arrival: int) -> None:
    device = torch.device("cuda", rank)
    mesh = Mesh(dp=2, ep=2)
    copied = make_groups(mesh, rank, device, "copy_engine", CommOptions(arrival=arrival)).a2a
    nccl = make_groups(mesh, rank, device, "nccl").a2a
    generator = torch.Generator(device).manual_seed(rank)
    stream = torch.cuda.Stream(priority=-1)
    results = []
    for turn in range(20):
        table = RowTable(TABLES[turn % len(TABLES)], rank)
        every_PPL = by_expert(table.rows)
        blocks, splits = host_blocks(every_PPL, rank), Splits(table, every_PPL[:, rank].to(device))
        rows = torch.randn(table.sent, WIDTH, device=device, generator=generator).bfloat16()
        found, wanted, placed = (rows.new_empty(table.room, WIDTH) for _ in range(3))
        back = torch.empty_like(rows)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if (turn + rank) % 3 == 0:
                torch.cuda._sleep(2_000_000)  # this rank is late
            copied.all_to_all(found, rows, table).wait()
            nccl.all_to_all(wanted, rows, table).wait()
            copied.all_to_all(placed, rows, blocks).wait()
            copied.all_to_all(back, placed, blocks.back).wait()
        results.append((rows, found, wanted, placed, back, splits))
    torch.cuda.synchronize()
    for rows, found, wanted, placed, back, splits in results:
        assert torch.equal(found, wanted)
        assert torch.equal(placed, group_rows(wanted, splits))
        assert torch.equal(back, rows)


def by_expert(rows: list[list[int]]) -> Tensor:
    """Rows of each rank for each, spread unevenly over experts, some of which get none: [P, P, L]."""
    counts = torch.tensor(rows)
    first, second = counts // 3, counts // 5
    return torch.stack([first, torch.zeros_like(counts), second, counts - first - second], -1)


@pytest.mark.parametrize("arrival", [1 << 20, 3 * WIDTH * 2 * 7], ids=["one round", "many rounds"])
def test_copied_rows_are_those_of_nccl(arrival: int) -> None:
    run_ranks(exchanges, 2, arrival, backend="nccl", timeout=150)


def no_kernels(rank: int) -> None:
    """Nothing but copies and the barrier runs: no kernel of NCCL."""
    device = torch.device("cuda", rank)
    group = make_groups(Mesh(dp=2, ep=2), rank, device, "copy_engine").a2a
    table = RowTable([[3000, 2000], [1000, 4000]], rank)
    rows = torch.randn(sum(table.send), WIDTH, device=device).bfloat16()
    out = rows.new_empty(sum(table.receive), WIDTH)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        with torch.cuda.stream(stream):
            group.all_to_all(out, rows, table).wait()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() or []]
    assert not any("nccl" in name.lower() for name in names), names
    assert any("PtoP" in name for name in names), names


def test_no_kernel_of_nccl_moves_rows() -> None:
    run_ranks(no_kernels, 2, backend="nccl", timeout=150)
