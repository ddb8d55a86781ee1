"""Groups and transports: exact values on real gloo ranks, and what null and slow pretend."""

import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hocket.program.mesh import PURPOSES, Mesh
from hocket.runtime import transports as pretended
from hocket.runtime.comm import CommOptions, Group, Link, RowTable, make_groups
from hocket.runtime.transports import Gloo, Pending, Scratch
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def edge(group: Group | None) -> Group:
    assert group is not None
    return group


def test_mesh_places_every_rank_once():
    mesh = Mesh(pp=2, dp=4, ep=2)
    assert [mesh.coordinates(r).ep for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert mesh.groups("gather_dense") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("a2a") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("gather_experts") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp_fwd") == ((0, 4), (1, 5), (2, 6), (3, 7), (4, 0), (5, 1), (6, 2), (7, 3))
    for purpose in PURPOSES[:5]:
        assert sorted(r for group in mesh.groups(purpose) for r in group) == list(range(8))
    assert mesh.groups("reduce_experts") == mesh.groups("gather_experts")
    assert Mesh().groups("pp_bwd") == ()


def test_experts_take_tensor_parallel_ranks_for_data_parallel_ones():
    mesh = Mesh(dp=4, tp=2, ep=4)
    assert mesh.edp == 2
    assert [(mesh.coordinates(r).edp, mesh.coordinates(r).ep) for r in (0, 1, 3, 4, 7)] == [
        (0, 0), (0, 1), (0, 3), (1, 0), (1, 3),
    ]  # fmt: skip
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("a2a") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("gather_experts") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("gather_dense") == ((0, 2, 4, 6), (1, 3, 5, 7))
    within = Mesh(dp=2, tp=4, ep=2)
    assert within.groups("a2a") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert within.groups("reduce_experts") == ((0, 2, 4, 6), (1, 3, 5, 7))
    copies = Mesh(dp=4, tp=2, ep=2, shard=2)
    assert copies.groups("gather_experts") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert copies.groups("replicas") == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(dp=6, ep=4), r"mesh.ep=4 does not divide mesh.dp=6 x mesh.tp=1.*1, 2, 3, 6"),
        (lambda: Mesh(dp=4, tp=2, ep=8, shard=2), r"mesh.ep=8 must divide mesh.shard x mesh.tp=4"),
        (lambda: Mesh(pp=0), "mesh.pp must be at least 1, got 0"),
        (lambda: Mesh(dp=2).coordinates(2), "rank 2 is outside the mesh"),
    ],
)
def test_mesh_errors_name_the_setting(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _members_in_order(rank: int) -> list[tuple[int, ...]]:
    groups = make_groups(Mesh(pp=2, dp=2, ep=2), rank, CPU, "gloo")
    return [group.ranks for group in groups]


def test_ranks_agree_on_the_order_of_the_groups_they_share():
    """It is the order in which they are given back, and on NCCL all members wait for each other there."""
    orders = run_ranks(_members_in_order, 4)
    assert orders[0].count((0, 2)) == orders[0].count((2, 0)) == 2
    for a, one in enumerate(orders):
        for b, other in enumerate(orders):
            assert [m for m in one if {a, b} <= set(m)] == [m for m in other if {a, b} <= set(m)]


def test_pending_runs_what_follows_once():
    seen = []
    pending = Pending(lambda: seen.append("wait")).then(lambda: seen.append("after"))
    assert seen == []
    assert not pending.done
    pending.wait()
    pending.wait()
    assert pending.done
    assert seen == ["wait", "after"]
    Pending().then(lambda: seen.append("at once"))
    assert seen[-1] == "at once"


def test_scratch_is_reused_and_never_shared():
    scratch = Scratch(CPU)
    a, b = scratch.take(8, torch.float32), scratch.take(8, BF16)
    assert a.data_ptr() != b.data_ptr()
    scratch.give(a)
    again = scratch.take(6, torch.float32)
    assert again.data_ptr() == a.data_ptr()
    scratch.give(again)
    assert scratch.take(8, torch.float32).data_ptr() == a.data_ptr(), "less was used of it, and it stays as large"


def _collectives(rank, world, dtype):
    groups = make_groups(Mesh(dp=world), rank, CPU, "gloo")
    shard = torch.arange(5, dtype=dtype) + 10 * rank
    out = torch.full((5 * world,), -1, dtype=dtype)
    pending = groups.gather_dense.all_gather(out, shard)
    pending.wait()
    expected = torch.cat([torch.arange(5, dtype=dtype) + 10 * r for r in range(world)])
    assert torch.equal(out, expected)

    full = torch.arange(3 * world, dtype=dtype) * (rank + 1)
    into = torch.ones(3)
    groups.reduce_dense.reduce_sum(full, into, 0.5).wait()
    total = sum(r + 1 for r in range(world))
    assert torch.equal(into, 1 + 0.5 * total * torch.arange(3 * rank, 3 * rank + 3))

    value = torch.tensor([float(rank)], dtype=torch.float64)
    groups.control.all_reduce(value, "max").wait()
    assert value.item() == world - 1
    assert groups.gather_dense.calls == {"all_gather": 1}
    assert groups.gather_dense.sent_bytes == (world - 1) * shard.nbytes
    groups.control.barrier()
    groups.destroy()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_collectives_are_exact(world, dtype):
    run_ranks(_collectives, world, world, dtype)


def _rank_order(rank, world, dtype):
    groups = make_groups(Mesh(dp=world), rank, CPU, "gloo")
    parts = [torch.randn(64 * world, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    parts = [part * 10 ** (3 * r) for r, part in enumerate(parts)]
    into = torch.full((64,), 0.1)
    pendings = [groups.reduce_dense.reduce_sum(parts[rank], into, 1 / 3) for _ in range(3)]
    for pending in pendings:  # three in flight at once
        pending.wait()
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    mine = total.view(world, 64)[rank] * (1 / 3)
    expected = torch.full((64,), 0.1)
    for _ in range(3):
        expected = expected + mine
    assert torch.equal(into, expected)
    into, sent = torch.full((64 * world,), 0.1), parts[rank].clone()
    groups.reduce_dense.all_sum(sent, into, 1 / 3).wait()
    assert torch.equal(sent, total.to(dtype)), "what all have got is rounded"
    assert torch.equal(into, torch.full_like(into, 0.1) + sent.float() * (1 / 3))
    groups.reduce_dense.all_sum(parts[rank].clone(), into, 0.5, add=False).wait()
    assert torch.equal(into, sent.float() * 0.5)
    backward = parts[-1].float()
    for part in reversed(parts[:-1]):
        backward = backward + part
    transport = groups.reduce_dense.transport
    assert isinstance(transport, Gloo)
    held = {buffer.data_ptr() for buffer in transport.scratch.free}
    groups.reduce_dense.reduce_sum(parts[rank], torch.zeros(64), 1.0).wait()
    assert {buffer.data_ptr() for buffer in transport.scratch.free} == held
    return torch.equal(total, backward)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_sums_run_in_rank_order(dtype):
    # The data must be able to tell orders apart.
    assert not any(run_ranks(_rank_order, 4, 4, dtype))


def _all_to_all(rank, world, splits, dtype):
    """splits[p][q]: rows that p sends to q."""
    groups = make_groups(Mesh(dp=world, ep=world), rank, CPU, "gloo")
    counts = torch.tensor(splits[rank]).view(world, 1)
    every = groups.a2a.all_counts(counts)
    assert every.shape == (world, world, 1)
    assert every.squeeze(-1).tolist() == splits
    table = RowTable(splits, rank)

    def rows(p, q):
        return (torch.arange(splits[p][q] * 3).view(-1, 3) + 10 * p + 100 * q).to(dtype)

    sent = torch.cat([rows(rank, q) for q in range(world)])
    out = torch.empty(sum(table.receive), 3, dtype=dtype)
    groups.a2a.all_to_all(out, sent, table).wait()
    assert torch.equal(out, torch.cat([rows(p, rank) for p in range(world)]))
    back = torch.empty_like(sent)
    groups.a2a.all_to_all(back, out, table.back).wait()
    assert torch.equal(back, sent)


@pytest.mark.parametrize(
    "splits",
    [
        [[4]],
        [[1, 2], [3, 4]],
        [[0, 5], [0, 0]],
        [[0, 0], [0, 0]],
        [[2, 0, 7, 1], [0, 0, 0, 0], [5, 1, 0, 0], [1, 1, 1, 0]],
    ],
    ids=["alone", "uneven", "one way", "nothing", "four"],
)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_all_to_all_moves_rows(splits, dtype):
    run_ranks(_all_to_all, len(splits), len(splits), splits, dtype)


def _orders(rank: int) -> list[tuple[str, tuple[int, ...], list[int]]]:
    groups = make_groups(Mesh(pp=2, dp=2, ep=2), rank, CPU, "gloo")
    made = [(group, group.transport) for group in groups]
    return [
        (group.name, group.ranks, dist.get_process_group_ranks(moved_by.group))
        for group, moved_by in made
        if isinstance(moved_by, Gloo)
    ]


def test_torch_orders_ranks_by_their_numbers_and_edges_may_differ():
    """Collectives and shared memory have torch's order, so only an edge may have another one."""
    found = [each for orders in run_ranks(_orders, 4) for each in orders]
    assert all(torchs == sorted(ranks) for _, ranks, torchs in found)
    differ = {(name, ranks) for name, ranks, torchs in found if list(ranks) != torchs}
    names = "send_act", "recv_act", "send_grad", "recv_grad"
    assert differ == {(name, ranks) for name in names for ranks in ((2, 0), (3, 1))}


def _ring(rank, pp, dp):
    mesh = Mesh(pp=pp, dp=dp)
    groups = make_groups(mesh, rank, CPU, "gloo")
    edges = [(groups.send_act, groups.recv_act, 1), (groups.send_grad, groups.recv_grad, -1)]
    p, d = divmod(rank, dp)
    works, inbox = [], []
    for n in range(4):  # several in flight on every edge, all edges at once
        for out, back, sign in edges:
            send, recv = edge(out), edge(back)
            works.append(send.send(torch.full((3, 2), sign * (rank + 100 * n + 1), dtype=BF16), send.other))
            box = torch.empty(3, 2, dtype=BF16)
            inbox.append((box, sign * (((p - sign) % pp) * dp + d + 100 * n + 1)))
            works.append(recv.recv(box, recv.other))
    for work in reversed(works):
        work.wait()
    for box, expected in inbox:
        assert torch.equal(box, torch.full((3, 2), expected, dtype=BF16))


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (2, 2), (4, 1)])
def test_pipeline_edges_form_a_ring(pp, dp):
    """With two stages the wrap-around edge joins the same two ranks, and must not be mixed up with the other edge."""
    run_ranks(_ring, pp * dp, pp, dp)


def test_group_of_one_is_exact_over_accumulations():
    group = make_groups(Mesh(), 0, CPU, "gloo").reduce_dense
    full = torch.randn(64).to(BF16)
    into, expected = torch.zeros(64), torch.zeros(64)
    for _ in range(16):
        assert group.reduce_sum(full, into, 0.5).done
        expected += full.float() * 0.5
    assert torch.equal(into, expected)
    out = torch.empty(64, dtype=BF16)
    assert group.all_gather(out, full).done
    assert torch.equal(out, full)
    assert group.sent_bytes == 0


def test_null_needs_no_peers_and_keeps_shapes():
    groups = make_groups(Mesh(pp=2, dp=4, ep=4), 1, CPU, "null")
    slot = torch.arange(16.0)
    assert groups.gather_dense.all_gather(slot, torch.zeros(4)).done
    assert slot.tolist() == [*range(4), 0, 0, 0, 0, *range(8, 16)], "its own part alone"
    counts = torch.arange(8).view(4, 2)
    table = RowTable(groups.a2a.all_counts(counts).sum(-1).tolist(), 1)
    assert table.receive == [5] * 4
    assert table.send == counts.sum(1).tolist()
    sent, out = torch.zeros(28, 5, dtype=BF16), torch.full((20, 5), float("nan"), dtype=BF16)
    groups.a2a.all_to_all(out, sent, table).wait()
    assert out.isfinite().all()
    assert 0.5 < out.float().std() < 2
    into = torch.zeros(4)
    groups.reduce_dense.reduce_sum(torch.arange(16.0), into, 0.5).wait()
    assert into.tolist() == [2.0, 2.5, 3.0, 3.5]
    groups.reduce_dense.all_sum(torch.arange(4.0), into, 0.5, add=False).wait()
    assert into.tolist() == [0.0, 0.5, 1.0, 1.5]
    big = torch.full((3 << 17,), float("nan"))
    edge(groups.recv_act).recv(big, edge(groups.recv_act).other).wait()
    assert big.isfinite().all()
    edge(groups.send_grad).send(big, edge(groups.send_grad).other).wait()
    groups.control.barrier()


def _slow(rank):
    """How long each operation was held back: two gathers and a send."""
    held, issued = [], threading.Event()

    def hold(seconds):
        issued.wait(20)  # if issuing waited for an operation, it would wait for ever
        held.append(seconds)
        time.sleep(seconds)

    options = CommOptions(links={"gather_dense": Link(0.1, 1e9), "pp_fwd": Link(0.2, 1e9)}, timeout=20)
    gather = make_groups(Mesh(dp=2), rank, CPU, "slow", options)
    with mock.patch.object(pretended, "time", SimpleNamespace(sleep=hold)):
        start = time.monotonic()
        outs = [torch.empty(4) for _ in range(2)]
        pendings = [gather.gather_dense.all_gather(out, torch.full((2,), rank + 1.0)) for out in outs]
        assert not held
        issued.set()
        for pending in pendings:
            pending.wait()
        assert time.monotonic() - start >= 0.2, "one after the other"
    assert all(out.tolist() == [1, 1, 2, 2] for out in outs)
    gather.reduce_dense.reduce_sum(torch.ones(4), torch.zeros(2)).wait()
    gather.destroy()
    pipe = make_groups(Mesh(pp=2), rank, CPU, "slow", options)
    with mock.patch.object(pretended, "time", SimpleNamespace(sleep=hold)):
        box = torch.zeros(2)
        work = edge(pipe.recv_act).recv(box, 1 - edge(pipe.recv_act).rank)
        edge(pipe.send_act).send(torch.full((2,), rank + 1.0), 1 - edge(pipe.send_act).rank).wait()
        work.wait()
    assert box.tolist() == [2.0 - rank] * 2
    pipe.destroy()
    return held


def test_slow_delivers_late_and_in_order():
    for held in run_ranks(_slow, 2):
        gathered, sent = 0.1 + 8 / 1e9, 0.2 + 8 / 1e9  # of 16 bytes a rank has 8; 8 are sent
        assert held == [gathered, gathered, sent]


def _two_links(rank):
    """How long operations of two groups are held back."""
    options = CommOptions(links={"a2a": Link(0.0, 1e12), "gather_dense": Link(0.05, 4e6)}, timeout=20)
    groups = make_groups(Mesh(dp=2, ep=2), rank, CPU, "slow", options)
    shard, full = torch.ones(50_000), torch.empty(100_000)
    rows, out = torch.ones(2, 25_000), torch.empty(2, 25_000)
    held = []
    with mock.patch.object(pretended, "time", SimpleNamespace(sleep=held.append)):
        groups.a2a.all_to_all(out, rows, RowTable([[1, 1], [1, 1]], rank)).wait()
        groups.gather_dense.all_gather(full, shard).wait()
    groups.destroy()
    return held


def test_each_group_has_a_link_of_its_own():
    for held in run_ranks(_two_links, 2):
        # 100,000 bytes of rows and 200,000 of a shard come from the other rank.
        assert held == pytest.approx([1e5 / 1e12, 0.05 + 2e5 / 4e6])


def test_sizes_that_do_not_fit_are_our_own_mistake():
    group = make_groups(Mesh(), 0, CPU, "gloo").gather_dense
    with pytest.raises(AssertionError, match="gather_dense"):
        group.all_gather(torch.empty(5), torch.empty(4))
    with pytest.raises(AssertionError, match="3 rows to send"):
        group.all_to_all(torch.empty(2, 1), torch.empty(3, 1), RowTable([[2]], 0))
    with pytest.raises(AssertionError, match="3 rows to receive"):
        group.all_to_all(torch.empty(3, 1), torch.empty(2, 1), RowTable([[2]], 0))


@pytest.mark.parametrize(
    ("options", "setting"),
    [(CommOptions(tokens=1), "overlap.tp.method"), (CommOptions(device_splits=True), "overlap.ep.splits = device")],
)
def test_gpus_that_cannot_reach_each_other_are_refused_what_needs_it(options, setting, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: gpu == 0)
    with pytest.raises(ValueError, match=rf"^{setting}: GPU 1 cannot reach the memory of GPU 0; fix: "):
        make_groups(Mesh(), 0, torch.device("cuda"), "nccl", options)
