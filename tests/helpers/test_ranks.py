"""The helper that starts ranks: results, failures, hangs and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import ROOT, RankDied, RanksTimeout, run_ranks


def add_up(rank: int, start: torch.Tensor) -> torch.Tensor:
    total = start + rank
    dist.all_reduce(total)
    return total


def describe(rank: int) -> tuple[int, int, int, str]:
    return rank, dist.get_world_size(), torch.get_num_threads(), str(torch.rand(1).item())


def fail_on_two(rank: int) -> None:
    if rank == 2:
        raise ValueError("layers=3 does not divide")
    dist.barrier()


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("held a lock")
        self.lock = threading.Lock()


def fail_unpicklably(rank: int) -> None:
    raise Unpicklable


def die_on_one(rank: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def forgotten_barrier(rank: int, folder: str) -> None:
    (Path(folder) / f"{rank}").write_text(str(os.getpid()))
    print("first line", flush=True)
    print(f"about to wait on {rank}", flush=True)
    if rank != 0:
        dist.barrier()


def add_up_on_device(rank: int) -> tuple[float, int, str | None]:
    total = torch.full((8,), rank + 1.0, device="cuda")
    dist.all_reduce(total)
    return total.sum().item(), torch.cuda.current_device(), os.environ.get("NCCL_NVLS_ENABLE")


def leave_a_mark(rank: int) -> bool:
    fresh = not hasattr(torch, "mark")
    torch.mark = True  # pyrefly: ignore[missing-attribute]
    return fresh


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_results_in_order_of_ranks() -> None:
    results = run_ranks(add_up, 4, torch.ones(3))
    assert [r.tolist() for r in results] == [[10.0] * 3] * 4


def test_every_rank_has_one_thread_and_the_same_seed() -> None:
    results = run_ranks(describe, 3)
    assert [r[:3] for r in results] == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert len({r[3] for r in results}) == 1


def test_nothing_survives_from_one_call_to_the_next() -> None:
    assert run_ranks(leave_a_mark, 2) == [True, True]
    assert run_ranks(leave_a_mark, 2) == [True, True]


def test_exception_is_raised_with_the_traceback_of_its_rank() -> None:
    with pytest.raises(ValueError, match="layers=3 does not divide") as caught:
        run_ranks(fail_on_two, 4)
    note = "\n".join(caught.value.__notes__)
    assert "on rank 2" in note
    assert "in fail_on_two" in note


def test_exception_that_cannot_be_pickled_keeps_its_text() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: held a lock"):
        run_ranks(fail_unpicklably, 2)


def test_killed_rank_is_named() -> None:
    with pytest.raises(RankDied, match=r"rank 1 ended with exit code -9[^$]*rank 1 was here"):
        run_ranks(die_on_one, 3)


def test_hang_reports_every_rank_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RanksTimeout) as caught:
        run_ranks(forgotten_barrier, 3, str(tmp_path), timeout=6.0)
    text = str(caught.value)
    assert "rank 0 finished; last line: about to wait on 0" in text
    assert "rank 2 did not finish; last line: about to wait on 2" in text
    assert text.count("in forgotten_barrier") == 2
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.timeout(300)
def test_ranks_die_with_the_caller(tmp_path: Path) -> None:
    script = f"""
        from multiprocessing.context import BaseContext
        from tests.helpers.ranks import run_ranks
        from tests.helpers.test_ranks import forgotten_barrier
        preload = BaseContext.set_forkserver_preload  # this server need not import all that ranks may want
        BaseContext.set_forkserver_preload = lambda context, names: preload(context, ["tests.helpers.test_ranks"])
        if __name__ == "__main__":
            run_ranks(forgotten_barrier, 2, {str(tmp_path)!r}, timeout=280)
    """
    (tmp_path / "caller").mkdir()
    path = tmp_path / "caller" / "caller.py"
    path.write_text(textwrap.dedent(script))
    caller = subprocess.Popen([sys.executable, str(path)], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    marks = [tmp_path / "0", tmp_path / "1"]
    try:
        wait_until(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    finally:
        caller.kill()
        caller.wait()
    pids = [int(mark.read_text()) for mark in marks]
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def wait_until(condition) -> None:
    """As long as the test may take: on a busy machine, a minute may pass before ranks have started."""
    while not condition():
        time.sleep(0.02)


def test_output_of_ranks_is_passed_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(RanksTimeout):
        run_ranks(forgotten_barrier, 2, str(tmp_path), timeout=6.0)
    assert "[rank 1] about to wait on 1" in capsys.readouterr().out


def imported_by_the_server(rank: int) -> bool:
    preload = sys.modules.get("tests.helpers.preload")
    return preload is not None and os.getppid() == preload.PROCESS


def test_ranks_start_without_importing_torch_or_hocket() -> None:
    """Which would take seconds: the fork server has imported them."""
    assert run_ranks(imported_by_the_server, 2) == [True, True]


@pytest.mark.gpu
def test_ranks_with_nccl_have_a_device_each() -> None:
    world = min(torch.cuda.device_count(), 4)
    total = 8.0 * world * (world + 1) / 2
    assert run_ranks(add_up_on_device, world, backend="nccl") == [(total, rank, "0") for rank in range(world)]
