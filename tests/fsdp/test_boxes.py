"""Ranges of elements as boxes, and through DCP: bit-exact at any number of ranks, in both directions."""

from __future__ import annotations

import math
import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hocket.fsdp.piece import Boxes
from hocket.layers.slices import Span, boxes
from tests.helpers.ranks import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "bias": (7,),
    "matrix": (5, 7),
    "cube": (3, 4, 5),
    "deep": (2, 1, 3, 2, 2),
    "none": (0, 3),
}


def value(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Something else for every element and name; exact in bf16 too."""
    count = math.prod(SHAPES[name])
    return (torch.arange(count) + 8 * list(SHAPES).index(name)).to(dtype).view(SHAPES[name])


def cut(rank: int, world: int, dtype: torch.dtype, filled: bool) -> dict[str, Boxes]:
    """All tensors in one flat buffer, of which every rank has an equal share that heeds no tensor's end."""
    total = sum(math.prod(shape) for shape in SHAPES.values())
    share = -(-total // world)
    found, start = {}, 0
    for name, shape in SHAPES.items():
        count = math.prod(shape)
        lo = min(count, max(0, rank * share - start))
        hi = max(lo, min(count, (rank + 1) * share - start))
        whole = value(name, dtype) if filled else torch.full(shape, -1, dtype=dtype)
        found[name] = Boxes(whole.reshape(-1)[lo:hi].clone(), Span(tuple(shape), lo, hi))
        start += count
    return found


def quiet() -> None:
    """DCP warns of a single process, of its own deprecated calls, and of overwriting."""
    warnings.simplefilter("ignore")


def save(rank: int, folder: Path, world: int, dtype: torch.dtype, by_torch: bool = False) -> None:
    quiet()
    state = {"model": cut(rank, world, dtype, filled=True)}
    if by_torch:  # DCP's own asynchronous save, which makes a copy first
        saved = dcp.async_save(state, checkpoint_id=folder)
        assert isinstance(saved, Future)
        for tensor in state["model"].values():
            tensor.flat.fill_(-7)
        saved.result()
    else:
        dcp.save(state, checkpoint_id=folder)


def load(rank: int, folder: Path, world: int, dtype: torch.dtype) -> int:
    quiet()
    mine = cut(rank, world, dtype, filled=False)
    dcp.load({"model": mine}, checkpoint_id=folder)
    for name, tensor in mine.items():
        assert torch.equal(tensor.flat, tensor.span.of(value(name, dtype))), (name, tensor)
    return sum(tensor.flat.numel() for tensor in mine.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_on_two_ranks_and_loaded_on_any_number(tmp_path: Path, dtype: torch.dtype) -> None:
    run_ranks(save, 2, tmp_path, 2, dtype)
    total = sum(math.prod(shape) for shape in SHAPES.values())
    for world in (1, 3, 4):
        assert sum(run_ranks(load, world, tmp_path, world, dtype)) == total


def test_torchs_own_asynchronous_save_takes_a_copy(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, 2, torch.float32, True)
    run_ranks(load, 3, tmp_path, 3, torch.float32)


def save_replicas(rank: int, folder: Path) -> list[int]:
    """Ranks 0 and 1 hold the same first half, 2 and 3 the second."""
    quiet()
    half = rank // 2
    flat = torch.arange(8.0)[4 * half : 4 * half + 4].clone()
    tensor = Boxes(flat, Span((4, 2), 4 * half, 4 * half + 4))
    dcp.save({"w": tensor}, checkpoint_id=folder)
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert sum(math.prod(chunk.sizes) for chunk in stored.chunks) == 8, "each element once"
    dist.barrier()
    flat.zero_()
    dcp.load({"w": tensor}, checkpoint_id=folder)
    return flat.int().tolist()


def test_of_replicas_one_writes_and_all_load(tmp_path: Path) -> None:
    first, second = [0, 1, 2, 3], [4, 5, 6, 7]
    assert run_ranks(save_replicas, 4, tmp_path) == [first, first, second, second]


@given(st.lists(st.integers(0, 5), max_size=5), st.data())
def test_boxes_cover_exactly_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    lo = data.draw(st.integers(0, count))
    hi = data.draw(st.integers(lo, count))
    numbers = torch.arange(count).view(shape)
    covered: list[int] = []
    for offsets, sizes in boxes(shape, lo, hi):
        view = numbers
        for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            view = view.narrow(axis, offset, size)
        covered += view.flatten().tolist()
    assert covered == list(range(lo, hi))
    assert len(boxes(shape, lo, hi)) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "lo", "hi", "expected"),
    [
        ((), 0, 1, [((), ())]),
        ((), 1, 1, []),
        ((9,), 3, 8, [((3,), (5,))]),
        ((4, 5), 0, 20, [((0, 0), (4, 5))]),
        ((4, 5), 5, 15, [((1, 0), (2, 5))]),
        ((4, 5), 6, 8, [((1, 1), (1, 2))]),
        ((4, 5), 3, 17, [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]),
        ((2, 2, 2), 1, 6, [((0, 0, 1), (1, 1, 1)), ((0, 1, 0), (1, 1, 2)), ((1, 0, 0), (1, 1, 2))]),
        ((3, 0), 0, 0, []),
    ],
)  # fmt: skip
def test_boxes_by_hand(shape: tuple[int, ...], lo: int, hi: int, expected: list[object]) -> None:
    assert boxes(shape, lo, hi) == expected


def test_loading_writes_into_the_callers_memory_and_its_version_grows(tmp_path: Path) -> None:
    """The range is a view of a shard. Code that holds the shard must be able to see that it has changed."""
    quiet()
    main = torch.zeros(10)
    dcp.save({"w": Boxes(torch.arange(6.0), Span((2, 3), 0, 6))}, checkpoint_id=tmp_path)
    before = main._version
    dcp.load({"w": Boxes(main[2:8], Span((2, 3), 0, 6))}, checkpoint_id=tmp_path)
    assert main.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 0, 0]
    assert main._version > before


def test_anything_else_is_refused_in_words() -> None:
    tensor = Boxes(torch.zeros(3), Span((2, 3), 1, 4))
    with pytest.raises(TypeError, match="for checkpoints only"):
        tensor.clone()
    assert repr(tensor) == "Boxes(elements 1 to 4 of shape (2, 3), torch.float32)"
    with pytest.raises(AssertionError):
        Boxes(torch.zeros(3), Span((2, 3), 4, 7))
