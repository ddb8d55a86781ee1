"""The copy-engine transport on a CPU: its windows, what it refuses, its sums; gloo moves the bytes."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hocket.config import (
    COPIED,
    Config,
    DataConfig,
    ExpertOverlap,
    MeshConfig,
    ModelConfig,
    OverlapConfig,
    PlanConfig,
    PrecisionConfig,
    TrainConfig,
)
from hocket.engine import Engine
from hocket.model.microbatch import Microbatch
from hocket.parallel import dispatch
from hocket.program.mesh import Mesh
from hocket.runtime import copy_engine
from hocket.runtime.comm import Group, Groups, make_groups
from hocket.runtime.copy_engine import CopyEngine, SymmetricWindow
from hocket.runtime.group_transport import P2P
from hocket.runtime.peer_access import refuse
from hocket.runtime.peer_copies import CopiedRows, PeerCopies
from hocket.runtime.transports import Gloo, local_sum
from hocket.runtime.world import everyone
from hocket.settings.schema import changed
from tests.helpers.driver import Memcpy
from tests.helpers.plans import planned
from tests.helpers.pools import CpuPool
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def rank_order_sum(parts: Tensor, into: Tensor, scale: float) -> Tensor:
    """What a reduction promises, element by element in the dtype of `into`."""
    total = parts[0].to(into.dtype)
    for part in parts[1:]:
        total = (total + part).to(into.dtype)
    return into + total * scale


# Windows


def alone(log: list[str] | None = None) -> CopyEngine:
    """A transport without a group: what it refuses, it refuses before it asks the group."""
    no_group: Any = None
    return CopyEngine(no_group, (0, 1), CPU, make_pool=lambda: CpuPool(log))


def test_a_window_holds_what_was_allocated_inside_and_nothing_else():
    before = torch.zeros(64)
    with alone().window(0) as window:
        inside, also = torch.zeros(64), torch.empty(8, 8, dtype=BF16)
        assert not window.holds(inside), "it is registered when it is left"
    after = torch.zeros(64)
    assert [window.holds(t) for t in (before, inside, also, after)] == [False, True, True, False]
    assert window.holds(inside[3:60])
    assert window.holds(also.view(-1)[1:])
    window.close()
    assert not window.holds(inside)


def test_windows_are_given_back_once_in_reverse_order(monkeypatch):
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: log.append("destroy"))
    log: list[str] = []
    transport = alone(log)
    made = []
    for _ in range(3):
        with transport.window(0) as window:
            torch.zeros(4)
        made.append(window)
    made[1].close()
    made[1].close()
    transport.destroy()
    transport.destroy()
    assert log == ["register"] * 3 + ["deregister"] * 3 + ["destroy"] * 2


def test_a_window_that_failed_is_not_registered():
    log: list[str] = []
    with pytest.raises(KeyError), alone(log).window(0) as window:
        raise KeyError("out of memory")
    window.close()
    assert log == []


def test_other_memory_is_refused_and_not_gathered_some_other_way():
    transport = alone()
    outside = torch.zeros(8)
    with transport.window(0):
        shard, out = torch.zeros(4), torch.zeros(8)
    for wrong in ((outside, shard), (out, torch.zeros(4))):
        with pytest.raises(AssertionError, match="not allocated inside of `with group"):
            transport.all_gather(*wrong)
    with pytest.raises(AssertionError, match="not contiguous"):
        transport.all_gather(out, out[::2])
    with pytest.raises(AssertionError, match="not allocated inside"):
        transport.reduce_sum(outside, torch.zeros(4), 1.0, True)
    with pytest.raises(AssertionError, match=r"32 bytes on the copy engine, .* room for 0 to arrive"):
        transport.reduce_sum(out, torch.zeros(4), 1.0, True)


# Sums


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("world", "numel"), [(1, 5), (2, 1), (3, 2049), (8, 64)])
def test_parts_are_added_in_rank_order(world, numel, dtype):
    parts, into = torch.randn(world, numel).to(dtype), torch.randn(numel)
    for kept in (into, into.to(BF16)):
        expected = rank_order_sum(parts, kept, 1 / 3)
        local_sum(parts, kept, 1 / 3)
        assert torch.equal(kept, expected)
        fresh = rank_order_sum(parts, torch.zeros_like(kept), 1 / 3)
        local_sum(parts, kept, 1 / 3, add=False)
        assert torch.equal(kept, fresh)


# Refusals


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([("a", ""), ("b", "")], "the ranks are on 2 hosts"),
        ([("a", ""), ("a", "NCCL 2.27.3 has no copy-engine collectives")], "NCCL 2.27.3 has no"),
    ],
)
def test_ranks_that_cannot_are_refused_with_reason_and_fix(places, reason):
    with pytest.raises(ValueError, match=rf"^transport = copy_engine: .*{reason}.*; fix: transport = nccl$"):
        refuse(places, "transport = copy_engine", "transport = nccl")
    refuse([("a", ""), ("a", "")], "transport = copy_engine", "transport = nccl")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no usable GPU" in copy_engine.problem()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Old", (), {}), raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 7))
    assert copy_engine.problem().startswith("NCCL 2.27.7 has no copy-engine collectives")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert "has no NCCL_CTA_POLICY_ZERO, register_mem_pool" in copy_engine.problem()
    able = {"NCCL_CTA_POLICY_ZERO": 2, "register_mem_pool": None}
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("New", (), able), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: peer != 2)
    assert copy_engine.problem() == "GPU 0 cannot reach the memory of GPU 2"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: True)
    assert copy_engine.problem() == ""


@pytest.mark.parametrize("transport", sorted(COPIED))
def test_a_cpu_is_refused_when_groups_are_made(transport):
    with pytest.raises(ValueError, match=r"transport = copy_engine: .*no usable GPU"):
        make_groups(Mesh(), 0, CPU, transport)


# A step

CONFIG = Config(
    model=ModelConfig(
        vocab=64, hidden=32, layers=3, heads=2, kv_heads=1, head_dim=16, ffn=48, dense_layers=(1,), experts=4, top_k=2,
        expert_ffn=16, shared_ffn=16,
    ),
    mesh=MeshConfig(dp=4, ep=2),
    plan=PlanConfig(order="1f1b"),
    overlap=OverlapConfig(ep=ExpertOverlap(merge="on"), defer_wgrad="on"),
    data=DataConfig(sequence_length=16),
    precision=PrecisionConfig(compute="fp32"),
    train=TrainConfig(microbatches=3, device="cpu", transport="gloo"),
)  # fmt: skip


def shared_rows(group: Group, gloo: Gloo, folder: Path) -> CopiedRows:
    """Rows exchanged by copies into memory that processes share; room for five rows a round."""
    files = [folder / str(rank) for rank in range(group.size)]
    arrivals = [torch.from_file(str(f), shared=True, size=2 * 5 * 128, dtype=torch.uint8).view(2, -1) for f in files]
    copies = PeerCopies(group.rank, arrivals, lambda: dist.barrier(group=gloo.group), Memcpy(), lambda: 0)
    return CopiedRows(gloo.group, gloo.ranks, CPU, copies)


def on_copy_engines(groups: Groups, purposes: tuple[str, ...]) -> list[CopyEngine]:
    """Put groups of gloo on the copy-engine transport, with CPU memory in its windows."""
    made = []
    for purpose in purposes:
        if purpose in P2P:  # which `test_p2p_copies.py` is about
            continue
        group = getattr(groups, purpose)
        assert isinstance(group.transport, Gloo)
        if purpose == "a2a":
            folder = Path(everyone(tempfile.mkdtemp())[group.ranks[0]])
            group.transport = shared_rows(group, group.transport, folder)
            continue
        group.transport = CopyEngine(group.transport.group, group.ranks, CPU, make_pool=CpuPool)
        made.append(group.transport)
    return made


def a_run(rank: int, config: Config, transport: str) -> tuple[list[Tensor], list[int]]:
    """Losses and weights after two steps, and how many windows each group has had."""
    groups = make_groups(Mesh(dp=config.mesh.dp, ep=config.mesh.ep), rank, CPU, "gloo")
    engines = on_copy_engines(groups, COPIED.get(transport, ()))
    config = changed(config, {"train.transport": transport})  # rows of experts arrive in their order, or do not
    engine = Engine(config, rank, CPU, groups=groups)
    engine.init_weights()
    generator = torch.Generator().manual_seed(rank)
    ids = [torch.randint(config.model.vocab, (1, 17), generator=generator) for _ in range(3)]
    batch = [Microbatch(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
    with patch.object(dispatch, "gather", wraps=dispatch.gather) as sort:
        losses = [engine.train_step(batch, 1e-2).loss.clone() for _ in range(2)]
    assert bool(sort.called) == (transport != "copy_engine"), "copies bring rows in the order of experts"
    weights = [unit.group.main.clone() for unit in engine.sharded.units.values()]
    engine.sharded.close()
    windows = [sum(isinstance(window, SymmetricWindow) for window in one.windows) for one in engines]
    assert not any(window.ranges for one in engines for window in one.windows)
    return [*losses, *weights], windows


def the_same_steps(rank: int, config: Config) -> None:
    expected, _ = a_run(rank, config, "gloo")
    for transport in COPIED:
        got, windows = a_run(rank, config, transport)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), transport
        windowed = [purpose for purpose in COPIED[transport] if purpose not in ("a2a", *P2P)]
        assert windows == [1] * len(windowed), "one window holds all that a group communicates"


def test_all_that_a_step_communicates_lies_in_windows():
    run_ranks(the_same_steps, 4, CONFIG)


def whole_gradients(rank: int, config: Config) -> None:
    expected, _ = a_run(rank, config, "gloo")
    got, windows = a_run(rank, config, "copy_engine")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert windows == [0, 1, 0, 1], "nothing is gathered but sums, in the memory of the reductions"


def test_sums_that_every_rank_gets_lie_in_windows_too():
    run_ranks(whole_gradients, 4, planned(CONFIG, strategy="no_shard"))


def test_an_evaluation_gathers_from_windows_too():
    run_ranks(evaluation, 2, dataclasses.replace(CONFIG, mesh=MeshConfig(dp=2)))


def evaluation(rank: int, config: Config) -> None:
    groups = make_groups(Mesh(dp=2), rank, CPU, "gloo")
    on_copy_engines(groups, ("gather_dense", "gather_experts"))
    engine = Engine(config, rank, CPU, groups=groups)
    engine.init_weights()
    ids = torch.arange(17)[None] % config.model.vocab
    batch = [Microbatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * 3
    assert torch.isfinite(engine.evaluate(batch))
    assert groups.gather_dense.calls["all_gather"] > 0
