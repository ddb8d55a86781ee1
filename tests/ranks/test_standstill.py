"""What a rank on GPUs says of a step that stands still, with events and words that are given: there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.engine.standstill import Standstill
from hocket.launching.culprit import culprit
from hocket.plan.ops import Op
from hocket.runtime.comm import Group, Groups
from hocket.runtime.exchanges import STATE
from hocket.runtime.hop_copies import HALVES, WORDS, CopiedHops, HopCopies, blank
from hocket.runtime.recorder import Recorder
from hocket.runtime.transports import Local
from tests.helpers.driver import Memcpy

CPU = torch.device("cpu")
OPS = [
    Op("recv", "act", 0, 0, lane="recv_act"),
    Op("fwd", "mlp", 0, 0, 1, deps=(0,)),
    Op("recv", "act", 1, 0, lane="recv_act"),
    Op("fwd", "mlp", 1, 0, 1, deps=(2,)),
    Op("step", "all"),
]


class Streams:
    """Lanes of a GPU on which these ops are over. Ops that nobody awaits have no event."""

    needs_rehearsal = True

    def __init__(self, over: set[int]) -> None:
        self.over = over

    def completed(self, lane: str, position: int) -> bool | None:
        return position in self.over if lane != "compute" else None


class Streaming(Memcpy):
    """A stream does nothing but what it is told to have done."""

    def wait(self, stream: int, word: int, value: int) -> None:
        pass

    def write(self, stream: int, word: int, value: int) -> None:
        if not self.blocked:
            super().write(stream, word, value)

    blocked = False


def groups_of(copies: HopCopies) -> Groups:
    """Those of the second of two pipeline ranks."""
    alone: Any = {
        name: Group(name, (1,), 0, Local())
        for name in ("gather_dense", "reduce_dense", "gather_experts", "reduce_experts", "a2a", "tp", "control")
    }
    hops: Any = CopiedHops(None, (0, 1), CPU, copies)  # type: ignore[arg-type]
    return Groups(**alone, recv_act=Group("recv_act", (0, 1), 1, hops), made=("recv_act",))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_rank_says_which_send_it_waits_for(replayed: bool) -> None:
    """Its host has issued a whole step, of whose two receives the second finds nothing."""
    memories = [torch.zeros(HALVES * 64 + WORDS, dtype=torch.uint8) for _ in range(2)]
    for memory in memories:
        blank(memory)
    driver, sent = Streaming(), torch.ones(16)
    sender, receiver = (HopCopies(rank, memories, driver, lambda: 0) for rank in range(2))
    groups = groups_of(receiver)
    recorder = Recorder(OPS, groups.begin)

    def issue(tensor: torch.Tensor, number: int) -> None:
        recorder.issue(number)
        if OPS[number].verb == "recv":
            assert groups.recv_act is not None
            groups.recv_act.recv(tensor, 0)

    recorder.begin()
    if replayed:  # a whole step is recorded and replayed; then a replay comes no further than its first receive
        for number in range(len(OPS)):
            if OPS[number].verb == "recv":
                sender.send(sent)
            issue(torch.empty(16), number)
        recorder.begin(replayed=True)
        sender._piece, receiver._piece = 0, 0
        sender.send(sent)
        receiver.receive(torch.empty(16))
        sender._piece, receiver._piece = 2, 2
    else:
        sender.send(sent)
        for number in range(len(OPS)):
            driver.blocked = number >= 2
            issue(torch.empty(16), number)
    recorder.enter("the mean of all ranks' losses, behind all ops")
    lanes: Any = Streams({0})
    found = Standstill(1, recorder, groups, lanes, device=True)
    (came,) = found.state.groups
    assert (came.issued, came.done, came.absent) == (2, 1, (0,))
    assert found.state.waits == ("act 0,1",)
    text = found.text().splitlines()
    assert text[0].startswith("rank 1: stuck for 0 s in the mean of all ranks' losses, behind all ops")
    waits = text[1].startswith("  waits for activation 2 of edge 0→1, recv act m1 c0")
    assert waits, text[1]
    assert text[1].endswith("by words in memory for rank 0")
    assert text[-2].endswith("last recv act m1 c0; in memory: 1 of 2 have arrived, 1 were read")
    assert text[-1].startswith(STATE)
    assert any("plan.graphs = off" in line for line in text) == replayed
    line = culprit({1: found.state}, {0})
    assert line == (
        "rank 0 has not sent activation 2 of edge 0→1 (recv act m1 c0 on rank 1), and did not say what it does"
    )
    if not replayed:
        assert found.state.at == ("op 2: recv act m1 c0",)
        blind = Standstill(1, recorder, groups, lanes, device=False)
        assert (blind.state.at, blind.state.waits) == ((), ())
        assert "exchanges of recv_act of ranks 0, 1: 2, 0 known to be over, last recv act m1 c0" in blind.text()
