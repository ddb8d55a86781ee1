"""What slows a step down by the cost model alone, and the clock that power allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import late_host, predict, program_of, report
from hocket.predict.cost import overheads_of
from hocket.predict.hardware import H200, LAPTOP, Work, at_clock, clock_of, hardware_of
from hocket.predict.simulate import Overheads
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve

KEYS = [("fwd", "attn", "moe"), ("gather", "dense", "moe")]


def settled(**changes: Any) -> Settings:
    usual = {"plan.graphs": "off", "overlap.ep.splits": "host", "train.microbatches": 4, "train.transport": "nccl"}
    config = changed(recipe("moe_8gpu"), usual)
    return resolve(changed(config, {n.replace("__", "."): v for n, v in changes.items()}), Host(gpus=8))


def test_contention_is_that_of_what_moves_the_bytes() -> None:
    kernels, copies = H200.beside_kernels, H200.beside_copies
    assert 0 < copies < kernels
    on_nccl = overheads_of(settled(), H200, KEYS).contention
    assert on_nccl == dict.fromkeys(("gather", "reduce", "a2a", "pp", "cp", "tp"), kernels)
    on_copies = overheads_of(settled(train__transport="copy_engine"), H200, KEYS).contention
    assert on_copies == {**dict.fromkeys(on_nccl, copies), "tp": kernels}
    gathers = overheads_of(settled(train__transport="copy_engine_gathers"), H200, KEYS).contention
    assert gathers == {**on_nccl, "gather": copies}
    placed = settled(train__transport="copy_engine", overlap__ep__splits="device", plan__graphs="on")
    assert overheads_of(placed, H200, KEYS).contention == {**on_copies, "a2a": kernels}
    assert overheads_of(settled(train__transport="null"), H200, KEYS).contention == {}


@pytest.mark.parametrize("transport", ["copy_engine", "null"])
def test_updates_slow_forwards_down_whatever_moves_the_bytes(transport: str) -> None:
    found = overheads_of(settled(train__transport=transport, overlap__dp__update="next_step"), H200, KEYS)
    assert found.contention["update"] == H200.beside_updates > 1


def test_a_host_issues_what_is_not_replayed() -> None:
    issued = overheads_of(settled(), H200, KEYS)
    assert issued.issue == dict.fromkeys(KEYS, H200.issue)
    assert issued.counts == H200.counts
    replayed = overheads_of(settled(overlap__ep__splits="device", plan__graphs="on"), H200, KEYS)
    assert (replayed.issue, replayed.counts) == ({}, None)
    assert overheads_of(settled(), LAPTOP, KEYS) == Overheads(), (
        "a CPU that issues computes, and nothing runs beside it"
    )


def test_predicted_steps_know_of_it() -> None:
    def step(**changes: Any) -> float:
        s = settled(**changes)
        return float(predict(s, program_of(s), hardware_of(s)).makespan)

    assert step(train__transport="copy_engine") < step()
    quick = replace(H200, issue=0.0, counts=0.0)
    s = settled()
    alone = float(predict(s, program_of(s), quick).makespan)
    late = float(predict(s, program_of(s), replace(H200, issue=5e-3)).makespan)
    assert step() >= alone
    assert late > 4.5e-3 * max(map(len, program_of(s).ranks)) * 0.8


def test_a_step_that_waits_for_hosts_says_so() -> None:
    s, long = settled(**{"data.sequence_length": 256}), settled(**{"data.sequence_length": 8192})
    late, quick = (
        "\n".join(late_host(each, program, H200, predict(each, program, H200)))
        for each, program in ((each, program_of(each)) for each in (s, long))
    )
    assert "for which GPUs wait" in late
    assert late in " ".join(report(s, program_of(s), H200, 200, 0).splitlines())
    assert not quick


def test_the_clock_is_where_power_ends() -> None:
    works = [Work(clocked=0.8, others=0.2, flops=7e14), Work(clocked=0.0, others=0.1, flops=0.0)]
    clock = clock_of(H200, works)
    assert clock < H200.clock
    seconds = 0.8 * H200.clock / clock + 0.3
    assert 7e14 / seconds * clock**2 == pytest.approx(H200.power, rel=1e-5)
    assert clock_of(H200, [Work(0.1, 1.0, 1e13)]) == H200.clock, "so little draws less than there is"
    slower = at_clock(H200, clock)
    assert slower.gemm_flops == pytest.approx(H200.gemm_flops * clock / H200.clock)
    assert slower.memory_bandwidth == H200.memory_bandwidth
