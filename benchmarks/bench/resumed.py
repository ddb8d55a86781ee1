"""Continuing a result file: which of its workloads stay, and which need not be measured again.

A file has one workload per sequence length, each with the origin of the run that measured it. Ratios are of contenders
that took turns, so a workload is measured by one run: one that was interrupted is measured again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.config import Config
from hocket.config.rule import problem

if TYPE_CHECKING:
    from benchmarks.bench.workload import Workload

Former = Mapping[str, Any]
"""A workload, as a result file has it."""
FIX = "another file, or leave out --resume, which writes a new one"


def read(out: str, config: Config) -> tuple[Former, ...]:
    """The workloads of a result file; none if there is no such file.

    Raises ValueError if it is no result of `hocket bench`, or of another model or mesh.
    """
    where = {"out": "command line, --out"}
    try:
        result = json.loads(Path(out).read_text())
        found = [{"origin": origin_of(result), **workload} for workload in result["workloads"]]
        lengths = [length(workload) for workload in found]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(problem("out", out, where, "holds no result of hocket bench", FIX)) from None
    if len(set(lengths)) < len(lengths):
        raise ValueError(problem("out", out, where, "has several workloads of one length", FIX))
    wanted = sections(config)
    for name in ("model", "mesh"):
        if any(workload["config"].get(name) != wanted[name] for workload in found):
            raise ValueError(problem("out", out, where, f"holds what was measured with another {name}", FIX))
    return tuple(found)


def length(workload: Former) -> int:
    """Its sequence length."""
    return workload["config"]["data"]["sequence_length"]


def origin_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Of a file's workloads that have none of their own: files were written by one run once."""
    return {key: value for key, value in result.items() if key not in ("workloads", "blocks", "steps")}


def sections(config: Config) -> dict[str, Any]:
    """A configuration as a result file has it, without what only says where a run keeps its files."""
    found = {f.name: dataclasses.asdict(getattr(config, f.name)) for f in dataclasses.fields(Config) if f.name != "run"}
    return json.loads(json.dumps(found))


def has(former: Sequence[Former], workload: Workload, names: Sequence[str], blocks: int) -> bool:
    """Whether a workload has been measured whole, with these contenders and blocks; by which commit does not matter."""
    wanted = sections(workload.config)
    return any(
        {name: section for name, section in each["config"].items() if name != "run"} == wanted
        and (each["optimizer"], each["compile"]) == (workload.optimizer, workload.compile)
        and each.get("complete", True)
        and list(each["contenders"]) == list(names)
        and all(len(row["blocks"]) >= blocks for row in each["contenders"].values())
        for each in former
    )
