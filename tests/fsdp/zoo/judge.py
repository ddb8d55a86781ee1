"""Runs programs of the zoo on two ranks or more, and says of each form whether it was right.

Note: [What is said]
`bits`     losses, weights and all that the program notes are the plain run's, bit for bit
`right`    the same within the tolerance of fp32
`refused`  an error that names the problem, before the first step of an optimizer
`wrong`    something differs
`failed`   an error later than that, or one that is nobody's refusal
`hangs`    no end in time
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.fsdp.zoo.program import PROGRAMS, Form, Program, Run
from tests.helpers.ranks import RanksTimeout, run_ranks

FILES = ("language", "idioms", "loops", "weights", "packages", "meshes", "habits")
"""Where programs are."""

SECONDS = 40.0
"""A program that takes longer hangs."""


def programs(*files: str) -> dict[str, Program]:
    """The programs of some files, or all, by name; those of packages that are not here are left out."""
    for file in FILES:
        importlib.import_module(f"tests.fsdp.zoo.{file}")
    modules = {f"tests.fsdp.zoo.{file}" for file in files or FILES}
    return {name: one for name, one in PROGRAMS.items() if not missing(one) and one.train.__module__ in modules}


def missing(program: Program) -> list[str]:
    """The packages that a program lacks."""
    return [package for package in program.needs if importlib.util.find_spec(package) is None]


@dataclass
class Verdict:
    """What is said of one form of a program. See Note: [What is said]."""

    kind: str
    why: str = ""

    @property
    def good(self) -> bool:
        return self.kind in ("bits", "right")


_steps = 0


def _count(*_: Any) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count)


def run(program: Program, form: Form, rank: int, world: int) -> tuple[Run, Verdict | None]:
    """Run a program; a verdict if it raised something."""
    global _steps
    _steps = 0
    torch.manual_seed(0)
    made = Run(form, rank, world)
    try:
        program.train(made)
    except Exception as error:
        return made, _blame(error, form)
    return made, None


def _blame(error: Exception, form: Form) -> Verdict:
    lines = str(error).strip().splitlines() or [""]
    why = f"{type(error).__name__}: {lines[0]}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = form == "fsdp2" or (isinstance(error, ValueError) and f"{os.sep}hocket{os.sep}" in frame.filename)
    if said and not _steps:
        return Verdict("refused", why)
    return Verdict("failed", f"{why} ({Path(frame.filename).name}:{frame.lineno}, after {_steps} steps)")


def compare(plain: Run, other: Run, off: float = 2e-5) -> Verdict:
    """Whether a run has found what the plain one has."""
    names = [f"loss {i}" for i in range(len(plain.losses))] + list(plain.noted)
    wanted = dict(zip(names, [*plain.losses, *plain.noted.values()], strict=True))
    found = {**{f"loss {i}": loss for i, loss in enumerate(other.losses)}, **other.noted}
    if list(wanted) != list(found):
        return Verdict("wrong", f"notes {sorted(set(wanted) ^ set(found))[:4]} are on one side only")
    exact, worst, where = True, 0.0, ""
    for name, value in wanted.items():
        ours = found[name]
        if ours.shape != value.shape or ours.dtype != value.dtype:
            return Verdict(
                "wrong", f"{name} is {tuple(ours.shape)} {ours.dtype}, not {tuple(value.shape)} {value.dtype}"
            )
        exact &= torch.equal(ours, value)
        if not torch.allclose(ours, value, rtol=2e-4, atol=off):
            differs = float((ours - value).abs().max())
            if not differs <= worst:
                worst, where = differs, name
    if where:
        return Verdict("wrong", f"{where} differs by {worst:.3g}")
    return Verdict("bits" if exact else "right")


def _agree(rank: int, key: str, mine: Verdict, seconds: float = SECONDS) -> Verdict:
    """The worse of both ranks' verdicts. Not by a collective: a rank may hang in one."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{rank}", json.dumps(asdict(mine)))
    others = []
    for other in range(dist.get_world_size()):
        store.wait([f"{key}/{other}"], timedelta(seconds=seconds))
        others.append(Verdict(**json.loads(store.get(f"{key}/{other}"))))
    order = ("hangs", "failed", "wrong", "refused", "right", "bits")
    return min(others, key=lambda one: order.index(one.kind))


def judge_on_rank(rank: int, left: Sequence[tuple[str, Form]], folder: str) -> None:
    """Judge forms of programs one after the other; a line for each in the folder, until one leaves something behind."""
    known, world = programs(), dist.get_world_size()
    plain: dict[str, tuple[Run, Verdict | None]] = {}
    for name, form in left:
        if name not in plain:
            plain = {name: run(known[name], "plain", rank, world)}
        wanted, error = plain[name]
        if error is None:
            found, error = run(known[name], form, rank, world)
            verdict = _agree(rank, f"{name}/{form}", error or compare(wanted, found, known[name].off))
            del found
        else:
            verdict = Verdict("failed", f"the plain run: {error.why}")
        gc.collect()
        with Path(folder, f"judged{rank}").open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")
        if verdict.kind in ("failed", "wrong") or (form == "fsdp2" and not verdict.good):
            return  # what it has left may harm the next one


def judge(names: Sequence[str], forms: Sequence[Form]) -> dict[str, dict[str, Verdict]]:
    """Judge programs on as many ranks as each needs."""
    known, found = programs(), dict[str, dict[str, Verdict]]()
    for world in sorted({known[name].world for name in names}):
        found |= _judge([name for name in names if known[name].world == world], forms, world)
    return found


def _judge(names: Sequence[str], forms: Sequence[Form], world: int) -> dict[str, dict[str, Verdict]]:
    """On ranks of their own: as many after each other as go well, then the rest on new ones."""
    left: list[tuple[str, Form]] = [(name, form) for name in names for form in forms]
    found: dict[str, dict[str, Verdict]] = {name: {} for name in names}
    while left:
        error: Exception | None = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(judge_on_rank, world, left, folder, timeout=SECONDS + 4.0 * len(left))
            except Exception as raised:
                error = raised
            path = Path(folder, "judged0")
            said = [Verdict(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
        if error is not None and len(said) < len(left):
            hangs = isinstance(error, RanksTimeout) or "ait timeout" in str(error)
            said.append(Verdict("hangs" if hangs else "failed", str(error).splitlines()[0]))
        for (name, form), verdict in zip(left, said, strict=False):
            found[name][form] = verdict
        left = left[len(said) :]
    return found
