"""Draws a step of a sharded model from the record of a real one: what was issued, and what waits for what.

    python -m benchmarks.shard_step --microbatches 2 --strategy optim

Ranks are processes on this CPU. The record (`benchmarks/history.py`) has no times, so an order is all that comes
from it: everything begins as soon as what it comes behind is over, and lasts as many characters as `LENGTHS` says.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch.distributed.device_mesh import init_device_mesh

import hocket
from benchmarks.history import CALLER, Entry, History, record
from tests.fsdp.noted import ROWS, WIDTH, Model, Noted
from tests.helpers.ranks import run_ranks

LENGTHS = {"F": 3, "B": 6, "S": 2, "g": 2, "r": 2, "o": 2}
"""Characters of a forward, a backward, the optimizer, a gather, a reduction, and an exchange between replicas."""
LETTERS = {"gather": "g", "reduce": "r", "outer": "o"}


@dataclass(frozen=True)
class Step:
    """Which step is drawn."""

    units: int = 4
    microbatches: int = 2
    strategy: str = "optim_grads_params"
    prefetch: int = 1
    replicas: int = 1
    """Ranks of the outer axis; 1 is a mesh of one axis."""
    accumulating: bool = False
    """Whether all microbatches but the last are inside of `ctx.accumulating()`."""
    by_unit: bool = False
    """Whether units are updated one by one, with `hocket.sharding.step_and_gather`."""


def recorded(rank: int, step: Step) -> History:
    """The history of one step, after one that is not recorded."""
    mesh = init_device_mesh("cpu", (step.replicas, 2)) if step.replicas > 1 else None
    model = Model(step.units)
    options = hocket.ShardOptions(prefetch=step.prefetch)
    ctx = hocket.fully_shard(model, units=Noted, mesh=mesh, strategy=step.strategy, options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    history = History()

    def updated(one: torch.optim.Optimizer, *_: object) -> None:
        first = one.param_groups[0]["params"][0]
        history.note(f"S {first.full_name.split('.')[1]}" if step.by_unit else "S")

    optimizer.register_step_post_hook(updated)
    for _ in range(2):
        history = record(ctx)
        model.log[:] = [history]
        for i in range(step.microbatches):
            x = torch.ones(ROWS, WIDTH, requires_grad=True)
            if step.accumulating and i < step.microbatches - 1:
                with ctx.accumulating():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        hocket.sharding.step_and_gather(ctx, optimizer) if step.by_unit else optimizer.step()
        optimizer.zero_grad()
    return history


def bars(history: History) -> dict[str, list[tuple[int, int, str]]]:
    """Row -> what is on it: (begin, end, label)."""
    rows: dict[str, list[tuple[int, int, str]]] = {"compute": [], **{row: [] for row in LETTERS}}
    ends: dict[int, int] = {}
    for entry in history.entries:
        begin = max((end for i, end in ends.items() if history.before(history.entries[i], entry)), default=0)
        row, label = _label(entry)
        ends[entry.index] = end = begin + (LENGTHS[label[0]] if label else 0)
        if label:
            rows[row].append((begin, end, label))
    return {row: found for row, found in rows.items() if found}


def _label(entry: Entry) -> tuple[str, str]:
    """(row, what is written on it) of what takes time; the label of anything else is empty."""
    kind, _, rest = entry.name.partition(" ")
    if entry.queue == CALLER:
        return "compute", f"{kind}{rest}" if kind in LENGTHS else ""
    return entry.queue, f"{LETTERS[kind]}{rest.removeprefix('layers.')}" if kind in LETTERS else ""


def draw(rows: Mapping[str, Sequence[tuple[int, int, str]]]) -> str:
    """A line per row; on the first one, dots are time in which nothing is computed."""
    width = max(end for found in rows.values() for _, end, _ in found)
    lines = []
    for row, found in rows.items():
        line = ["·" if row == "compute" else " "] * width
        for begin, end, label in found:
            line[begin:end] = label.ljust(end - begin, "-")
        lines.append(f"{row:9}{''.join(line).rstrip()}")
    return "\n".join(lines)


def drawn(words: str) -> str:
    """The drawing for the words of a command line."""
    step = tyro.cli(Step, args=shlex.split(words))
    histories: list[Any] = run_ranks(recorded, 2 * step.replicas, step)
    rows = [bars(history) for history in histories]
    assert all(one == rows[0] for one in rows), "ranks do different things"
    return draw(rows[0])


if __name__ == "__main__":
    import sys

    print(drawn(shlex.join(sys.argv[1:])))
