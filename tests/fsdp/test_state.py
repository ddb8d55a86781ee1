"""State dicts of sharded modules beside those of torch: names, layouts, values, in both directions."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import hocket
from hocket.fsdp.saving.checkpoint import Inventory, load, save
from hocket.fsdp.saving.storage import CheckpointReader
from tests.fsdp.elements import local
from tests.fsdp.models import Block, Odd, OddBlock, Stack
from tests.fsdp.saved import IDS, Everything, Way, adamw, check, fill, shard, step, truth
from tests.helpers.ranks import run_ranks

TWO = Way(2)


@pytest.fixture(autouse=True)
def _no_remarks() -> Any:
    """DCP remarks that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def plain(filled: bool) -> tuple[Everything, torch.optim.AdamW]:
    """The unsharded module and its optimizer, with true values or others."""
    torch.manual_seed(5)
    module = Everything(reads_all=True)
    optimizer = adamw(module)
    if not filled:
        return module, optimizer
    step(module, optimizer)
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(truth(name, "main", tuple(param.shape)))
            for key, value in optimizer.state.get(param, {}).items():
                value.copy_(torch.tensor(len(name)) if key == "step" else truth(name, key, tuple(param.shape)))
        module.seen.copy_(truth("seen", "buffer", (2, 2)))
    return module, optimizer


def same_as_plain(module: Everything, optimizer: torch.optim.AdamW) -> None:
    """An unsharded module and its optimizer have true values, and what would be trained next is the same."""
    wanted, expected = plain(filled=True)
    for (name, ours), theirs in zip(module.state_dict().items(), wanted.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert module.head.weight is module.embed.weight
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        for key, value in values.items():
            assert torch.equal(ours["state"][number][key], value), (number, key)


def save_two(rank: int, folder: Path, flatten: bool) -> None:
    module, ctx = shard(TWO, reads_all=True)
    optimizer = adamw(module)
    step(module, optimizer)
    fill(module, ctx, optimizer, TWO)
    save(ctx, optimizer, folder, flatten=flatten)


def load_two(rank: int, folder: Path, way: Way = TWO) -> None:
    module, ctx = shard(way)
    optimizer = adamw(module)
    load(ctx, optimizer, folder)
    assert check(module, ctx, optimizer, way) > 40
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]


@pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flat"])
def test_a_plain_module_loads_ours_and_we_load_a_plain_modules(tmp_path: Path, flatten: bool) -> None:
    run_ranks(save_two, 2, tmp_path / "ours", flatten)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    module, optimizer = plain(filled=False)
    state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer, options=options)}
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    module.load_state_dict(state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=options)
    same_as_plain(module, optimizer)

    module, optimizer = plain(filled=True)
    state = {"model": module.state_dict(), "optimizer": get_optimizer_state_dict(module, optimizer, options=options)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    run_ranks(load_two, 2, tmp_path / "theirs")


def test_through_a_torch_file_and_back(tmp_path: Path) -> None:
    run_ranks(save_two, 2, tmp_path / "ours", False)
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")
    module, optimizer = plain(filled=False)
    module.load_state_dict(state["model"])
    set_optimizer_state_dict(module, optimizer, state["optimizer"])
    same_as_plain(module, optimizer)

    torch_save_to_dcp(tmp_path / "whole.pt", tmp_path / "theirs")
    for way in (Way(3), Way(2, "no_shard", ep=2)):
        run_ranks(load_two, way.world, tmp_path / "theirs", way)

    del state["model"]["embed.weight"]  # the other name of a shared weight will do
    torch.save(state, tmp_path / "less.pt")
    torch_save_to_dcp(tmp_path / "less.pt", tmp_path / "less")
    run_ranks(load_two, 2, tmp_path / "less")


def forward_after_load(rank: int, folder: Path) -> None:
    module, ctx = shard(Way(2))
    optimizer = adamw(module)
    first = module(IDS)
    first.sum().backward()  # the last units keep their gathered weights
    optimizer.step()
    save(ctx, optimizer, folder)
    with torch.no_grad():
        trained = module(IDS)
        before = {
            (name, key): local(value).data_ptr()
            for name, param in module.named_parameters()
            for key, value in optimizer.state[param].items()
        }
        for param in module.parameters():
            param.fill_(0.5)
        module(IDS)
        load(ctx, optimizer, folder)
        assert torch.equal(module(IDS), trained)
        assert not torch.equal(module(IDS), first)
    after = {
        (name, key): local(value).data_ptr()
        for name, param in module.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    assert before == after  # as a captured graph needs it


def test_the_next_forward_uses_loaded_weights_and_state_stays_in_its_place(tmp_path: Path) -> None:
    run_ranks(forward_after_load, 2, tmp_path / "saved")


def without_state(rank: int, folder: Path) -> None:
    module, ctx = shard(TWO)
    for name, make in {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}.items():
        optimizer = make(module.parameters(), lr=0.125)
        if name == "sgd":
            step(module, optimizer)
        save(ctx, optimizer, folder / name)
        optimizer = make(module.parameters(), lr=1.0)
        load(ctx, optimizer, folder / name)
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert not any(optimizer.state.values())
    with pytest.raises(ValueError, match=r"not that of SGD: it has .*betas.* lacks dampening.* load the weights alone"):
        load(ctx, torch.optim.SGD(module.parameters(), lr=1.0), folder / "adam")


def test_an_optimizer_without_state(tmp_path: Path) -> None:
    run_ranks(without_state, 2, tmp_path)


class Precise(torch.optim.Optimizer):
    """Keeps a sum in fp32 and one in fp64 of whatever dtype the weights are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5)})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("sum", torch.zeros_like(param, dtype=torch.float32)).add_(1 / 3)
                    state.setdefault("double", torch.zeros_like(param, dtype=torch.float64)).add_(1 / 3)
                    state.setdefault("count", torch.tensor(0)).add_(1)


def precise(rank: int, folder: Path) -> None:
    module, ctx = shard(Way(2, main=torch.bfloat16))
    optimizer = Precise(module.parameters())
    step(module, optimizer)
    save(ctx, optimizer, folder)
    other = Precise(module.parameters())
    other.param_groups[0]["lr"] = rate = torch.tensor(0.0)
    load(ctx, other, folder)
    assert rate.item() == 0.5
    assert other.param_groups[0]["lr"] is rate
    seen = 0
    for param, values in optimizer.state.items():
        for key, value in values.items():
            assert other.state[param][key].dtype == value.dtype
            assert torch.equal(other.state[param][key], value), key
            seen += value.numel()
    assert seen > 100


def test_state_more_precise_than_weights_loses_nothing(tmp_path: Path) -> None:
    run_ranks(precise, 2, tmp_path / "saved")


def test_a_model_of_single_numbers(tmp_path: Path) -> None:
    """Where state per element and state per parameter look alike."""
    run_ranks(single_numbers, 2, tmp_path / "saved")


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def single_numbers(rank: int, folder: Path) -> None:
    module = Scale()
    ctx = hocket.fully_shard(module, strategy="optim_grads_params")
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    for _ in range(3):
        module(torch.ones(())).backward()
        optimizer.step()
        optimizer.zero_grad()
    save(ctx, optimizer, folder)
    other = torch.optim.AdamW(module.parameters(), foreach=True)
    load(ctx, other, folder)
    for key, value in optimizer.state[module.scale].items():
        assert other.state[module.scale][key].shape == value.shape
        assert torch.equal(other.state[module.scale][key], value), key
    module(torch.ones(())).backward()
    other.step()


def written(rank: int, folder: Path, way: Way) -> tuple[int, int, int, int]:
    """Bytes of all parameters, and those that this rank keeps, gives to a save, and finds in its files."""
    _, ctx = shard(way)
    own = Inventory(ctx)
    kept, elsewhere = {name: one.main.nbytes for name, one in own.shards.items()}, own.written_elsewhere()
    save(ctx, None, folder)
    metadata, wrote = CheckpointReader(folder).read_metadata(), 0
    assert metadata.storage_data is not None
    for index, entry in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[index.fqn]
        if index.fqn.removeprefix("model.") in kept and entry.relative_path.startswith(f"__{rank}_"):
            assert isinstance(stored, TensorStorageMetadata)
            wrote += 4 * next(chunk.sizes.numel() for chunk in stored.chunks if chunk.offsets == index.offset)
    given = sum(nbytes for name, nbytes in kept.items() if name not in elsewhere)
    return sum(4 * math.prod(one.shape) for one in own.shards.values()), sum(kept.values()), given, wrote


@pytest.mark.parametrize("way", [Way(4, mesh=(2, 2)), Way(4, "no_shard"), Way(4)], ids=str)
def test_of_replicas_each_copies_and_writes_its_share(way: Way, tmp_path: Path) -> None:
    found = run_ranks(written, way.world, tmp_path / "saved", way)
    total = found[0][0]
    copies = 4 if way.strategy == "no_shard" else 2 if way.mesh else 1
    numbers = 4 * (way.world // copies - 1) * copies  # bytes of the single number, which every rank keeps
    assert sum(kept for _, kept, *_ in found) == copies * total + numbers
    assert sum(given for *_, given, _ in found) <= total + numbers
    assert sum(wrote for *_, wrote in found) == total
    if copies > 1:
        assert max(given for *_, given, _ in found) < 2 * total / way.world


def refusals(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    module = Stack(1)
    ctx = hocket.fully_shard(module, units=Block)
    for wrong in ([nn.Parameter(torch.zeros(3))], Stack(1).parameters()):
        with pytest.raises(ValueError, match=r"SGD holds a parameter of shape \(.*\) that isn't part of the sharded"):
            save(ctx, torch.optim.SGD(wrong, lr=1.0), folder)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["rows"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"rows of .* has shape \(3,\).* is not saved"):
        save(ctx, optimizer, folder)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["rows"] = [torch.zeros(3)]
    with pytest.raises(ValueError, match=r"rows of .* is a list, .* is not saved"):
        save(ctx, optimizer, folder)
    params = list(module.parameters())
    two = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 2.0}], lr=1.0)
    less = torch.optim.SGD([param for param in params if param is not module.norm.weight], lr=1.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    for flatten in (False, True):
        save(ctx, two, folder / f"two {flatten}", flatten=flatten)
        with pytest.raises(ValueError, match=r"in one group of the SGD, but the state has lr=1.0 .* lr=2.0 for the"):
            load(ctx, optimizer, folder / f"two {flatten}")
        save(ctx, less, folder / f"less {flatten}", flatten=flatten)
        with pytest.raises(ValueError, match=r"no settings for norm.weight: it is of an optimizer without"):
            load(ctx, optimizer, folder / f"less {flatten}")


def test_what_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    run_ranks(refusals, 2, tmp_path)


def without_parts(rank: int) -> None:
    torch.manual_seed(0)
    alone = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "edp"))["edp"]
    ctx = hocket.fully_shard(
        Odd(), units=OddBlock, place=lambda name, _: hocket.sharding.Placement(alone, 1.0) if ".few" in name else None
    )
    with pytest.raises(ValueError, match=r"few.0 is placed on 1 of 2 ranks.*Placement\(part=\(position, 2\)\)"):
        Inventory(ctx)
    dist.barrier()


def test_different_values_under_one_name_are_refused() -> None:
    run_ranks(without_parts, 2)


def save_stage(rank: int, folder: Path) -> None:
    """Ranks are pipeline stages: each has other parameters, on a mesh of its own."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    block = Block()
    module = nn.ModuleDict({str(rank): block})
    ctx = hocket.fully_shard(module, units=Block, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5 + rank, foreach=True)
    for again in (False, True):
        block(torch.ones(2, 11)).sum().backward()
        optimizer.step()
        (load if again else partial(save, flatten=True))(ctx, optimizer, folder)
    assert optimizer.state[block.up.bias]["step"].item() == 1


def load_stages(rank: int, folder: Path) -> None:
    module = nn.ModuleDict({str(i): Block() for i in range(2)})
    ctx = hocket.fully_shard(module, strategy="optim_grads_params")
    optimizer = torch.optim.AdamW([{"params": module[str(i)].parameters()} for i in range(2)], foreach=True)
    load(ctx, optimizer, folder)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1.5]
    assert all(state["step"].item() == 1 for state in optimizer.state.values())


def test_stages_save_one_checkpoint(tmp_path: Path) -> None:
    run_ranks(save_stage, 2, tmp_path / "saved")
    run_ranks(load_stages, 3, tmp_path / "saved")


class Counting(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.counts = {"calls": 0}

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state


def extra_state(rank: int, folder: Path) -> None:
    module = Counting()
    ctx = hocket.fully_shard(module, strategy="optim_grads_params")
    module.counts["calls"] = 7
    save(ctx, None, folder)
    module.counts = {"calls": 0}
    load(ctx, None, folder)
    assert module.counts == {"calls": 7}


def test_extra_state_of_modules_is_saved_too(tmp_path: Path) -> None:
    run_ranks(extra_state, 2, tmp_path / "saved")


def wrapped(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    module: Any = Stack(2)
    module.blocks[0].register_buffer("seen", torch.full((2,), 3.0))
    plain_names = list(module.state_dict())
    module.blocks[0] = checkpoint_wrapper(module.blocks[0])
    module.blocks[1] = torch.compile(module.blocks[1], backend="eager")
    ctx = hocket.fully_shard(module, units=Block)
    assert sorted(Inventory(ctx).entries()) == sorted(plain_names)
    save(ctx, None, folder)
    with torch.no_grad():
        for value in module.state_dict().values():
            value.fill_(7)
    load(ctx, None, folder)
    assert not any((param == 7).any() for param in module.parameters())
    assert module.blocks[0].seen.tolist() == [3, 3]


def test_names_are_those_without_wrappers(tmp_path: Path) -> None:
    run_ranks(wrapped, 2, tmp_path / "saved")
