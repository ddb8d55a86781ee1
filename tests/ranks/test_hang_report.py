"""What a rank says that waits at the end of a step, where no op is to blame."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.config import Config
from hocket.engine import Engine
from hocket.runtime import hangs as recorder
from hocket.runtime.hangs import STATE, RankState, Recorder
from tests.helpers.command import ROOT, wait_for
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

    def report(device: bool) -> str:
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
        assert rest[-1].startswith(STATE)
    for text, group, before in zip(said, ("tp", "control", "control"), (0, 0, 1), strict=True):
        state = RankState.from_line(text.splitlines()[-1])
        assert f"{group} 0,1" in state.waits, text
        waits = [came for came in state.groups if came.key == f"{group} 0,1"]
        assert [came.issued for came in waits] == [max(came.done + 1, before + 1) for came in waits], text
        assert f"  waits for exchange {waits[0].done + 1} of {group} (ranks 0, 1), all_" in text


def test_a_device_that_does_not_answer_delays_the_end_by_little(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, stuck, never = threading.Event(), Recorder([]), threading.Event()
    monkeypatch.setattr(recorder, "LINGER", 0.0)
    monkeypatch.setattr(recorder, "ANSWER", 0.2)
    monkeypatch.setattr(recorder.os, "_exit", lambda code: (stuck.end(), ended.set()))

    def report(device: bool) -> str:
        if device:
            never.wait(20)
        return f"what is known {'with' if device else 'without'} the device"

    stuck.begin()
    watchdog = recorder.Watchdog(0.05, report, lambda: stuck)
    assert ended.wait(10)
    watchdog.close()
    never.set()
    said = capsys.readouterr().err
    assert "what is known without the device\nthe device did not answer within 0.2 s" in said


def hold_the_interpreter() -> None:
    """A step whose thread never gives back the interpreter, as one may that is blocked in a call of the driver."""
    recorder.ANSWER = recorder.LINGER = 0.5
    stuck = Recorder([])
    stuck.begin()
    recorder.Watchdog(1.0, lambda device: "a report", lambda: stuck)
    time.sleep(0.6)  # until the watchdog has looked once
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter, unlike CDLL


def test_a_thread_that_holds_the_interpreter_cannot_keep_the_process() -> None:
    source = "from tests.ranks.test_hang_report import hold_the_interpreter; hold_the_interpreter()"
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in hold_the_interpreter" in ended.stderr


def test_an_error_inside_a_step_says_at_which_op() -> None:
    for found, position in run_ranks(fails, 2):
        assert found == [f"while op {position} was issued: fwd experts m0 c0 l1"]


def fails(rank: int) -> tuple[list[str], int]:
    engine = Engine(of(MIXED, {}, {}), rank, torch.device("cpu"))
    engine.init_weights()
    position = next(i for i, op in enumerate(engine.program.ranks[0]) if (op.verb, op.part) == ("fwd", "experts"))
    (batches,) = batches_of(engine.config)[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.chunks[0].layer(1), "forward_experts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            engine.train_step([microbatch(of_ranks[0]) for of_ranks in batches], LR)
    return caught.value.__notes__, position
