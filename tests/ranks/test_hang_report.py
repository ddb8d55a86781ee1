"""What a rank says that waits at the end of a step, where no op is to blame."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.engine import Engine
from hocket.runtime import recorder
from hocket.runtime.recorder import Recorder
from tests.helpers.command import wait_for
from tests.helpers.parity import LR, batches_of
from tests.helpers.ranks import run_ranks
from tests.ranks.test_tensor_parity import MIXED, of
from tests.reference import microbatch

A_MOMENT = 0.3
"""Seconds after which rank 0, which waits for rank 1, is asked for what. Rank 1 is late until then."""
PLACES = ("sum_shared_grads", "grad_norm", "agree")


def steps(rank: int, config: Config, folder: Path) -> list[str]:
    """By place: what rank 0 says while rank 1 is late there."""
    torch.set_num_threads(1)
    engine = Engine(config, rank, torch.device("cpu"))
    engine.init_weights()
    holders: tuple[Any, ...] = (engine.sharded, engine.optimizer, engine)
    (batches,) = batches_of(config)[:1]
    said = []
    for holder, place in zip(holders, PLACES, strict=True):
        call, reached = getattr(holder, place), threading.Event()

        def late(*args: Any, call: Any = call, reached: threading.Event = reached, place: str = place) -> Any:
            reached.set()
            if rank == 1:
                wait_for((folder / place).exists, f"the question at {place}", 20)
            return call(*args)

        setattr(holder, place, late)

        def ask(reached: threading.Event = reached, place: str = place) -> None:
            assert reached.wait(20)
            time.sleep(A_MOMENT)
            said.append(engine.report(rank))
            if rank == 0:
                (folder / place).touch()

        asking = threading.Thread(target=ask)
        asking.start()
        result = engine.train_step([microbatch(of_ranks[0]) for of_ranks in batches], LR)
        engine.agree(result.loss)
        asking.join(20)
        setattr(holder, place, call)
    engine.close()
    return said


@pytest.mark.parametrize("fault", [RuntimeError("CUDA error: unspecified launch failure"), OSError("no space left")])
def test_a_rank_that_cannot_say_what_it_waits_for_ends_all_the_same(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, codes, stuck = threading.Event(), [], Recorder([])
    monkeypatch.setattr(recorder, "LINGER", 0.0)
    monkeypatch.setattr(recorder.os, "_exit", lambda code: (codes.append(code), stuck.end(), ended.set()))

    def report() -> str:
        raise fault

    stuck.begin()
    watchdog = recorder.Watchdog(0.05, report, lambda: stuck)
    assert ended.wait(20)
    watchdog.close()
    assert codes == [recorder.HANG_EXIT_CODE]
    said = capsys.readouterr().err
    assert said.startswith(recorder.HANG_HEADLINE)
    assert f"cannot be told: {fault}" in said


def test_a_rank_that_waits_behind_all_ops_says_for_what(tmp_path: Path) -> None:
    said = run_ranks(steps, 2, of(MIXED, {}, {}), tmp_path)[0]
    for text, where in zip(said, ("sum, over tensor-parallel ranks", "norm of all grad", "losses"), strict=True):
        first, *rest = text.splitlines()
        assert first.startswith("rank 0: stuck for ")
        assert where in first
        assert "step all" in first
        assert not any("waits for op" in line for line in rest)
        assert "calls of each group, and the last: " in rest[-1]
    assert "tp " in said[0].splitlines()[-1]
    assert "all_gather" in said[0].splitlines()[-1]
    assert "control" in said[1].splitlines()[-1]
