"""What the cost model alone says of steps that `hocket bench` has measured. From kept results, without a GPU.

    python -m benchmarks.model_steps

Every kept result with a step of hocket's own, or with one without communication, whose settings today's planner can
resolve. Compute is compared with steps without any communication: the bound of a plain stack, and hocket's own programs
on the null transport. Steps are compared as they were issued, or replayed; those of `hocket.fully_shard` with the plan
of the same settings. Prints a line per step.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contender_tables import tokens_of
from benchmarks.markdown import Result
from benchmarks.record import RESULTS
from benchmarks.stored import config_of, put
from hocket.config import COPIED
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import program_of
from hocket.predict.cost import CostTable, costs_of, overheads_of
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import Overheads, Timeline, simulate
from hocket.program.ops import Program
from hocket.resolve import Settings, resolve

OTHER_KERNELS = ("dense_peers", "fsdp_steps", "fsdp_adamw_compiled")
"""Results of a time when the layers were torch's operations, and of compiled layers."""
LATE = 0.85
"""Share of a step that its host takes from which on the host may decide over a step without communication."""
SHARDED = {
    "fully_shard": {},
    "fully_shard_ce": {"train.transport": "copy_engine"},
    "fully_shard_optim": {"overlap.dp.strategy": "optim"},
    "fully_shard_optim_ce": {"overlap.dp.strategy": "optim", "train.transport": "copy_engine"},
}
"""Contenders without a plan -> what is set for the plan that does the same."""
_ITEM = re.compile(r"([\w.]+) = (\([^)]*\)|[^,]*)(?:, |$)")


@dataclass(frozen=True)
class Measured:
    """A step of one contender, as it was measured, and the settings of the plan that does the same."""

    preset: str
    workload: Result
    name: str
    settings: Settings

    @property
    def row(self) -> Result:
        return self.workload["contenders"][self.name]

    @property
    def seconds(self) -> float:
        return self.row["seconds"]

    @property
    def clock(self) -> float:
        """In Hz, the median of its blocks."""
        return 1e6 * statistics.median(block["clock_mhz"] for block in self.row["blocks"])

    @property
    def words(self) -> str:
        even = ", even routing" if self.settings.model.routing == "even" else ""
        return f"{self.preset}, {self.settings.world} GPUs, {tokens_of(self.workload)} tokens{even}: {self.name}"

    @property
    def communicates(self) -> bool:
        """Or else it is a step without communication."""
        return _plan(self.row) or self.name in SHARDED


def kept(folder: Path = RESULTS) -> list[Result]:
    """All results of `hocket bench` with the kernels of now."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem not in OTHER_KERNELS]
    return [result for result in (json.loads(path.read_text()) for path in paths) if "workloads" in result]


def measured(results: Iterable[Result]) -> Iterator[Measured]:
    """Every step of some results that can be compared: not those of documents, whose lengths no record has, nor those
    of a single block, which say nothing of how sure they are."""
    for result in results:
        words = shlex.split(result["command"])
        preset = words[words.index("benchmarks.baselines") + 1]
        for workload in result["workloads"]:
            if workload["config"]["data"].get("packing", "off") != "off":
                continue
            for name, row in workload["contenders"].items():
                known = name in SHARDED or name.startswith("bound") or "null" in name or _plan(row)
                if known and len(row["blocks"]) > 1:
                    yield Measured(preset, workload, name, settings_of(workload, name))


def settings_of(workload: Result, name: str) -> Settings:
    """The settings of the plan that does what a contender did. Those that it had of its own are in its record."""
    row, tree = workload["contenders"][name], copy.deepcopy(dict(workload["config"]))
    for section in ("plan", "overlap", "precision") if _plan(row) else ():
        for setting, value in _ITEM.findall(row["settings"].get(section, "")):
            put(tree, f"{section}.{setting}", _value(value))
    put(tree, "train.transport", row["settings"]["transport"] if _plan(row) else "nccl")
    put(tree, "run.folder", f"runs/{tree['run']['name']}")
    config = changed(config_of(tree), SHARDED.get(name, {}))
    return resolve(config, Host(gpus=config.mesh.world))


def _plan(row: Result) -> bool:
    """Whether a contender ran a plan, with communication."""
    return "plan" in row["settings"] and row["settings"]["transport"] in ("nccl", *COPIED)


def _value(text: str) -> Any:
    """A setting as it was printed."""
    if text.startswith("("):
        return tuple(_value(item.strip().strip("'")) for item in text[1:-1].split(",") if item.strip())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@dataclass(frozen=True)
class Modelled:
    """What the cost model says of such a step."""

    program: Program
    costs: CostTable
    timeline: Timeline

    @classmethod
    def of(cls, settings: Settings, updates: bool = True, issued: bool = True) -> Modelled:
        """A step; without updates, or of a host that is never late, where that is said."""
        hardware = hardware_of(settings)
        program, costs = program_of(settings), costs_of(settings, hardware)
        if not updates:
            none = {
                key: replace(cost, seconds=0.0) for key, cost in costs.table.items() if key[0] in ("step", "update")
            }
            costs = replace(costs, table={**costs.table, **none})
        overheads = overheads_of(settings, hardware, costs.table)
        return cls(program, costs, simulate(program, costs, overheads if issued else Overheads(overheads.contention)))

    @property
    def seconds(self) -> float:
        return float(self.timeline.makespan)

    @property
    def compute(self) -> float:
        """Seconds of compute of the pipeline rank that has most of it, with nothing beside it."""
        return max(
            sum(float(self.costs.of(op).seconds) for op in ops if op.lane == "compute" and op.verb != "release")
            for ops in self.program.ranks
        )

    @property
    def needs(self) -> int:
        """Bytes that the rank with the most needs beside weights, optimizer and slots."""
        ranks = enumerate(self.timeline.ranks)
        return max(use.peak_bytes - self.costs.fixed_bytes(self.program, rank) for rank, use in ranks)


def modelled(step: Measured) -> Modelled:
    """The same step by the cost model. Few calls issue a layer of a sharded module: its host was never late."""
    return Modelled.of(step.settings, step.workload["optimizer"], step.name not in SHARDED)


def host_was_late(step: Measured) -> bool:
    """Whether the host may have decided over a step without communication, which is compared with compute alone."""
    return (step.row.get("host_seconds") or 0.0) > LATE * step.seconds


def main() -> None:
    for step in measured(kept()):
        found = modelled(step)
        if step.communicates:
            ratio = f"step    {1e3 * found.seconds:7.1f} ms {step.seconds / found.seconds:6.3f}"
        else:
            late = "  (its host was late)" if host_was_late(step) else ""
            clocks = f"{found.costs.clock / 1e9:.2f} GHz, was {step.clock / 1e9:.2f}"
            ratio = f"compute {1e3 * found.compute:7.1f} ms {step.seconds / found.compute:6.3f}  {clocks}{late}"
        print(f"{step.words:64} measured {1e3 * step.seconds:7.1f} ms  predicted {ratio}")


if __name__ == "__main__":
    main()
