"""Result files that are continued, and measurements that end in time."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.measure import Block
from benchmarks.bench.resumed import has, read, sections
from benchmarks.bench.run import Bench, Session
from benchmarks.bench.workload import Workload
from benchmarks.record import RESULTS
from benchmarks.tables import origin
from tests.bench.setup import CPU, workload
from tests.helpers.ranks import run_ranks

WORKLOAD = workload(2)


def entry(work: Workload, **other: Any) -> dict[str, Any]:
    """A workload as a result file has it: two rounds of one contender."""
    found = {"config": sections(work.config), "optimizer": True, "compile": False, "complete": True}
    return {**found, "contenders": {"hocket": {"blocks": [{}, {}]}}, **other}


def written(path: Path, *workloads: dict[str, Any]) -> str:
    path.write_text(json.dumps({"commit": "old", "blocks": 2, "workloads": workloads}))
    return str(path)


def test_what_has_been_measured_whole_is_not_measured_again(tmp_path: Path) -> None:
    (former,) = read(written(tmp_path / "a.json", entry(WORKLOAD)), WORKLOAD.config)
    assert former["origin"] == {"commit": "old"}, "that of the file"
    assert has([former], WORKLOAD, ["hocket"], 2)
    assert not has([], WORKLOAD, ["hocket"], 2)
    assert not has([{**former, "complete": False}], WORKLOAD, ["hocket"], 2)
    assert not has([former], WORKLOAD, ["hocket"], 3)
    assert not has([former], WORKLOAD, ["hocket", "bound"], 2)
    assert not has([former], dataclasses.replace(WORKLOAD, optimizer=False), ["hocket"], 2)
    assert not has([former], workload(2, microbatches=4), ["hocket"], 2)


def test_files_that_cannot_be_continued_are_refused(tmp_path: Path) -> None:
    assert read(str(tmp_path / "none.json"), WORKLOAD.config) == ()
    path, messages = tmp_path / "a.json", {}
    messages["no result of hocket bench"] = ["{", "[]", "{}", '{"workloads": [{}]}', '{"workloads": 3}']
    other, same = entry(workload(2, moe=True)), entry(WORKLOAD)
    messages["another model"] = [json.dumps({"workloads": [other]})]
    messages["several workloads of one length"] = [json.dumps({"workloads": [same, same]})]
    for message, texts in messages.items():
        for text in texts:
            path.write_text(text)
            with pytest.raises(ValueError, match=rf"^out = \S+a.json \(command line, --out\): .*{message}.*; fix: "):
                read(str(path), WORKLOAD.config)


def test_results_of_this_repository_can_be_continued() -> None:
    for name in ("fsdp", "everything"):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        with pytest.raises(ValueError, match="measured with another model"):
            read(str(RESULTS / f"{name}.json"), WORKLOAD.config)
        assert origin([result]).count(result["commit"]) == 1


def test_a_table_names_every_run_behind_it() -> None:
    versions = {"python": "3.12", "torch": "2.11", "nccl": "none"}
    runs = [dict(hardware="4 x X", versions=versions, commit=name, command=f"bench {name}") for name in ("one", "two")]
    runs[1]["date"] = "2026-11-21"
    result = {**runs[1], "workloads": [{"origin": runs[0]}, {"origin": runs[1]}, {"origin": runs[1]}]}
    lines = origin([result]).splitlines()
    assert lines == [
        "4 x X, Python 3.12, torch 2.11, commit `one`: `bench one`",
        "4 x X, Python 3.12, torch 2.11, commit `two`, 2026-11-21: `bench two`",
    ]


def rounds_in_time(rank: int) -> list[int]:
    """How many of three rounds run in three lengths of time; rank 1 has the least."""
    counts = []
    for seconds in (math.inf, 60.0, 0.0):
        until = time.monotonic() + (seconds if rank else math.inf)
        session = Session(Bench((), (), blocks=3, until=until), rank, CPU, lambda text: None)
        counts.append(len(list(session.in_time(three()))))
    return counts


def three() -> Generator[dict[str, Block], None, None]:
    yield from ({} for _ in range(3))


def test_no_round_begins_when_the_time_is_up() -> None:
    assert run_ranks(rounds_in_time, 2) == [[3, 3, 1]] * 2
