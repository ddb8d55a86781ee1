"""Splits that no host knows: rows arrive grouped by expert, in room of a fixed size, and what finds none is noticed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.config import Config
from hocket.config.schema import changed
from hocket.engine import Engine
from hocket.engine.experts import Held, RowRoom
from hocket.layers.dispatch import exchange_counts, group_rows, place_counts
from hocket.layers.routing import Routing
from hocket.model.documents import Microbatch
from hocket.predict.arrivals import overflow_note, rows_allowed, rows_at_most, rows_evenly, rows_grown
from hocket.predict.cost import costs_of
from hocket.predict.hardware import LAPTOP
from hocket.program.mesh import Mesh
from hocket.recipes import recipe
from hocket.resolve import resolve
from hocket.runtime.blocks import Room
from hocket.runtime.comm import CommOptions, make_groups
from hocket.runtime.shared_memory import refuse
from hocket.train.trainer import Trainer
from tests.helpers.parity import config
from tests.helpers.plans import planned
from tests.helpers.ranks import run_ranks
from tests.reference import random_batches

CPU = torch.device("cpu")
WORLD, LOCAL, TOKENS, WIDTH = 3, 2, 10, 4
LOADS = ["even", "one expert", "one rank", "nothing to one"]


def chosen(load: str, rank: int) -> Tensor:
    """The expert of each of a rank's tokens, in order."""
    generator = torch.Generator().manual_seed(rank)
    expert = torch.randint(WORLD * LOCAL, (TOKENS,), generator=generator)
    expert = {"one expert": expert * 0 + 3, "one rank": expert % LOCAL, "nothing to one": expert % 4}.get(load, expert)
    return expert.sort().values


def there_and_back(rank: int, capacity: int) -> list[tuple[bool, int]]:
    """For every load: whether rows came to their experts and back as with splits that the host knows; and the need."""
    group = make_groups(Mesh(dp=WORLD, ep=WORLD), rank, CPU, "gloo", CommOptions(device_splits=True)).a2a
    results = []
    for load in LOADS:
        expert = chosen(load, rank)
        routing = Routing(torch.arange(TOKENS), expert.bincount(minlength=WORLD * LOCAL), TOKENS, 1)
        rows = 100.0 * rank + torch.arange(float(TOKENS * WIDTH)).view(TOKENS, WIDTH)
        known = exchange_counts(routing, group)
        wanted = rows.new_empty(known.table.room, WIDTH)
        group.all_to_all(wanted, rows, known.table).wait()
        wanted = group_rows(wanted, known)[:capacity]

        room = Room(capacity, torch.zeros(1, dtype=torch.int64))
        placed = place_counts(routing, group, room)
        out = rows.new_full((placed.table.room, WIDTH), -1.0)
        group.all_to_all(out, rows, placed.table).wait()
        same = torch.equal(out[: len(wanted)], wanted) and bool((out[len(wanted) :] == -1).all())
        same = same and int(placed.count) == len(wanted) and group_rows(out, placed) is out  # pyrefly: ignore
        same = same and torch.equal(placed.offsets_L, known.offsets_L.clamp(max=capacity))
        returned = rows.new_full((placed.table.back.room, WIDTH), -1.0)
        group.all_to_all(returned, out, placed.table.back).wait()
        lost = (returned == -1).all(1)
        same = same and torch.equal(returned[~lost], rows[~lost])
        assert same, f"{load}: {out}, wanted {wanted}"
        results.append((bool(lost.any()), int(room.needed)))
    return results


@pytest.mark.parametrize("capacity", [WORLD * TOKENS, 11])
def test_rows_reach_their_experts_and_return(capacity: int) -> None:
    ranks = run_ranks(there_and_back, WORLD, capacity)
    counts = {load: [chosen(load, r).bincount(minlength=WORLD * LOCAL) for r in range(WORLD)] for load in LOADS}
    for i, load in enumerate(LOADS):
        most = int(torch.stack(counts[load]).sum(0).view(WORLD, LOCAL).sum(1).max())
        assert [result[i][1] for result in ranks] == [most] * WORLD
        assert any(result[i][0] for result in ranks) == (most > capacity)


PLACED = config(
    dict(layers=2, experts=8, top_k=2), dict(dp=2, ep=2), dict(merge="on", splits="device", room=1.0), 2, "fp32"
)


def steps(
    rank: int, c: Config, full: tuple[bool, bool] = (False, False)
) -> tuple[list[int], list[float], list[Tensor]]:
    """Rows that lacked room in each of two steps and in a validation, losses and norms, weights."""
    engine = Engine(c, rank, CPU)
    engine.room.measure = lambda: Held(100, 40, 90) if full[rank] else None
    engine.init_weights()
    batches = [[Microbatch(*b[rank]) for b in step] for step in random_batches(c.model, 2, 2, c.mesh.dp, (2, 8))]
    results = [engine.train_step(step, 1e-2) for step in batches]
    lacked = [result.lacked for result in results]
    numbers = [float(number) for result in results for number in (result.loss, result.grad_norm)]
    numbers.append(float(engine.evaluate(batches[0])))
    engine.assert_clean()
    lacked.append(engine.room.lacked)
    assert [result.grown for result in results] == [bool(n) and engine.room.now is not None for n in lacked[:2]]
    if engine.room.now is not None:
        assert engine.room.now.capacity == rows_grown(c, max(lacked))
    loads = [load.clone() for load in results[-1].loads.values()]
    weights = [unit.group.main.clone() for unit in engine.sharded.units.values()]
    return lacked, numbers, [*loads, *weights]


@pytest.mark.parametrize("merge", ["on", "off"])
def test_a_step_whose_rows_find_no_room_is_made_again(merge: str) -> None:
    """It gives the bits of splits that the host knows, and says how many rows lacked room."""
    c = planned(PLACED, merge=merge)
    host = planned(c, splits="host")
    placed, known = run_ranks(steps, 2, c), run_ranks(steps, 2, host)
    assert placed[0][0] == placed[1][0]
    room = rows_allowed(c)
    for lacked in placed[0][0]:
        assert not lacked or room < lacked <= 64, "there is more room from then on"
        room = rows_grown(c, lacked) if lacked else room
    assert placed[0][0][0]
    for (_, numbers, tensors), (lacked, wanted_numbers, wanted) in zip(placed, known, strict=True):
        assert not any(lacked)
        assert numbers == wanted_numbers
        assert all(map(torch.equal, tensors, wanted))


def looks(rank: int) -> None:
    """Only rank 1 sees rows that find no room."""
    groups = make_groups(Mesh(dp=2, ep=2), rank, CPU, "gloo", CommOptions(device_splits=True))
    room = RowRoom(PLACED, groups, CPU)
    before = room.now
    assert before is not None
    assert room.check_overflow() == 0
    before.needed.fill_(40 * rank)
    assert (room.check_overflow(), room.check_overflow()) == (40, 0), "what was looked at is forgotten"
    before.needed.fill_(40)
    room.forget()
    assert room.check_overflow() == 0

    before.needed.fill_(40 * rank)
    room.check_overflow()
    with pytest.raises(ZeroDivisionError):
        room.rerun(lambda: 1 // 0)
    assert room.now is before
    before.needed.fill_(40 * rank)
    room.check_overflow()
    assert room.rerun(lambda: room.now) is None
    assert room.lacked == 40
    assert room.now is not None
    assert room.now.capacity == rows_grown(PLACED, 40)


def test_all_ranks_see_that_rows_of_one_find_no_room() -> None:
    run_ranks(looks, 2)


def interrupted(rank: int, c: Config) -> int:
    """Rows that lacked room in a step behind an interrupted one that lacked some."""
    engine = Engine(c, rank, CPU)
    engine.init_weights()
    assert engine.room.now is not None
    engine.room.now.needed.fill_(rows_at_most(c))
    engine.abort()
    (step,) = random_batches(c.model, 1, 2, c.mesh.dp, (2, 8))
    return engine.train_step([Microbatch(*b[rank]) for b in step], 1e-2).lacked


def test_what_an_interrupted_step_needed_is_forgotten() -> None:
    assert run_ranks(interrupted, 2, planned(PLACED, room=1.9)) == [0, 0]


def test_a_user_is_told_how_much_room_there_is() -> None:
    assert overflow_note(PLACED, 40, grown=True) == (
        "made twice, since 1.25 times the rows of an even load came to one rank in a layer; "
        "there is room for 1.56 times from now on (overlap.ep.room = 1)"
    )
    assert "room for 1.56 times does not fit" in overflow_note(PLACED, 40, grown=False)
    assert rows_grown(PLACED, 60) == rows_at_most(PLACED)


def test_where_more_room_does_not_fit_on_one_rank_the_hosts_of_all_know_splits_from_then_on() -> None:
    (lacked, *found), _ = run_ranks(steps, 2, PLACED, (False, True))
    (_, *wanted), _ = run_ranks(steps, 2, planned(PLACED, splits="host"))
    assert lacked[0], "the first step is made again"
    assert not any(lacked[1:])
    assert found[0] == wanted[0]
    assert all(map(torch.equal, found[1], wanted[1]))


def test_more_room_fits_where_a_step_as_measured_would() -> None:
    held = Held(usable=100, at_rest=40, at_most=60)
    assert held.fits(2.0, 15)
    assert not held.fits(2.0, 16), "the allocator needs some"
    assert not held.fits(2.8, 0)


def test_ranks_that_cannot_reach_each_other_are_refused() -> None:
    said = "overlap.ep.splits = device", "overlap.ep.splits = host"
    refuse([("a", ""), ("a", "")], *said)
    with pytest.raises(ValueError, match=r"overlap.ep.splits = device: .* on 2 hosts.*; fix: overlap.ep.splits = host"):
        refuse([("a", ""), ("b", "")], *said)
    with pytest.raises(ValueError, match="GPU 0 cannot reach"):
        refuse([("a", ""), ("a", "GPU 0 cannot reach the memory of GPU 1")], *said)


def test_no_rank_ever_gets_more_than_all_rows() -> None:
    """With four experts on each of two ranks all tokens may go to one; with one on each, half of the rows at most."""
    assert rows_at_most(PLACED) == 2 * 2 * 8 * 2
    few = dataclasses.replace(PLACED, model=dataclasses.replace(PLACED.model, experts=2))
    assert rows_at_most(few) == 2 * 8 * 2
    assert rows_allowed(few) == rows_at_most(few)
    wide = planned(PLACED, room=9.0)
    assert rows_allowed(wide) == rows_at_most(wide)
    assert rows_allowed(PLACED) == 2 * 8 * 2


def pretended(rank: int, c: Config) -> list[float]:
    engine = Engine(c, rank, CPU)
    engine.init_weights()
    (batches,) = random_batches(c.model, 1, c.train.microbatches, c.mesh.dp, (2, 8))
    return [float(engine.train_step([Microbatch(*b[rank]) for b in batches], 1.0).grad_norm) for _ in range(2)]


def test_the_bound_runs_without_the_hosts_counts_too() -> None:
    c = planned(dataclasses.replace(PLACED, train=dataclasses.replace(PLACED.train, transport="null")), room=2.0)
    for first, second in run_ranks(pretended, 2, c):
        assert 0 < first < float("inf")
        assert first == second, "frozen, and always the same rows"


def test_room_for_more_rows_takes_memory_and_no_time() -> None:
    host, device = (costs_of(planned(PLACED, splits=splits, room=1.5), LAPTOP) for splits in ("host", "device"))
    for key, cost in host.table.items():
        other = device.table[key]
        assert (other.seconds, other.wire_bytes) == (cost.seconds, cost.wire_bytes)
        roomy = key[:2] in (("fwd", "dispatch"), ("bwd", "combine"), ("fwd", "experts"), ("bwd", "experts"))
        assert other.output_bytes == pytest.approx((1.5 if roomy else 1) * cost.output_bytes, abs=1)
        arrived = {("fwd", "experts"): 1, ("bwd", "experts"): 2}.get(key[:2], 0)  # tensors that exchanges keep
        saved = cost.saved_bytes - arrived * rows_evenly(PLACED) * PLACED.model.hidden * PLACED.element_bytes
        assert other.saved_bytes == pytest.approx((1.5 if roomy else 1) * saved, abs=1)


class Lacking:
    """An engine whose second validation of three finds too little room."""

    def __init__(self) -> None:
        self.room, self._ran = SimpleNamespace(lacked=0, now=object()), 0
        self.learnt = torch.tensor(8)

    def evaluate(self, microbatches: object) -> Tensor:
        self._ran += 1
        self.room.lacked = 40 if self._ran == 2 else 0
        return torch.tensor(float(self._ran))

    def agree(self, loss: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=float(loss))


def test_a_validation_that_is_made_again_is_told_like_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    said, trainer = list[str](), Trainer.__new__(Trainer)
    engine: Any = Lacking()
    trainer.settings, trainer.engine = resolve(changed(recipe("tiny"), {"train.eval_batches": 3})), engine
    monkeypatch.setattr(trainer, "_microbatches", lambda *_: [])
    metrics: Any = SimpleNamespace(say=said.append)
    stream: Any = SimpleNamespace(batches=lambda sequences: 3)
    assert trainer._evaluate(stream, metrics) == (2.0, 24)
    assert said == [f"validation 2 {overflow_note(trainer.settings, 40, grown=True)}"]
