"""The NCCL transport on two GPUs: exact values, everything on the caller's stream, few SMs."""

import json
import tempfile
import time
from pathlib import Path

import pytest
import torch

from hocket.program.mesh import SMS, Mesh
from hocket.runtime.comm import CommOptions, Group, Link, RowTable, make_groups
from tests.helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
N = 1 << 20


def edge(group: Group | None) -> Group:
    assert group is not None
    return group


def _collectives(rank):
    device = torch.device("cuda", rank)
    groups = make_groups(Mesh(dp=2, ep=2), rank, device, "nccl")
    out, counts = torch.empty(2 * N, device=device, dtype=torch.bfloat16), torch.tensor([[3], [5]], device=device)
    shard = torch.full((N,), rank + 1.0, device=device, dtype=torch.bfloat16)
    into, norm = torch.zeros(N, device=device), torch.zeros(1, device=device, dtype=torch.float64)
    rows = torch.arange(4 * (8 + 2 * rank), device=device).view(-1, 4).bfloat16() + rank
    table = RowTable([[3, 5], [4, 6]], rank)
    got = torch.empty(sum(table.receive), 4, device=device, dtype=torch.bfloat16)

    def work():
        into.fill_(1)
        norm.fill_(rank + 1.0)
        assert groups.gather_dense.all_gather(out, shard).done
        assert groups.reduce_dense.reduce_sum(out, into, 0.5).done
        received = groups.a2a.all_counts(counts + rank)
        groups.a2a.all_to_all(got, rows, table)
        groups.control.all_reduce(norm)
        return received

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()  # loads kernels, which may wait for the device
        stream.synchronize()
        out.zero_()
        torch.cuda._sleep(400_000_000)  # all the work must come after this, and the host must not
        begin = time.monotonic()
        received = work()
        host = time.monotonic() - begin
    assert not stream.query()
    stream.synchronize()
    assert out[:N].eq(1).all()
    assert out[N:].eq(2).all()
    # Both ranks hold the same gathered buffer, ones then twos; each adds half of twice its own part.
    assert into.eq(1 + (rank + 1)).all()
    assert received.squeeze(-1).tolist() == table.rows
    first = torch.arange(32, device=device).view(-1, 4).bfloat16()
    second = torch.arange(40, device=device).view(-1, 4).bfloat16() + 1
    assert torch.equal(got, torch.cat([first[:3], second[:4]] if rank == 0 else [first[3:], second[4:]]))
    assert norm.item() == 3.0
    groups.control.barrier()
    return host


@pytest.mark.alone
def test_collectives_run_on_the_current_stream():
    assert max(run_ranks(_collectives, 2, backend="nccl")) < 0.05  # seconds, while the device sleeps for 0.2


def _ring(rank):
    device = torch.device("cuda", rank)
    groups = make_groups(Mesh(pp=2), rank, device, "nccl")
    forward, backward = torch.cuda.Stream(), torch.cuda.Stream()
    boxes = []
    for n in range(8):
        for stream, out, back in (
            (forward, edge(groups.send_act), edge(groups.recv_act)),
            (backward, edge(groups.send_grad), edge(groups.recv_grad)),
        ):
            with torch.cuda.stream(stream):
                box = torch.empty(N, device=device, dtype=torch.bfloat16)
                # One rank sends first, the other receives first: a blocking pair needs matching orders.
                message = torch.full((N,), float(10 * n + rank), device=device, dtype=torch.bfloat16)
                if rank == 0:
                    out.send(message, out.other)
                    back.recv(box, back.other)
                else:
                    back.recv(box, back.other)
                    out.send(message, out.other)
                boxes.append((n, box))
    torch.cuda.synchronize()
    for n, box in boxes:
        assert box.eq(10 * n + 1 - rank).all()


def test_pipeline_edges_on_two_streams():
    run_ranks(_ring, 2, backend="nccl")


def _grids(rank):
    device = torch.device("cuda", rank)
    groups = make_groups(Mesh(dp=2), rank, device, "nccl")
    full, shard = torch.zeros(64 * N, device=device), torch.zeros(32 * N, device=device)
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        groups.gather_dense.all_gather(full, shard)
        groups.reduce_dense.reduce_sum(full, shard)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [e for e in events if "nccl" in e.get("name", "") and "grid" in e.get("args", {})]
    return {kernel["name"]: kernel["args"]["grid"][0] for kernel in kernels}


def test_collectives_hold_few_multiprocessors():
    for found in run_ranks(_grids, 2, backend="nccl"):
        assert len(found) == 2
        assert max(found.values()) <= SMS


def _slow(rank):
    device = torch.device("cuda", rank)

    def spin(seconds):
        torch.cuda._sleep(int(seconds * 1.98e9))

    options = CommOptions(links={"gather_dense": Link(0.05, 1e12)}, spin=spin)
    groups = make_groups(Mesh(dp=2), rank, device, "slow", options)
    full, shard = torch.zeros(2 * N, device=device), torch.full((N,), rank + 1.0, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    groups.gather_dense.all_gather(full, shard)
    end.record()
    end.synchronize()
    assert full[N:].eq(2).all()
    return start.elapsed_time(end)


@pytest.mark.alone
def test_slow_keeps_the_stream_busy():
    for milliseconds in run_ranks(_slow, 2, backend="nccl"):
        assert 40 < milliseconds < 200
