"""docs/fsdp.md says what is: its programs run, and its formulas give what `ctx.stats()` counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import hocket
from hocket.fsdp.saving.checkpoint import Inventory
from tests.fsdp.elements import local
from tests.fsdp.twin import naming
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "fsdp.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def program(words: str) -> str:
    """The one program of the page that has these words in it."""
    (found,) = [text for text in PROGRAMS if words in text]
    return found


def run(rank: int, text: str) -> list[Tensor]:
    """Run a program of the page as torchrun would: the group is there already. Returns its whole weights."""
    found: dict[str, Any] = {}
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        exec(text, found)
    with found["ctx"].gathered():
        return [full.detach().clone() for unit in found["ctx"].units for full in unit.parameters]


def runs_in_readme(rank: int) -> None:
    (text,) = re.findall(r"```python\n(ctx = .*?)```", README, flags=re.DOTALL)
    model = nn.Sequential(Block(), Block())
    found: dict[str, Any] = {"hocket": hocket, "torch": torch, "model": model, "Block": Block}
    found |= {"batches": torch.ones(2, 3, 64), "loss_of": lambda model, batch: model(batch).square().mean()}
    exec(text, found)
    assert found["ctx"].stats().reduces == 4


def test_the_program_of_the_readme() -> None:
    run_ranks(runs_in_readme, 2)


def as_fsdp2(rank: int, text: str) -> None:
    """The program for FSDP2 computes in torch's own hands what it does in hocket's."""
    found: list[dict[str, Any]] = []
    for door in ("hocket.sharding", "torch.distributed.fsdp"):
        found.append({})
        with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
            exec(text.replace("from hocket.sharding", f"from {door}"), found[-1])
    ours, theirs = (get_model_state_dict(one["model"], options=StateDictOptions(full_state_dict=True)) for one in found)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


def test_the_program_for_fsdp2() -> None:
    run_ranks(as_fsdp2, 2, program("from hocket.sharding import"))


def sharded_by_hooks(rank: int) -> list[Tensor]:
    """What the program that drives units itself computes, in an ordinary loop."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    ctx = hocket.fully_shard(layers, units=nn.Linear)
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(3):
        (layers(torch.randn(8, 64)).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with ctx.gathered():
        return [full.detach().clone() for unit in ctx.units for full in unit.parameters]


def test_the_first_program_trains() -> None:
    first, second = run_ranks(run, 2, program("class Block(nn.Module)"))
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_program_that_drives_units_does_what_hooks_do() -> None:
    ours = run_ranks(run, 2, program('driver="manual"'))[0]
    wanted = run_ranks(sharded_by_hooks, 2)[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


class Layer(nn.Module):
    """Two ranks have an expert each."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(16, 16), nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) + self.experts[0](x)


def placed(rank: int, text: str) -> None:
    model = nn.Sequential(Layer(), Layer())
    found: dict[str, Any] = {
        "model": model,
        "Layer": Layer,
        "init_device_mesh": init_device_mesh,
        "nn": nn,
        "hocket": hocket,
    }
    exec(text, found)
    model(torch.randn(3, 16)).sum().backward()
    shapes = {name: tuple(value.shape) for name, value in Inventory(found["ctx"]).entries().items()}
    assert shapes["0.dense.weight"] == (16, 16)
    assert shapes["0.experts.0.weight"] == (32, 16)
    dense, experts = found["ctx"].units[1].groups
    assert dense.groups.gather.ranks == (0, 1, 2, 3)
    assert experts.groups.gather.ranks == (rank % 2, rank % 2 + 2)
    assert dense.groups.divide == experts.groups.divide == 4


def test_the_program_that_places_experts() -> None:
    run_ranks(placed, 4, program("hocket.sharding.Placement("))


def saved(rank: int, text: str, folder: Path) -> None:
    model = nn.Sequential(Layer(), Layer())
    ctx = hocket.fully_shard(model, units=Layer)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    wanted = [param.detach().clone() for param in model.parameters()]
    found: dict[str, Any] = {
        "hocket": hocket,
        "ctx": ctx,
        "optimizer": optimizer,
        "folder": folder / "a",
        "other_folder": folder / "b",
    }
    *lines, load = text.strip().splitlines()
    exec("\n".join(lines), found)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    exec(load, found)
    assert all(torch.equal(a, b) for a, b in zip(wanted, model.parameters(), strict=True))
    assert (folder / "b" / ".metadata").exists()


def test_the_program_that_saves(tmp_path: Path) -> None:
    run_ranks(saved, 2, program("hocket.checkpoint.save("), tmp_path)


class Block(nn.Module):
    """Without padding on up to four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


ROWS = {
    words: [cell.strip("` ") for cell in line.strip("| ").split("|")[1:]]
    for line in re.search(r"### Memory\n(.*?)\n- ", TEXT, flags=re.DOTALL)[1].splitlines()  # pyrefly: ignore
    if "P *" in line or "P / W" in line
    for words in [line.strip("| ").split("|")[0].strip()]
}
"""Of the table of memory: first column -> formulas."""


def memory(rank: int, strategy: str, replicas: int, compute: torch.dtype) -> None:
    model = nn.Sequential(*(Block() for _ in range(5)))
    options = hocket.ShardOptions()
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas)) if replicas > 1 else None
    precision = hocket.Precision(compute=compute)
    elements = sum(param.numel() for param in model.parameters())
    ctx = hocket.fully_shard(model, units=Block, mesh=mesh, strategy=strategy, precision=precision, options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for _ in range(2):
            model(torch.randn(3, 64, dtype=compute)).sum().backward()
        optimizer.step()
        with_grads = ctx.stats().shard_bytes
        optimizer.zero_grad()
    same = compute == torch.float32 and strategy == "no_shard"  # then c counts nothing in what is kept
    names = {"P": elements, "U": elements // 5, "W": dist.get_world_size() // replicas}
    names |= {"m": 4, "c": compute.itemsize, "w": compute.itemsize, "g": 4}
    names |= {"ahead": options.prefetch, "staging": options.staging}
    ((kept, grads, gathered, staged, state),) = [cells for words, cells in ROWS.items() if f"`{strategy}`" in words]
    stats = ctx.stats()
    assert stats.shard_bytes == eval(kept, names | {"c": 0} if same else dict(names))
    assert with_grads - stats.shard_bytes == eval(grads, dict(names))
    assert stats.full_bytes == eval(gathered, dict(names))
    most = eval(staged, dict(names))
    # Where a reduction is over when the next gradient comes, its buffer serves again.
    assert 0 < stats.staging_bytes <= most
    assert stats.staging_bytes == most or strategy == "no_shard" or replicas > 1
    found = sum(local(value).nbytes for items in optimizer.state.values() for value in items.values() if value.dim())
    assert found == eval(state, dict(names))


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def memory_of_all(rank: int, strategies: Sequence[str], replicas: int) -> None:
    for strategy in strategies:
        for compute in (torch.float32, torch.bfloat16):
            with naming((strategy, compute)):
                memory(rank, strategy, replicas, compute)


@pytest.mark.parametrize(("strategies", "replicas"), [(STRATEGIES, 1), (STRATEGIES[1:], 2)], ids=["alone", "replicas"])
def test_the_formulas_of_memory(strategies: Sequence[str], replicas: int) -> None:
    run_ranks(memory_of_all, 2 * replicas, strategies, replicas)


def local_sums(rank: int, strategy: str) -> None:
    """What is put off takes the memory that the page says, from the first time on."""
    model = nn.Sequential(*(Block() for _ in range(5)))
    elements = sum(param.numel() for param in model.parameters())
    ctx = hocket.fully_shard(model, units=Block, strategy=strategy)
    model(torch.randn(3, 64)).sum().backward()
    before = ctx.stats().shard_bytes
    with ctx.accumulating() if strategy == "optim" else ctx.no_sync():
        model(torch.randn(3, 64)).sum().backward()
    assert ctx.stats().shard_bytes - before == elements * 4


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_the_memory_of_what_is_put_off(strategy: str) -> None:
    run_ranks(local_sums, 2, strategy)


def compiled(rank: int) -> None:
    wanted = losses("no", shard=False)
    for how in ("blocks before", "blocks after", "model"):
        torch._dynamo.reset()
        assert losses(how, shard=True) == wanted, how


def losses(how: str, shard: bool) -> list[float]:
    """Of three steps, with blocks compiled before or after sharding, or the model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    if how == "blocks before":
        for block in model:
            block.compile(backend="aot_eager")
    if shard:
        hocket.fully_shard(model, units=Block)
    if how == "blocks after":
        for block in model:
            block.compile(backend="aot_eager")
    run = torch.compile(model, backend="aot_eager") if how == "model" else model
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for _ in range(3):
        loss = run(torch.randn(3, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_compiled_blocks_and_models() -> None:
    """One rank: what is compiled does not depend on how many there are."""
    run_ranks(compiled, 1)
