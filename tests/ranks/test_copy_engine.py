"""Copy engines on a CPU: what they refuse, their sums, and steps, with memory that processes share for that of GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from pathlib import Path
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
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.layers import dispatch
from hocket.model.documents import Microbatch
from hocket.program.mesh import Mesh
from hocket.runtime.collective_copies import (
    HALVES,
    CollectiveCopies,
    CopiedCollectives,
    Halves,
    flag_bytes,
    reset_flags,
)
from hocket.runtime.comm import P2P, Group, Groups, make_groups
from hocket.runtime.peer_rows import CopiedRows, PeerCopies
from hocket.runtime.shared_memory import problem, refuse
from hocket.runtime.transports import Gloo, local_sum
from hocket.runtime.world import everyone
from tests.helpers.driver import Memcpy
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def rank_order_sum(parts: Tensor, into: Tensor, scale: float) -> Tensor:
    """What a reduction promises, element by element in the dtype of `into`."""
    total = parts[0].to(into.dtype)
    for part in parts[1:]:
        total = (total + part).to(into.dtype)
    return into + total * scale


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
    assert "no usable GPU" in problem()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", type("Nccl", (), {}), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: peer != 2)
    assert problem() == "GPU 0 cannot reach the memory of GPU 2"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda gpu, peer: True)
    assert problem() == ""


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


class Polling(Memcpy):
    """Waits for flags that other processes write."""

    def wait(self, stream: int, flag: int, value: int) -> None:
        end = time.monotonic() + 30.0
        while self.value(flag) < value:
            assert time.monotonic() < end, "the awaited flag was not written"
            time.sleep(1e-4)


def copied(group: Group, gloo: Gloo, folder: Path) -> CopiedCollectives:
    """Gathers and reductions by copies through halves of 1 KiB, in memory that processes share."""
    driver, number = Polling(), itertools.count()

    def make() -> Halves:
        kind, size = next(number), group.size
        whole = HALVES * 1024 + flag_bytes(size)
        files = [str(folder / f"{kind}.{rank}") for rank in range(size)]
        memories = [torch.from_file(file, shared=True, size=whole, dtype=torch.uint8) for file in files]
        reset_flags(memories[group.rank], size)
        dist.barrier(group=gloo.group)
        return Halves(group.rank, memories, driver)

    copies = CollectiveCopies(group.rank, group.size, lambda: 0, make)
    return CopiedCollectives(gloo.group, gloo.ranks, CPU, copies)


def on_copy_engines(groups: Groups, purposes: tuple[str, ...]) -> list[CopiedCollectives]:
    """Put groups of gloo on copies through memory that processes share. Those that gather and reduce."""
    made = []
    for purpose in purposes:
        if purpose in P2P:  # which `test_p2p_copies.py` is about
            continue
        group = getattr(groups, purpose)
        if group.size == 1:
            continue
        assert isinstance(group.transport, Gloo)
        folder = Path(everyone(tempfile.mkdtemp())[group.ranks[0]])
        if purpose == "a2a":
            group.transport = shared_rows(group, group.transport, folder)
            continue
        group.transport = copied(group, group.transport, folder)
        made.append(group.transport)
    return made


def a_run(rank: int, config: Config, transport: str) -> tuple[list[Tensor], list[bool]]:
    """Losses and weights after two steps, and which groups had memory for what is gathered and what is reduced."""
    groups = make_groups(Mesh(dp=config.mesh.dp, ep=config.mesh.ep), rank, CPU, "gloo")
    transports = on_copy_engines(groups, COPIED.get(transport, ()))
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
    shown = [way in vars(one.copies) for one in transports for way in ("_gathered", "_reduced")]
    return [*losses, *weights], shown


def the_same_steps(rank: int, config: Config) -> None:
    expected, _ = a_run(rank, config, "gloo")
    for transport in COPIED:
        got, shown = a_run(rank, config, transport)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), transport
        gather, reduce = [True, False], [False, True]
        served = [purpose for purpose in COPIED[transport] if purpose not in ("a2a", "cp", *P2P)]
        assert shown == [one for purpose in served for one in (gather if purpose.startswith("gather") else reduce)]


def test_steps_by_copies_are_those_of_gloo():
    run_ranks(the_same_steps, 4, CONFIG)


def whole_gradients(rank: int, config: Config) -> None:
    expected, _ = a_run(rank, config, "gloo")
    got, shown = a_run(rank, config, "copy_engine")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert shown == [False, False, True, True] * 2, "nothing is gathered but sums, by the groups that reduce"


def test_sums_that_every_rank_gets_are_gathered_where_they_are_reduced():
    run_ranks(whole_gradients, 4, planned(CONFIG, strategy="no_shard"))


def test_an_evaluation_gathers_by_copies_too():
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
