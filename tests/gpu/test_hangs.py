"""One rank of a run on copy engines stops in the middle of a step: flags in memory say for whom the other one waits.

Streams are blocked then, and everything must end all the same, soon and by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.command import Finished, end_all
from tests.test_hangs import PIPELINE, ROWS, SEND, stopped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
LIMIT = "15"
"""Seconds without progress. An op of the first step may take several, which compiles kernels."""
COPIED = [
    "--train.device", "cuda", "--train.transport", "copy_engine", "--train.hang_timeout", LIMIT,
    "--model.hidden", "128", "--model.heads", "2", "--model.head_dim", "64", "--model.ffn", "256",
    "--model.expert_ffn", "128", "--model.shared_ffn", "128", "--data.sequence_length", "128",
]  # fmt: skip
"""Over `SMALL`."""
HEAD = f"hocket: no progress for {LIMIT} s: "
NOT_SENT = (
    r"rank 1 has not sent (activation \d+ of edge 1→0|gradient \d+ of edge 0→1) \(recv (act|grad) m\d c1 on rank 0\)"
)
"""Which one depends on when rank 1 sees that enough steps are done: its host issues a step ahead of rank 0's report."""
ATTENTION = "hocket.model.moe:MoELayer.forward_attn"
EXCHANGE = "hocket.runtime.peer_rows:PeerCopies.exchange"
STEP = "hocket.engine.engine:Engine.train_step"


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    yield
    end_all()


def of_rank(ended: Finished, rank: int) -> list[str]:
    """The lines of a rank's report."""
    lines = [line.removeprefix("  | ") for line in ended.err.splitlines()[1:]]
    starts = [i for i, line in enumerate(lines) if line.startswith("rank ")]
    (start,) = [i for i in starts if lines[i].startswith(f"rank {rank}: ")]
    return lines[start : next((i for i in starts if i > start), len(lines))]


def test_a_host_that_has_stopped_has_not_sent(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "host", SEND, *COPIED, *PIPELINE, "--plan.graphs", "off", timeout=120)
    first = ended.err.splitlines()[0]
    assert re.match(rf"{HEAD}{NOT_SENT}, and is stuck for \d+ s at op \d+: send (act|grad) m\d c\d[.,] ", first), (
        ended.err
    )
    waits = [line for line in of_rank(ended, 0) if line.startswith("  waits for ")]
    assert any(line.endswith(": by flags in memory for rank 1") for line in waits), ended.err
    assert "did not answer" not in ended.err


def test_a_device_that_has_stopped_has_not_sent(tmp_path: Path) -> None:
    """Its host has issued all that the other rank waits for."""
    ended = stopped(tmp_path, "device", ATTENTION, *COPIED, *PIPELINE, "--plan.graphs", "off", timeout=120)
    first = ended.err.splitlines()[0]
    at = r"with the device at op \d+: fwd attn m\d c\d l1 \.\. op \d+: fwd \w+ m\d c\d l1\. ranks 0, 1 waited"
    assert re.match(rf"{HEAD}{NOT_SENT}, and is stuck for \d+ s in .*, {at}", first), ended.err
    assert any("by flags in memory for rank 1" in line for line in of_rank(ended, 0)), ended.err
    assert "did not answer" not in ended.err


def test_rows_that_are_not_exchanged_are_told_by_the_barrier(tmp_path: Path) -> None:
    words = [*COPIED, *ROWS, "--plan.graphs", "off", "--overlap.ep.splits", "host"]
    ended = stopped(tmp_path, "host", EXCHANGE, *words, timeout=120)
    first = ended.err.splitlines()[0]
    assert re.match(rf"{HEAD}rank 1 has not come to exchange \d+ of a2a \(ranks 0, 1\)", first), ended.err
    assert any(line.endswith(": by flags in memory for rank 1") for line in of_rank(ended, 0)), ended.err


def test_a_replayed_step_waits_for_a_rank_that_does_not_begin_its_own(tmp_path: Path) -> None:
    """The rank that stopped is between two steps, where its own watchdog does not look: it says nothing."""
    ended = stopped(tmp_path, "host", STEP, *COPIED, *PIPELINE, "--plan.graphs", "on", timeout=150)
    first = ended.err.splitlines()[0]
    assert first.startswith(f"{HEAD}rank 1 "), ended.err
    assert "did not say what it does" in first, ended.err
    assert ". rank 0 waited; rank 1 (process" in first, ended.err
    assert any(line.endswith(": by flags in memory for rank 1") for line in of_rank(ended, 0)), ended.err
    assert any("plan.graphs = off shows which one hangs" in line for line in of_rank(ended, 0)), ended.err


def test_a_rank_that_is_killed_ends_the_run_although_streams_wait_for_it(tmp_path: Path) -> None:
    ended = stopped(tmp_path, "kill", SEND, *COPIED, *PIPELINE, "--plan.graphs", "off", timeout=120)
    assert re.match(r"hocket: rank 1 \(process \d+\) was ended by SIGKILL", ended.err), ended.err
    assert "still there" not in ended.err
