"""The small trace for other viewers."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hocket_trace.exposure import report
from hocket_trace.perfetto import filtered
from tests.trace.reports import busy
from tests.trace.test_picture import STEPS, toy


def events(data: bytes) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(data))["traceEvents"]


def test_every_activity_is_there_once_on_its_lane() -> None:
    found = events(filtered([toy()]))
    lanes = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert lanes == {1: "steps", 2: "exposed", 3: "idle", 10: "compute", 11: "gather", 12: "stream 20"}
    order = {e["tid"]: e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"}
    assert sorted(order, key=order.__getitem__) == [1, 2, 3, 10, 11, 12]
    ran = [(lanes[e["tid"]], e["ts"], e["dur"], e["cat"], e["name"]) for e in found if e["ph"] == "X"]
    assert ran[:4] == [
        ("compute", 0, 40_000, "compute", "fwd attn m0 c0 l0"),
        ("compute", 60_000, 20_000, "compute", "bwd attn m0 c0 l0"),
        ("gather", 20_000, 40_000, "gather", "gather dense t0 c0 l1"),
        ("stream 20", 85_000, 5_000, "compute", "aten::copy"),
    ]
    gather = next(e for e in found if e["cat" if "cat" in e else "ph"] == "gather")
    assert gather["args"] == {
        "op": "gather dense t0 c0 l1",
        "launcher": "nccl:all_gather",
        "kernel": "all_gather",
        "group": "group of gather",
        "layer": 1,
        "bytes": pytest.approx(4e6),
        "bandwidth_gb_per_second": 0.1,
        "launched_before_us": 1000,
    }


def test_exposed_and_idle_time_have_tracks_of_their_own() -> None:
    found = [e for e in events(filtered([toy()])) if e["ph"] == "X" and e["tid"] < 10]
    assert [(e["name"], e["ts"], e["dur"]) for e in found] == [
        ("step 3", 0, 100_000),
        ("exposed", 40_000, 20_000),
        ("late", 80_000, 4_000),
        ("idle", 84_000, 1_000),
    ]
    assert STEPS[0].number == 3


def test_tracks_hold_the_time_of_the_report() -> None:
    ranks = [busy(300, rank=rank, world=2) for rank in range(2)]
    found = events(filtered(ranks))
    for rank in range(2):
        seconds = sum(e["dur"] for e in found if e["ph"] == "X" and e["pid"] == rank and e["name"] == "exposed") / 1e6
        told = sum(step.exposed for step in report(ranks).steps if step.rank == rank)
        assert seconds == pytest.approx(told, abs=1e-6)
        activities = sum(1 for e in found if e["ph"] == "X" and e["pid"] == rank and e["tid"] >= 10)
        assert activities == len(ranks[rank])


def test_colours_are_one_per_kind() -> None:
    found = [e for e in events(filtered([busy(300)])) if e["ph"] == "X" and e["tid"] >= 10]
    colors = {(e["cat"], e["name"].split()[0]): e["cname"] for e in found}
    assert len(set(colors.values())) == len({key if key[0] == "compute" else key[0] for key in colors})


def test_the_counter_of_the_link_starts_and_ends_at_nothing() -> None:
    found = [e for e in events(filtered([busy(300)])) if e["ph"] == "C"]
    levels = [e["args"]["GB/s"] for e in found]
    assert levels[-1] == pytest.approx(0, abs=1e-6)
    assert max(levels) == pytest.approx(0.2, rel=1e-3)  # a gather and a reduce at once, 0.1 GB/s each
    assert all(e["ts"] >= 0 for e in found)
    assert Counter(e["name"] for e in found) == {"link GB/s": len(found)}


@pytest.mark.parametrize(("transport", "words"), [("slow", "EMULATED"), ("null", "NULL TRANSPORT"), ("nccl", "H200")])
def test_processes_say_what_is_no_real_training(transport: str, words: str) -> None:
    one = replace(toy(), run={"transport": transport})
    label = next(e["args"]["labels"] for e in events(filtered([one])) if e["name"] == "process_labels")
    assert words in label


def test_the_same_traces_give_the_same_bytes() -> None:
    assert filtered([busy(100)]) == filtered([busy(100)])
