"""Memory into which other ranks write: counted where it is made, told, and left free by choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hocket.config import COPIED as ALL
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.engine.engine import comm_options
from hocket.explain.build import explain
from hocket.planning import predict, program_of, report
from hocket.predict.arrivals import arrival_bytes, halves_bytes
from hocket.predict.hardware import hardware_of
from hocket.resolve import resolve
from hocket.tune.trials import Trials

GPUS = Host(gpus=8)
TOKENS = 2 * 64 * 128 * 2
"""Bytes of a microbatch: two sequences of 64 tokens, 128 wide, in bf16."""
BASE: dict[str, Any] = {
    "train.device": "cuda", "train.sequences": 2, "train.microbatches": 8, "data.sequence_length": 64,
    "model.layers": 8, "model.hidden": 128, "precision.compute": "bf16", "plan.graphs": "off",
}  # fmt: skip
EXPERTS = BASE | {"model.experts": 8, "mesh.dp": 4, "mesh.ep": 4, "overlap.ep.copies": "per_expert"}
COPIED = {"train.transport": "copy_engine"}

CASES: list[tuple[str, dict[str, Any], float]] = [
    ("none by NCCL", BASE | {"mesh.pp": 4, "train.transport": "nccl"}, 0),
    ("two edges, each both ways", BASE | COPIED | {"mesh.pp": 4}, 4),
    ("the two edges of two ranks", BASE | COPIED | {"mesh.pp": 2}, 4),
    ("a V: two edges there and two back", BASE | COPIED | {"mesh.pp": 4, "plan.order": "zb_v", "plan.chunks": 2}, 8),
    ("gathers alone", BASE | {"train.transport": "copy_engine_gathers", "mesh.pp": 4}, 0),
    ("experts: two rows a token, twice, and some more", EXPERTS | COPIED | {"overlap.ep.splits": "host"}, 2 * 2 * 1.25),
    (
        "the same, where hosts know the rows and NCCL moves them",
        EXPERTS | {"overlap.ep.splits": "host", "train.transport": "nccl"},
        0,
    ),
    ("ranks without peers", BASE | COPIED, 0),
]


@pytest.mark.parametrize(("what", "settings", "microbatches"), CASES, ids=[case[0] for case in CASES])
def test_what_others_write_into_is_counted(what: str, settings: dict[str, Any], microbatches: float) -> None:
    c = resolve(changed(Config(), settings), GPUS)
    halves = max(halves_bytes(c, rank) for rank in range(c.mesh.pp))
    assert (halves > 0) == (c.train.transport in ALL and c.mesh.dp > 1)
    assert arrival_bytes(c) == microbatches * TOKENS + halves
    step = Trials().step(c)
    rest, nccl = step.nbytes - arrival_bytes(c), Trials().step(changed(c, {"train.transport": "nccl"})).nbytes
    assert rest == nccl or (c.mesh.ep > 1 and rest == pytest.approx(nccl, rel=0.02))  # rows are kept as they come
    assert {row["arrivals"] for row in explain(c, ()).memory} == {arrival_bytes(c)}


@pytest.mark.parametrize("way", [{"train.transport": "null"}, {"train.device": "cpu", "precision.compute": "fp32"}])
def test_nothing_is_told_of_where_nobody_writes(way: dict[str, Any]) -> None:
    wanted = EXPERTS | {"mesh.tp": 2, "overlap.ep.splits": "device", "overlap.tp.method": ("fc1_forward:ring",)}
    assert arrival_bytes(resolve(changed(Config(), wanted), GPUS)) > 0
    assert arrival_bytes(resolve(changed(Config(), wanted | way), GPUS)) == 0


@pytest.mark.parametrize(("transport", "fits"), [("nccl", True), ("copy_engine", False)])
def test_a_step_fits_only_beside_what_others_write_into(transport: str, fits: bool) -> None:
    c = resolve(changed(Config(), BASE | {"mesh.pp": 2, "train.transport": transport}), GPUS)
    hardware = hardware_of(c)
    peak = max(use.peak_bytes for use in predict(c, program_of(c), hardware).ranks)
    assert ("DOES NOT FIT" not in report(c, program_of(c), replace(hardware, memory=peak), 80, 0)) == fits


def test_a_p2p_has_no_more_room_than_it_needs_and_never_more_than_64_mib() -> None:
    c = resolve(changed(Config(), BASE | COPIED | {"mesh.pp": 2}), GPUS)
    assert comm_options(c, torch.device("cpu")).p2p == TOKENS
    long = changed(c, {"data.sequence_length": 1 << 20})
    assert comm_options(long, torch.device("cpu")).p2p == 64 << 20
