"""Bounds that keep a part of what a step waits for: the pipeline's p2p transfers, or the exchanges of rows."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.bench.ours import Exchanges, Muted, Planned, Signal
from benchmarks.bench.plain import Exchange, Kept, backward, materialize, plain_model
from benchmarks.bench.workload import Workload, batches
from hocket.config import MeshConfig
from hocket.layers import dispatch
from tests.bench.setup import CPU, built, workload
from tests.helpers.command import wait_for
from tests.helpers.ranks import run_ranks

LATE = 0.3
"""Seconds. A step that waits for no rank takes a small part of them."""


def in_pipeline(work: Workload) -> Workload:
    """The same on two pipeline ranks."""
    config = work.config
    sized = dataclasses.replace(config, model=dataclasses.replace(config.model, layers=4), mesh=MeshConfig(pp=2))
    return dataclasses.replace(work, config=sized)


def waits_of(rank: int, folder: Path) -> tuple[list[float], dict[str, bool]]:
    """Losses of hocket before and after its bounds stepped; and by bound, whether a step waited for the first rank,
    which begins when the other has ended its own, or has had time to.
    """
    work = in_pipeline(workload(1, optimizer=False, order="1f1b"))
    contenders = {name: built(name, rank, work) for name in ("hocket", "hocket_signal", "hocket_null")}
    microbatches, ours, waited = batches(work, rank, 0, CPU), contenders["hocket"], {}
    losses = [ours.step(microbatches).item()]
    for name in ("hocket_signal", "hocket_null"):
        bound = contenders[name]
        assert isinstance(bound, Muted)
        bound.step(microbatches)
        begun, ended = folder / f"{name} has begun", folder / f"{name} has ended"
        if rank == 0:
            wait_for(begun.exists, begun.name)
            if name == "hocket_null":
                wait_for(ended.exists, ended.name)
            time.sleep(LATE)
            waited[name] = not ended.exists()
        begun.touch()
        bound.step(microbatches)
        ended.touch()
    losses.append(ours.step(microbatches).item())
    assert isinstance(ours, Planned)
    ours.engine.assert_clean()
    return losses, waited


def test_with_signals_a_step_waits_for_the_pipeline_and_without_it_does_not(tmp_path):
    (_, waited), (losses, _) = run_ranks(waits_of, 2, tmp_path)
    assert losses[0] == losses[1] > 0, "neither leaves anything behind"
    assert waited == {"hocket_signal": True, "hocket_null": False}


def handed_on(rank: int) -> list[float]:
    work = in_pipeline(workload(1, optimizer=False, order="1f1b"))
    ours = built("hocket", rank, work)
    assert isinstance(ours, Planned)
    group = ours.engine.groups.recv_act if rank else ours.engine.groups.send_act
    assert group is not None
    signal, sent = Signal(group.size, group.rank, CPU, group.transport), torch.arange(4.0) + 7.0
    if rank == 0:
        signal.send(sent, 1).wait()
        return sent.tolist()
    received = torch.zeros(4)
    signal.recv(received, 0).wait()
    return received.tolist()


def test_a_signal_carries_one_element():
    sent, received = run_ranks(handed_on, 2)
    assert received[0] == sent[0]
    assert all(number not in (0.0, 7.0, 8.0, 9.0, 10.0) for number in received[1:]), "numbers that no rank sent"


def test_signals_must_not_change_weights():
    with pytest.raises(ValueError, match="--optimizer off"):
        built("hocket_signal", 0, in_pipeline(workload(1, optimizer=True, order="1f1b")))


def exchanged(rank: int) -> tuple[int, int, str]:
    work = workload(2, 2, moe=True)
    alone = built("exchanges", rank, work)
    assert isinstance(alone, Exchanges)
    before = alone.group.calls["all_to_all"]
    alone.step(batches(work, rank, 0, CPU))
    return alone.group.calls["all_to_all"] - before, alone.table.send[1 - rank], alone.settings["exchanges"]


def test_exchanges_are_those_of_a_step():
    for count, rows, words in run_ranks(exchanged, 2):
        assert count == 4 * 2 * 2, "two MoE layers and microbatches, there and back, forward and backward"
        assert rows == 2 * 16 * 2 // 2, "half of a microbatch's rows"
        assert words == f"16, of {rows} rows to each of 1 ranks"


def shared_groups(rank: int) -> list[bool]:
    work = workload(2, 2, moe=True)
    train = dataclasses.replace(work.config.train, sequences=1)
    smaller = dataclasses.replace(work, config=dataclasses.replace(work.config, train=train))
    found: list[object] = []
    for each in (smaller, work, work):
        made = built("hocket", rank, each)
        assert isinstance(made, Planned)
        found.append(made.engine.groups)
    return [found[0] is found[1], found[1] is found[2]]


def test_groups_are_shared_by_contenders_whose_rows_they_have_room_for():
    assert run_ranks(shared_groups, 2) == [[False, True]] * 2


def test_rows_that_stay_need_no_host_and_give_the_same_bits():
    work, rank = workload(2, 2, moe=True), 1
    (microbatch, _), found = batches(work, rank, 0, CPU), []
    for exchange in (Exchange(None, 2, rank), Kept(2, rank)):
        model = plain_model(work, rank, exchange=exchange)
        materialize(model, work, rank, CPU)
        if isinstance(exchange, Kept):
            exchange.all_counts = None  # type: ignore[assignment]  # whose answer a host would wait for
        with patch.object(dispatch, "gather", side_effect=AssertionError("what never left needs no sorting")):
            loss = backward(model, microbatch, 2)
        found.append([loss, *(param.grad for param in model.parameters())])
    for asked, known in zip(*found, strict=True):
        assert torch.equal(asked, known)
