"""Rules about what moves the bytes: part of the table in `rules.py`."""

from __future__ import annotations

from typing import get_args

from hocket.config import COPIED, Purpose
from hocket.settings.network_rules import leaves_host
from hocket.settings.rule import Rule

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
        ("train.transport", "train.slow_latency", "train.slow_bandwidth"),
        lambda c, h: c.train.transport == "slow" and not (any(c.train.slow_latency) or any(c.train.slow_bandwidth)),
        "the slow transport imitates a network, and nothing says which",
        "train.slow_latency (seconds) or train.slow_bandwidth (bytes per second)",
    ),
    Rule(
        ("train.slow_latency", "train.slow_bandwidth", "train.slow_groups", "train.transport"),
        lambda c, h: (
            c.train.transport != "slow" and bool(c.train.slow_latency or c.train.slow_bandwidth or c.train.slow_groups)
        ),
        "no effect: train.transport = {train.transport} imitates no network",
        "train.transport = slow, or leave these settings out",
    ),
    *(
        Rule(
            (f"train.{name}", "train.slow_groups"),
            lambda c, h, name=name: len(getattr(c.train, name)) not in (0, 1, len(c.train.slow_groups)),
            "one number holds for all slowed groups, several need a group each, and train.slow_groups names {slowed}",
            "one number, or one for each of train.slow_groups in their order",
        )
        for name in ("slow_latency", "slow_bandwidth")
    ),
    Rule(
        ("train.slow_groups",),
        lambda c, h: len(set(c.train.slow_groups)) < len(c.train.slow_groups),
        "a group has one link, and one is named twice",
        "name every group once",
    ),
    *(
        Rule(
            ("train.slow_groups", "mesh.pp", "mesh.dp", "mesh.ep"),
            lambda c, h, purpose=purpose: purpose in c.train.slow_groups and c.mesh.members(purpose) == 1,
            f"no effect: on this mesh every group of {purpose} has one rank",
            f"leave out {purpose}, or another mesh",
        )
        for purpose in get_args(Purpose)
    ),
)
