"""Files of checkpoints: whose they are, and what torch makes of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import hocket
from hocket.fsdp.saving import storage
from hocket.fsdp.saving.checkpoint import Inventory, load, save
from hocket.fsdp.saving.storage import CheckpointReader
from tests.fsdp.models import Block, Stack
from tests.helpers.ranks import run_ranks


def sharded(seed: int) -> tuple[Stack, Any]:
    torch.manual_seed(seed)
    module = Stack(2)
    with torch.no_grad():
        for param in module.parameters():
            param.normal_()
    return module, hocket.fully_shard(module, units=Block)


def save_two(rank: int, folder: Path) -> None:
    storage.LEAST = 300
    for seed in (1, 2):
        module, ctx = sharded(seed)
        optimizer = torch.optim.AdamW(module.parameters())
        save(ctx, optimizer, folder / str(seed))
        save(ctx, optimizer, folder / f"{seed} again")


def load_one(rank: int, folder: Path, seed: int) -> str:
    """What a load says; and nothing has changed then. Empty if there is what was saved."""
    module, ctx = sharded(seed)
    saved = [param.detach().clone() for param in module.parameters()]
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(7)
    try:
        load(ctx, None, folder)
    except ValueError as error:
        assert all(bool((param == 7).all()) for param in module.parameters())
        return str(error)
    assert all(map(torch.equal, module.parameters(), saved))
    return ""


def test_a_file_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    run_ranks(save_two, 2, tmp_path)
    names = sorted(file.name for file in (tmp_path / "1").glob("*.distcp"))
    assert {name[:4] for name in names} == {"__0_", "__1_"}
    assert len(names) > 4, "several files of a rank"
    for name in names:
        content = (tmp_path / "1" / name).read_bytes()
        assert content == (tmp_path / "1 again" / name).read_bytes(), "the same state makes the same files"
        (tmp_path / "1 again" / name).write_bytes((tmp_path / "2" / name).read_bytes())
    assert run_ranks(load_one, 3, tmp_path / "1", 1) == [""] * 3
    for said in run_ranks(load_one, 3, tmp_path / "1 again", 1):
        assert "1 again is damaged: the checksum of " in said
        assert "distcp is wrong; load another one" in said


def test_metadata_that_has_changed_is_refused(tmp_path: Path) -> None:
    _, ctx = sharded(1)
    save(ctx, None, tmp_path / "1")
    content = (tmp_path / "1" / ".metadata").read_bytes()
    at = content.index(b"hocket", len(content) - 10)
    for place in (100, at // 2, at - 1, at + 7):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "1" / ".metadata").write_bytes(changed)
        with pytest.raises(ValueError, match=r"\.metadata cannot be read: its checksum is wrong"):
            CheckpointReader(tmp_path / "1").read_metadata()
    (tmp_path / "1" / ".metadata").write_bytes(content)
    assert load_one(0, tmp_path / "1", 1) == ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_without_checksums_in_their_metadata_are_read(tmp_path: Path) -> None:
    """As torch's own writer makes them."""
    _, ctx = sharded(1)
    dcp.save({"model": Inventory(ctx).entries()}, checkpoint_id=tmp_path / "1", no_dist=True)
    assert load_one(0, tmp_path / "1", 1) == ""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_makes_one_file_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LEAST", 100)
    module, ctx = sharded(1)
    plain = {name: tensor.clone().flatten() for name, tensor in module.state_dict().items()}
    save(ctx, None, tmp_path / "1")
    assert len(list((tmp_path / "1").glob("*.distcp"))) == storage.FILES
    dcp_to_torch_save(tmp_path / "1", tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=True)["model"]
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name].flatten(), plain[name]) for name in plain)
    shutil.rmtree(tmp_path / "1")
