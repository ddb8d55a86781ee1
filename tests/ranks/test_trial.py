"""Trials of copy engines: all ranks get the same answer, whichever rank fails, and leave nothing behind."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hocket.program.mesh import Purpose
from hocket.runtime.comm import CommOptions, Group, make_group
from hocket.runtime.shared_memory import MULTICAST, shared_memory
from hocket.runtime.trial import why_no_copies
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
PURPOSES: list[Purpose] = ["gather_dense", "a2a"]


def answer(
    rank: int, looking: int, failing: tuple[int, str], alone: bool = False, limit: float = 20.0
) -> tuple[str, list[str]]:
    """What a trial says if one rank's GPUs cannot, or if its use of a group for a purpose fails; and its groups.

    `alone`: that rank leaves the others waiting.
    """
    made: list[str] = []

    def fail(purpose: str) -> None:
        if (rank, purpose) == failing:
            raise RuntimeError("pidfd_getfd: Operation not permitted\nmore of it")

    def make(purpose: Purpose, ranks: tuple[int, ...], device: torch.device, options: CommOptions) -> Group | None:
        if alone:
            fail(purpose)
        group = make_group("gather_dense", ranks, rank, device, "gloo", options)
        assert group is not None
        fail(purpose)
        destroy = group.transport.destroy
        group.transport.destroy = lambda: (destroy(), made.append(f"{purpose} is gone"))[0]  # type: ignore[method-assign]
        made.append(purpose)
        return group

    return why_no_copies(PURPOSES, CPU, limit, lambda: "NCCL is old" if rank == looking else "", make), made


BOTH = ["gather_dense", "gather_dense is gone", "a2a", "a2a is gone"]
FAILED = "a trial failed (RuntimeError: pidfd_getfd: Operation not permitted)"
CASES: list[tuple[str, int, tuple[int, str], str, list[list[str]]]] = [
    ("all is well", -1, (-1, ""), "", [BOTH, BOTH]),
    ("the GPUs of one rank cannot", 1, (-1, ""), "NCCL is old", [[], []]),
    ("no shown memory on one rank", -1, (0, "gather_dense"), FAILED, [[], ["gather_dense"]]),
    ("no memory of peers on one rank", -1, (1, "a2a"), FAILED, [BOTH[:3], BOTH[:2]]),
]


@pytest.mark.parametrize(("looking", "failing", "reason", "made"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_all_ranks_come_to_one_answer(looking: int, failing: tuple[int, str], reason: str, made: Any) -> None:
    found = run_ranks(answer, 2, looking, failing)
    assert [why for why, _ in found] == [reason, reason]
    assert [groups for _, groups in found] == made


def test_ranks_that_are_left_waiting_come_to_the_same_answer_later() -> None:
    ((first, _), (second, _)) = run_ranks(answer, 2, -1, (1, "gather_dense"), True, 1.0)
    assert first == second
    assert "pidfd_getfd: Operation not permitted" in first
    assert "imeout" in first


def real(rank: int) -> str:
    return why_no_copies(PURPOSES, CPU, 20.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_copy_engines_do_not_serve() -> None:
    assert run_ranks(real, 2) == ["torch finds no usable GPU, or was built without NCCL"] * 2


def test_no_memory_is_shown_where_multicast_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = None
    monkeypatch.setenv(MULTICAST, "0")
    with pytest.raises(RuntimeError, match=rf"{MULTICAST} = 0: NVLink multicast must be off; fix: {MULTICAST}=1"):
        shared_memory(group, 64, CPU, 1.0)
    monkeypatch.delenv(MULTICAST)
    with pytest.raises(Exception, match=r"."):  # there is no GPU to show memory of
        shared_memory(group, 64, CPU, 1.0)
    assert os.environ[MULTICAST] == "1"
    monkeypatch.delenv(MULTICAST)
