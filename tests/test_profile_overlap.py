"""What `profile_overlap` tells about real collectives of gloo: hidden ones, exposed ones, and whose they are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from hocket.testing import profile_overlap
from hocket_trace.parse import TraceError
from tests.helpers.ranks import run_ranks

LARGE = 1 << 21
"""Elements of a collective that takes milliseconds."""


def compute_until_done(works: list[Any], begun: Path) -> None:
    x = torch.randn(256, 256)
    x @ x
    begun.touch()
    while not all(work.is_completed() for work in works):
        x @ x


def program(rank: int, keep: Path) -> dict[str, Any]:
    """Three all-gathers beside compute, then an all-reduce and an all-to-all that the host waits for.

    Rank 1 joins the gathers after rank 0 has computed something, so on rank 0 none ends before that.
    """
    out, shard = torch.zeros(2 * LARGE), torch.ones(LARGE)
    dist.all_gather_into_tensor(out, shard)
    dist.barrier()
    with profile_overlap(keep / f"rank{rank}.json") as overlap:
        while rank == 1 and not (keep / "begun0").exists():
            time.sleep(0.001)
        with record_function("beside"):
            works = [dist.all_gather_into_tensor(out, shard, async_op=True) for _ in range(3)]
            compute_until_done(works, keep / f"begun{rank}")
        with record_function("alone"):
            dist.all_reduce(out)
            dist.all_to_all_single(out, out.clone())
    gathers, reduces = overlap.of("gather"), overlap.of("reduce")
    return {
        "counts": overlap.counts(),
        "compute": overlap.compute,
        "gathers": (gathers.overlapped, gathers.hidden, gathers.exposed / gathers.seconds),
        "rest": [one.hidden for one in gathers[1:]],
        "reduces": (reduces.overlapped, reduces.hidden, reduces.exposed / reduces.seconds),
        "where": [overlap.all.within(name).kinds for name in ("beside", "alone")],
        "by launcher": [len(overlap.of(launcher=name)) for name in ("all_gather$", "none such")],
        "text": str(gathers),
    }


def planned(rank: int) -> tuple[list[str], list[str]]:
    """A sum inside of an op that is told to be a layer's, and one outside."""
    x = torch.ones(LARGE)
    plan = {"lanes": ["compute"], "computing": ["compute"], "ops": {"fwd layer 3": ["compute", "tp", "", 3]}}
    with profile_overlap(plan=plan) as overlap:
        with record_function("fwd layer 3"):
            dist.all_reduce(x)
        dist.all_reduce(x)
    layers = [f"{one.kind} {one.layer}" for one in overlap.of(op="^fwd layer")]
    return layers, [one.kind for one in overlap.of(op="^$")]


def test_named_ops_are_what_the_program_tells() -> None:
    for layers, others in run_ranks(planned, 2):
        assert layers == ["tp 3"]
        assert others == ["reduce"]


def test_hidden_and_exposed_collectives_are_told_apart(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(program, 2, tmp_path)):
        assert found["counts"] == {"gather": 3, "reduce": 1, "a2a": 1}
        overlapped, hidden, exposed = found["gathers"]
        assert exposed == pytest.approx(1 - hidden)
        assert len(found["rest"]) == 2
        if rank == 0:
            assert overlapped == 3
            assert 0 < hidden <= 1, found["text"]
            assert all(0 < share <= 1 for share in found["rest"])
        assert found["reduces"] == (0, 0.0, 1.0)
        assert found["where"] == [["gather"] * 3, ["reduce", "a2a"]]
        assert found["by launcher"] == [3, 0]
        assert found["compute"] > 0
        assert found["text"].count("% hidden") == 3
        assert (tmp_path / f"rank{rank}.json").exists()


def test_one_profiler_at_a_time() -> None:
    with profile_overlap() as outer:
        torch.ones(3).add_(1)
        with pytest.raises(ValueError, match=r"another profiler.* is recording; fix: end it first"), profile_overlap():
            pass
    assert outer.compute > 0
    with torch.profiler.profile(), pytest.raises(ValueError, match="another profiler"), profile_overlap():
        pass


def test_a_block_that_raises_is_left_as_it_was() -> None:
    with pytest.raises(KeyError), profile_overlap() as overlap:
        raise KeyError
    with pytest.raises(ValueError, match="or it raised"):
        overlap.counts()
    with profile_overlap() as overlap:
        torch.ones(3).add_(1)
    assert overlap.counts() == {}


def test_questions_that_make_no_sense() -> None:
    with profile_overlap() as overlap:
        torch.ones(3).add_(1)
        with pytest.raises(ValueError, match="asked inside of the profiled block"):
            overlap.of("gather")
    assert len(overlap.of("gather")) == 0
    assert overlap.of("gather").hidden == 1.0
    assert str(overlap.of("gather")) == "no collectives"
    with pytest.raises(ValueError, match="annotation = forward: it is not in the trace"):
        overlap.all.within("forward")
    with pytest.raises(TraceError, match="no torch ops"), profile_overlap():
        pass
