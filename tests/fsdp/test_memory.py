"""How much memory there is at any time, and that all of it goes."""

import gc
import weakref

import pytest
import torch

import hocket
from hocket.fsdp.buffers import FullBuffer
from hocket.fsdp.module_context import ShardContext
from hocket.fsdp.module_unit import Unit
from hocket.fsdp.options import Precision
from tests.fsdp.elements import local
from tests.fsdp.models import Block, Chain
from tests.fsdp.noted import Model, Run
from tests.fsdp.twin import Case, Pair, naming
from tests.helpers.ranks import run_ranks

L = 7


class Meter:
    """Counts the bytes of full buffers that are there, by their own account."""

    def __init__(self, ctx: ShardContext) -> None:
        self.buffers = {id(b): b for unit in ctx.units for b in unit.full.values()}.values()
        self.peak = self.now

    @property
    def now(self) -> int:
        return sum(buffer.flat.untyped_storage().nbytes() for buffer in self.buffers)

    def __enter__(self) -> "Meter":
        self._allocate = FullBuffer.allocate
        meter, allocate = self, self._allocate

        def measured(buffer: FullBuffer) -> None:
            allocate(buffer)
            meter.peak = max(meter.peak, meter.now)

        FullBuffer.allocate = measured  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        FullBuffer.allocate = self._allocate


def full_bytes(unit: Unit) -> int:
    """Of its gathered weights."""
    return sum(group.total_bytes for group in unit.groups if not group.whole)


def some_steps(pair: Pair) -> None:
    for _ in range(3):
        pair.microbatch()
        pair.evaluate()
        pair.microbatch()
        pair.step()


def bounded(rank: int) -> None:
    for ahead in (0, 1, 2):
        with naming(ahead):
            pair = Pair(Case("deep", microbatches=2, options={"prefetch": ahead}), rank, 2)
            largest = max(full_bytes(unit) for unit in pair.ctx.units)
            with Meter(pair.ctx) as meter:
                some_steps(pair)
            room = ahead + 1
            assert meter.peak <= room * largest
            assert meter.peak >= min(room, 2) * min(full_bytes(unit) for unit in pair.ctx.units if unit.full)


def test_gathered_weights_keep_to_their_bound():
    run_ranks(bounded, 2)


def bounded_beside_the_outermost(rank: int) -> None:
    """Its unit is in use from a step's forward to its backward, and checkpoints run blocks once more meanwhile."""
    for model in ("reentrant", "recomputed"):
        for ahead in (0, 1, 2):
            with naming((model, ahead)):
                pair = Pair(Case(model, microbatches=2, options={"prefetch": ahead}), rank, 2)
                outermost, *blocks = (full_bytes(unit) for unit in pair.ctx.units)
                with Meter(pair.ctx) as meter:
                    some_steps(pair)
                assert max(blocks) < meter.peak <= outermost + (ahead + 1) * max(blocks)


def test_gathered_weights_keep_to_their_bound_under_checkpoints():
    run_ranks(bounded_beside_the_outermost, 2)


def staging_bytes(rank: int) -> None:
    for count in (1, 2, 3):
        pair = Pair(Case("deep", microbatches=3, options={"staging": count}), rank, 2)
        pair.train()
        largest = max(group.layout.total * 4 for unit in pair.ctx.units for group in unit.groups)
        assert pair.ctx.stats().staging_bytes == count * largest


def test_staging_is_as_many_buffers_as_said():
    run_ranks(staging_bytes, 2)


def no_growth(rank: int) -> None:
    """The peaks of later steps are those of the first."""
    for model in ("stack", "nested", "conditional", "twice"):
        with naming(model):
            pair = Pair(Case(model, microbatches=2, steps=2), rank, 2)
            peaks, resting = [], []
            for _ in range(4):
                with Meter(pair.ctx) as meter:
                    pair.microbatch()
                    pair.microbatch()
                    pair.step()
                peaks.append(meter.peak)
                resting.append((pair.ctx.stats().staging_bytes, pair.ctx.stats().shard_bytes))
            assert peaks[1:] == peaks[:-1] or model == "conditional", peaks
            assert len(set(resting)) == 1


def test_steps_do_not_grow():
    run_ranks(no_growth, 2)


PRECISION = {
    "fp32": (Precision(), 4, 4),
    "bf16": (Precision(compute=torch.bfloat16), 4, 4),
    "small": (Precision(main=torch.bfloat16, compute=torch.bfloat16, accumulate=torch.bfloat16), 2, 2),
}


def persistent(rank: int, name: str) -> None:
    precision, main, gradient = PRECISION[name]
    model = Chain(*(Block(bias=False, hidden=16 * 11) for _ in range(3)))
    elements = sum(p.numel() for p in model.parameters())
    ctx = hocket.fully_shard(model, units=Block, precision=precision)
    padding = sum(group.layout.total for unit in ctx.units for group in unit.groups) - elements
    assert padding <= sum(2 * 64 + p[0].numel() for p in model.parameters()) + 3 * 2 * 64
    mine = (elements + padding) // 2
    for _ in range(2):
        assert ctx.stats().shard_bytes == mine * main
        model(torch.randn(2, 11, dtype=precision.compute)).float().sum().backward()
        assert ctx.stats().shard_bytes == mine * (main + gradient)
        model.zero_grad()


@pytest.mark.parametrize("name", PRECISION)
def test_persistent_bytes(name):
    """Main weights, and gradients from backward to `zero_grad`: of every element on one rank."""
    run_ranks(persistent, 2, name)


def deleted(rank: int) -> None:
    run = Run(Model(L), 2)
    run.step()
    watched = [weakref.ref(unit) for unit in run.ctx.units]
    watched += [weakref.ref(run.ctx), *(weakref.ref(layer) for layer in run.model.layers)]
    watched += [weakref.ref(group.main) for unit in run.ctx.units for group in unit.groups]
    watched += [weakref.ref(buffer.flat) for unit in run.ctx.units for buffer in unit.full.values()]
    del run
    gc.collect()
    alive = [ref() for ref in watched if ref() is not None]
    assert not alive, alive[:3]


def test_a_deleted_model_is_gone():
    """Units, shards and buffers; a module and its unit know each other, so the collector of cycles has to run."""
    run_ranks(deleted, 2)


def storages() -> dict[int, int]:
    """Bytes of all storages that some tensor has, by their identity."""
    gc.collect()
    tensors = [local(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}


def forgotten(rank: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    ctx = hocket.fully_shard(model, units=torch.nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
        hocket.clip_grad_norm_(model, 1.0)
        kept = [group.main_grad.untyped_storage()._cdata for unit in ctx.units for group in unit.groups]
        assert set(kept) <= set(storages())
        optimizer.step()
        optimizer.zero_grad()
        assert not set(kept) & set(storages()), "nothing holds the memory of gradients that were forgotten"


def test_forgotten_gradients_are_gone():
    run_ranks(forgotten, 2)
