"""Checkpoints of sharded models: from any number of ranks and way of sharding to any other, bit by bit."""

from __future__ import annotations

import errno
import functools
import gc
import io
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import hocket
from hocket.fsdp.saving import background
from hocket.fsdp.saving.atomic_folder import AtomicFolder
from hocket.fsdp.saving.background import HostMemory, Saving
from hocket.fsdp.saving.checkpoint import load, save
from hocket.fsdp.saving.storage import CheckpointWriter
from tests.fsdp.models import WIDTH, Block, Stack
from tests.fsdp.saved import Way, adamw, check, fill, shard, step
from tests.fsdp.twin import naming
from tests.helpers.ranks import RankDied, run_ranks

STATES = 3
"""Tensors of AdamW's state per parameter."""


def folder_of(folder: Path, way: Way) -> Path:
    return folder / str(way).replace(" ", "_")


def save_each(rank: int, folder: Path, ways: Sequence[Way]) -> None:
    for way in ways:
        with naming(way):
            save_true(rank, folder_of(folder, way), way)


def load_each(rank: int, folders: Sequence[Path], ways: Sequence[Way]) -> None:
    for saved, way in itertools.product(folders, ways):
        with naming((saved, way)):
            load_true(rank, saved, way)


def by_world(ways: Sequence[Way]) -> Iterator[tuple[int, list[Way]]]:
    for world in sorted({way.world for way in ways}):
        yield world, [way for way in ways if way.world == world]


def save_true(rank: int, folder: Path, way: Way, asynchronously: bool = False) -> None:
    module, ctx = shard(way)
    optimizer = adamw(module)
    step(module, optimizer)
    fill(module, ctx, optimizer, way)
    saved = save(ctx, optimizer, folder, asynchronously=asynchronously)
    with torch.no_grad():  # as the next optimizer step would
        for group in optimizer.param_groups:
            group["lr"] = 99.0
            for param in group["params"]:
                param.fill_(-1)
                for value in optimizer.state[param].values():
                    value.fill_(-1)
        module.seen.fill_(-1)
    assert saved.result(timeout=40) == folder


def load_true(rank: int, folder: Path, way: Way) -> None:
    module, ctx = shard(way)
    optimizer = adamw(module)
    optimizer.param_groups[0]["lr"] = 7.0
    module.scratch.fill_(5)
    load(ctx, optimizer, folder)
    looked = check(module, ctx, optimizer, way)
    trained = sum(param.requires_grad for param in module.parameters()) - 2  # two have no gradient, so no state
    assert looked >= STATES * trained, looked
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.01]
    assert module.scratch.tolist() == [5, 5, 5]
    step(module, optimizer)


LOADED = [
    Way(3),
    Way(1, "optim"),
    Way(4, "no_shard"),
    Way(4, mesh=(2, 2)),
    Way(4, "optim", ep=4),
    Way(2, main=torch.bfloat16),
]
SAVED = [
    Way(3, "no_shard"),
    Way(4, "optim_grads", mesh=(2, 2)),
    Way(4, mesh=(2, 2)),
    Way(4, ep=2),
    Way(3, main=torch.bfloat16),
]


def test_saved_on_two_ranks_and_loaded_in_any_way(tmp_path: Path) -> None:
    run_ranks(save_true, 2, tmp_path / "saved", Way(2))
    for world, ways in by_world(LOADED):
        run_ranks(load_each, world, [tmp_path / "saved"], ways)


def test_saved_in_any_way_and_loaded_on_two_ranks(tmp_path: Path) -> None:
    for world, ways in by_world(SAVED):
        run_ranks(save_each, world, tmp_path, ways)
    run_ranks(load_each, 2, [folder_of(tmp_path, way) for way in SAVED], [Way(2, ep=2)])


def test_weights_may_change_as_soon_as_an_asynchronous_save_returns(tmp_path: Path) -> None:
    ways = [Way(2), Way(4, "optim", ep=2)]
    for way in ways:
        run_ranks(save_true, way.world, folder_of(tmp_path, way), way, True)
    run_ranks(load_each, 3, [folder_of(tmp_path, way) for way in ways], [Way(3)])


def train_on(rank: int, folder: Path) -> list[float]:
    """Steps between asynchronous saves that are still under way; each resumed copy then makes the same steps."""
    module, ctx = shard(Way(2))
    optimizer = adamw(module)
    losses, saves = [], []
    for i in range(5):
        losses.append(step(module, optimizer))
        saves.append(save(ctx, optimizer, folder / str(i), asynchronously=True))
    for saved in saves:
        saved.result(timeout=40)
    return losses


def resume(rank: int, folder: Path, way: Way, steps: int) -> list[float]:
    module, ctx = shard(way)
    optimizer = adamw(module)
    load(ctx, optimizer, folder)
    return [step(module, optimizer) for _ in range(steps)]


def test_training_goes_on_from_any_of_several_saves(tmp_path: Path) -> None:
    first, second = run_ranks(train_on, 2, tmp_path)
    assert first == second
    for after, way in {0: Way(2, "optim"), 3: Way(2, "no_shard")}.items():
        assert run_ranks(resume, 2, tmp_path / str(after), way, 4 - after) == [first[after + 1 :]] * 2


def flip_a_bit(folder: Path) -> None:
    """Of a weight itself, where torch's own reader does not look for damage."""
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    entry = max((value for index, value in stored.items() if "weight" in index.fqn), key=lambda value: value.length)
    file = folder / entry.relative_path
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(io.BytesIO(content[entry.offset : entry.offset + entry.length])) as archive:
        values = archive.read(next(name for name in archive.namelist() if name.endswith("data/0")))
    content[content.index(values, entry.offset) + len(values) // 2] ^= 1
    file.write_bytes(content)


def load_damaged(rank: int, folder: Path) -> None:
    module, ctx = shard(Way(3))
    before = [param.detach().clone() for param in module.parameters()]
    with pytest.raises(ValueError, match=r"is damaged: the checksum of .*weight.* in .*distcp is wrong; load another"):
        load(ctx, adamw(module), folder)
    for was, param in zip(before, module.parameters(), strict=True):
        assert torch.equal(was, param), "a rank loads nothing before all have found their parts whole"


def test_a_bit_that_has_flipped_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(save_true, 2, tmp_path / "saved", Way(2))
    flip_a_bit(tmp_path / "saved")
    run_ranks(load_damaged, 3, tmp_path / "saved")


def test_the_copy_for_the_background_shares_nothing() -> None:
    state = {"weights": [torch.ones(2)], "names": {"a": {1}}}
    copied = HostMemory().copy(state)
    state["weights"][0].zero_()
    state["names"]["a"].add(2)
    assert copied["weights"][0].tolist() == [1, 1]
    assert copied["names"] == {"a": {1}}


def behind_the_others(rank: int, folder: Path) -> float:
    """One rank's thread comes to the save when all the main threads have sent something else."""
    _, ctx = shard(Way(2))
    may_begin = threading.Event()
    if rank == 1:
        background.thread().submit(may_begin.wait, 20)
    saved = save(ctx, None, folder, asynchronously=True)
    if rank == 0:
        time.sleep(0.2)  # its thread waits for the other by now
    numbers = torch.full((4,), float(rank + 1))
    dist.all_reduce(numbers)
    may_begin.set()
    saved.result(timeout=50)
    return numbers.sum().item()


def test_the_thread_and_the_caller_do_not_meet_in_one_group(tmp_path: Path) -> None:
    assert run_ranks(behind_the_others, 2, tmp_path / "saved", timeout=30) == [12, 12]


# What goes wrong


def stopped(rank: int, folder: Path, where: str, asynchronously: bool) -> None:
    """A save during which one process dies, or fails."""
    module, ctx = shard(Way(2))
    optimizer = adamw(module)
    if (rank, where) in ((1, "killed while writing"), (1, "disk full"), (1, "not shared")):
        write = CheckpointWriter.write_data

        def instead(self: CheckpointWriter, plan: Any, planner: Any) -> Any:
            if where == "disk full":
                raise OSError(errno.ENOSPC, "No space left on device")
            results = write(self, plan, planner)
            if where == "killed while writing":
                os.kill(os.getpid(), signal.SIGKILL)
            next(self.folder.temporary.glob("__1_*")).unlink()
            return results

        CheckpointWriter.write_data = instead
    if (rank, where) == (0, "killed before the rename"):
        AtomicFolder.publish = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    save(ctx, optimizer, folder, asynchronously=asynchronously).result(timeout=40)


def save_and_load(rank: int, folder: Path, way: Way) -> None:
    save_true(rank, folder, way)
    load_true(rank, folder, way)


@pytest.mark.parametrize(
    ("where", "asynchronously"),
    [("killed while writing", True), ("killed before the rename", False)],
    ids=["while writing, in the background", "before the rename, at once"],
)
def test_a_save_that_is_killed_leaves_nothing_to_load(tmp_path: Path, where: str, asynchronously: bool) -> None:
    folder = tmp_path / "saved"
    with pytest.raises((RankDied, RuntimeError, OSError, ValueError)):  # of the others: the connection is gone
        run_ranks(stopped, 2, folder, where, asynchronously)
    assert not folder.exists()
    assert any((tmp_path / "saved.tmp").iterdir())
    (tmp_path / "saved.tmp" / "__7_0.distcp").write_bytes(b"of a run with more ranks")
    run_ranks(save_and_load, 2, folder, Way(2))
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0_0.distcp", "__1_0_0.distcp"]


@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ("disk full", OSError, "rank 1 says OSError.*No space left.*; .*iB are free there"),
        ("not shared", ValueError, "that all ranks share"),
    ],
)
def test_one_ranks_error_is_raised_on_all(tmp_path: Path, where: str, kind: type[Exception], words: str) -> None:
    assert run_ranks(error_of, 2, tmp_path / "saved", where, kind, words) == [True, True]
    assert not os.listdir(tmp_path), "what was written takes no room any more"


def unasked(rank: int, folder: Path, how: str) -> list[str]:
    """Warnings of an asynchronous save that fails on rank 1 alone, and what the next save came to."""
    _, ctx = shard(Way(2))
    write = CheckpointWriter.write_data
    if rank == 1:
        CheckpointWriter.write_data = _full
    saving = save(ctx, None, folder / "first", asynchronously=True)
    background.thread().submit(time.sleep, 0).result(timeout=50)  # the save has ended
    assert not saving.cancel()
    CheckpointWriter.write_data = write
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "asked":
            with pytest.raises(OSError, match="No space left") as raised:
                saving.result(timeout=50)
            assert raised.value.errno == errno.ENOSPC
        elif how == "dropped":
            del saving
        elif how == "at the end":
            background.tell_all()
        save(ctx, None, folder / "second")
        save(ctx, None, folder / "third", asynchronously=True).result(timeout=50)
        saving = None
        gc.collect()
    return [str(warning.message) for warning in caught]


def _full(self: CheckpointWriter, plan: Any, planner: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["asked", "dropped", "at the next save", "at the end"])
def test_an_asynchronous_error_is_told_once_on_every_rank_and_the_next_save_works(tmp_path: Path, how: str) -> None:
    for warned in run_ranks(unasked, 2, tmp_path, how):
        assert len(warned) == (how != "asked")
        assert all(f"first: checkpoint {tmp_path}/first can't be written: rank 1 says" in text for text in warned)
    assert sorted(os.listdir(tmp_path)) == ["second", "third"]


def test_a_failed_save_that_is_not_asked_for_holds_no_copy_of_the_model() -> None:
    copied = torch.zeros(3)
    alive = weakref.ref(copied)

    def write(state: list[torch.Tensor]) -> Path:
        try:
            raise KeyError(len(state))
        except KeyError as error:
            raise OSError("no room") from error

    saving = Saving(Path("x"))
    background.in_background(saving, functools.partial(write, [copied]))
    del copied
    background.thread().submit(int).result(timeout=50)
    assert alive() is None
    with pytest.raises(OSError, match="no room"):
        saving.result(timeout=50)


def test_a_program_that_ends_tells_of_the_last_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = f"""
import hocket, torch
ctx = hocket.fully_shard(torch.nn.Linear(2, 2))
saving = hocket.checkpoint.save(ctx, None, "{tmp_path}/file/below", asynchronously=True)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "RuntimeWarning: an asynchronous save failed, and nobody asked" in ended.stderr
    assert "Not a directory" in ended.stderr


def error_of(rank: int, folder: Path, where: str, kind: type[Exception], words: str) -> bool:
    with pytest.raises(kind, match=words) as caught:
        stopped(rank, folder, where, False)
    return str(folder) in str(caught.value)


def no_room_within_an_archive(rank: int, folder: Path) -> None:
    ctx = hocket.fully_shard(nn.Linear(99, 99))  # larger than the buffers of files
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match=r"saved can't be written: rank 0 says OSError: \[Errno 27\]") as caught:
        save(ctx, None, folder)
    assert caught.value.errno == errno.EFBIG


def test_a_disk_that_is_full_within_one_of_torchs_archives_is_told_as_such(tmp_path: Path) -> None:
    run_ranks(no_room_within_an_archive, 1, tmp_path / "saved")
    assert not os.listdir(tmp_path)


class Other(nn.Module):
    """Much like a stack of one block, but not quite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList([Block(13)])
        self.last = nn.LayerNorm(WIDTH)


def refused(rank: int, folder: Path) -> None:
    ctx = hocket.fully_shard(Stack(1), units=Block)
    optimizer = torch.optim.SGD(ctx.units[0].module.parameters(), lr=1.0, momentum=0.9)
    (folder / "weights").mkdir(exist_ok=True)
    dist.barrier()
    save(ctx, None, folder / "weights")
    with pytest.raises(ValueError, match=r"weights exists already; fix: another folder"):
        save(ctx, None, folder / "weights")
    with pytest.raises(ValueError, match=r"weights has no state of an optimizer"):
        load(ctx, optimizer, folder / "weights")
    metadata = folder / "weights/.metadata"
    whole = metadata.read_bytes()
    for damaged in (b"", whole[:50], b"text", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        dist.barrier()
        if rank == 0:
            metadata.write_bytes(damaged)
        dist.barrier()
        with pytest.raises(
            ValueError, match=rf"^checkpoint .*weights is damaged: {metadata} cannot be read: .*; load an"
        ):
            load(ctx, None, folder / "weights")
    dist.barrier()
    if rank == 0:
        metadata.write_bytes(whole)
    dist.barrier()
    for nothing in (folder / "nowhere", folder):
        with pytest.raises(ValueError, match=rf"{nothing} is no complete checkpoint"):
            load(ctx, optimizer, nothing)
    other = Other()
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(3)
    other_ctx = hocket.fully_shard(other, units=Block)
    with pytest.raises(ValueError, match=r"weights doesn't fit the \w*Other: .*lacks last.weight, last.bias") as caught:
        load(other_ctx, None, folder / "weights")
    assert "first.weight is 11 x 11 in it and 5 x 11 in the module" in str(caught.value)
    assert "\n" not in str(caught.value)
    more_ctx = hocket.fully_shard(Stack(0))
    with pytest.raises(ValueError, match=r"it has blocks.0.up.weight, .*, which the module lacks"):
        load(more_ctx, None, folder / "weights")
    with torch.no_grad():
        assert all((param == 3).all() for param in other.parameters())  # nothing has changed
    for file in (folder / "weights").glob(f"__{rank}_*"):
        file.write_bytes(file.read_bytes()[:100])
    dist.barrier()
    with pytest.raises(ValueError, match="weights is damaged: the checksum of"):
        load(ctx, None, folder / "weights")


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(refused, 2, tmp_path)


def test_a_single_process_needs_no_process_group(tmp_path: Path) -> None:
    for asynchronously in (False, True):
        module = Stack(1)
        ctx = hocket.fully_shard(module, units=Block)
        saved = save(ctx, None, tmp_path / str(asynchronously), asynchronously=asynchronously)
        load(ctx, None, saved.result(timeout=40))
