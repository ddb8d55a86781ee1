"""Checkpoints of tensor-parallel runs go on with any number of ranks, and parts of weights are boxes of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.layers.slices import Part, TensorRank, part_of, split_of, take, whole_shape
from hocket.resolve import Settings, resolve
from hocket.train.checkpoint import Moment, State, restore, save
from tests.helpers.ranks import run_ranks
from tests.ranks.test_tensor_parity import MIXED, of, whole


def state_of(engine: Engine) -> State:
    pieces = [state.piece for state in engine.optimizer.state.values()]
    return {f"weight.{piece.name}": piece.boxes(piece.main) for piece in pieces}


def saves(rank: int, settings: Settings) -> list[Any]:
    engine = Engine(settings, rank, torch.device("cpu"))
    engine.init_weights()
    save(settings, Moment(1, 6), state_of(engine))
    return pieces_of(engine)


def loads(rank: int, settings: Settings) -> list[Any]:
    engine = Engine(settings, rank, torch.device("cpu"))
    restored = restore(settings, state_of(engine))
    assert restored is not None
    assert restored.step == 1
    return pieces_of(engine)


def pieces_of(engine: Engine) -> list[Any]:
    found = [piece for unit in engine.sharded.units.values() for piece in unit.pieces()]
    return [(p.name, p.shape, p.span.lo, p.span.hi, p.span.part, p.main.clone()) for p in found]


def settings_of(folder: Path, **mesh: int) -> Settings:
    c = of(MIXED, mesh, {})
    return resolve(changed(c, {"run.folder": str(folder)}))


MESHES = [
    (dict(tp=2), dict(tp=1, dp=2)),
    (dict(tp=1), dict(tp=2, dp=2)),
    (dict(tp=4), dict(tp=1)),  # two key heads, of which two ranks each have one
    (dict(tp=2), dict(tp=4)),
    (dict(tp=2, dp=2, ep=4), dict(tp=1, dp=2, ep=2)),
    (dict(tp=2, dp=2, ep=2), dict(tp=2, ep=2)),
    (dict(tp=1, dp=3), dict(tp=2, dp=2, ep=4)),
    (dict(tp=1, cp=2, ep=2), dict(tp=1)),
]


@pytest.mark.parametrize(("before", "after"), MESHES)
def test_a_checkpoint_goes_on_with_other_ranks(before: dict[str, int], after: dict[str, int], tmp_path: Path) -> None:
    old, new = settings_of(tmp_path, **before), settings_of(tmp_path, **after)
    wanted = whole([piece for pieces in run_ranks(saves, old.world, old) for piece in pieces])
    found = whole([piece for pieces in run_ranks(loads, new.world, new) for piece in pieces])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (dict(layers_per_stage=(3, 1)), dict(layers_per_stage=(1, 3))),
        (dict(layers_per_stage=(1, 3)), dict(order="merged_v", chunks=2, merge="on")),
    ],
)
def test_a_checkpoint_goes_on_with_other_stages(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    old, new = (
        resolve(changed(of(dict(layers=4), dict(tp=1, pp=2), plan, microbatches=4), {"run.folder": str(tmp_path)}))
        for plan in (before, after)
    )
    wanted = whole([piece for pieces in run_ranks(saves, 2, old) for piece in pieces])
    found = whole([piece for pieces in run_ranks(loads, 2, new) for piece in pieces])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


NAMES = ["layers.0.attn.wq", "layers.0.attn.wo", "layers.1.mlp.w_gate_up", "layers.1.shared.w_down", "embed.weight"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 4])
def test_boxes_of_a_part_hold_its_elements(name: str, size: int) -> None:
    value = torch.arange(8 * 16).view(8, 16)
    seen = torch.zeros(8, 16)
    for rank in range(size):
        at = TensorRank(rank, size)
        part = part_of(name, value.shape, at)
        assert part is not None
        assert whole_shape(name, part.shape, at) == (8, 16)
        mine = take(name, value, at)
        assert mine.shape == part.shape
        for lo, hi in ((0, 5), (5, 21), (21, mine.numel())):
            assert torch.equal(boxed(part, value, lo, hi), mine.reshape(-1)[lo:hi])
            for offsets, sizes in part.boxes(lo, hi):
                seen[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert (seen == 1).all(), "every element is some rank's"


def test_neighbours_share_key_heads() -> None:
    value = torch.arange(2 * 8 * 4).view(16, 4)  # two heads
    for rank in range(4):
        at = TensorRank(rank, 4, sharing=2)
        mine = take("layers.0.attn.wk", value, at)
        assert torch.equal(mine, value[:8] if rank < 2 else value[8:])
        assert whole_shape("layers.0.attn.wk", mine.shape, at) == (16, 4)
        assert take("layers.0.attn.wq", value, at).shape == (4, 4)
        alone = TensorRank(rank, 4, sharing=4)  # one head
        assert part_of("layers.0.attn.wv", value.shape, alone) is None
        assert whole_shape("layers.0.attn.wv", (16, 4), alone) == (16, 4)


def boxed(part: Part, value: Tensor, lo: int, hi: int) -> Tensor:
    """The elements of a range, taken box by box from the whole."""
    boxes = [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in part.boxes(lo, hi)]
    return torch.cat([value[box].reshape(-1) for box in boxes])


def test_what_all_ranks_have_is_not_split() -> None:
    names = [
        "layers.0.attn_norm",
        "layers.3.router.weight",
        "layers.3.experts.w_down",
        "head.norm",
        "layers.0.attn.q_norm",
    ]
    assert not any(split_of(name) for name in names)
