"""Rules about what moves the bytes: part of the table in `rules.py`."""

from __future__ import annotations

from typing import get_args

from hocket.config import COPIED, Config, Purpose
from hocket.settings.network_rules import leaves_host
from hocket.settings.rule import Rule


def slowed_alone(c: Config) -> list[str]:
    """Purposes that `train.slow` names, and whose groups have one rank each."""
    alone = [p for p in get_args(Purpose) if c.mesh.members(p) == 1]
    return [purpose for purpose in _slowed(c) if purpose in alone]


def _slowed(c: Config) -> list[str]:
    return [item.rpartition(":")[0] for item in c.train.slow]


TRANSPORT_RULES: tuple[Rule, ...] = (
    Rule(
        ("train.transport", "train.device"),
        lambda c, h: c.train.transport == "nccl" and c.train.device == "cpu",
        "NCCL moves GPU memory only, and the ranks compute on CPUs",
        "train.transport = gloo, or train.device = cuda",
    ),
    Rule(
        ("train.transport", "train.device"),
        lambda c, h: c.train.transport == "gloo" and c.train.device == "cuda",
        "gloo moves CPU memory, and the ranks compute on GPUs",
        "train.transport = nccl, or train.device = cpu",
    ),
    Rule(
        ("train.transport", "train.device"),
        lambda c, h: c.train.transport in COPIED and c.train.device == "cpu",
        "copy engines move GPU memory only, and the ranks compute on CPUs",
        "train.transport = gloo, or train.device = cuda",
    ),
    Rule(
        ("train.transport",),
        lambda c, h: c.train.transport in COPIED and leaves_host(c, h, "control"),
        "copy engines reach the GPUs of one host, and of {world} ranks {on_a_host} are on each",
        "train.transport = nccl",
    ),
    Rule(
        ("train.transport",),
        lambda c, h: c.train.transport in COPIED and c.train.device == "cuda" and bool(h.no_copy_engine),
        "{host.no_copy_engine}",
        "train.transport = nccl",
    ),
    Rule(
        ("train.transport", "train.slow"),
        lambda c, h: c.train.transport == "slow" and not c.train.slow,
        "the slow transport emulates a network, and nothing says which",
        "train.slow = 10us (or such as a2a:10us,50GB/s)",
    ),
    Rule(
        ("train.slow", "train.transport"),
        lambda c, h: c.train.transport != "slow" and bool(c.train.slow),
        "no effect: train.transport = {train.transport} emulates no network",
        "train.transport = slow, or leave train.slow out",
    ),
    Rule(
        ("train.slow",),
        lambda c, h: len(set(_slowed(c))) < len(c.train.slow),
        "a group has one link, and one is named twice",
        "each group of train.slow once",
    ),
    Rule(
        ("train.slow", "mesh.pp", "mesh.dp", "mesh.ep"),
        lambda c, h: bool(slowed_alone(c)),
        "no effect: on this mesh every group of {slowed_alone} has one rank",
        "leave {slowed_alone} out of train.slow",
    ),
)
