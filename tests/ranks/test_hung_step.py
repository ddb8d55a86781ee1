"""What a rank on GPUs reports of a hung step, with events and flags that are given: there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.engine.hang_report import HangReport
from hocket.program.mesh import P2P, PURPOSES
from hocket.program.ops import Op
from hocket.runtime import p2p_copies
from hocket.runtime.comm import Group, Groups
from hocket.runtime.hangs import STATE, Recorder, culprit
from hocket.runtime.p2p_copies import FLAG_BYTES, HALVES, CopiedHops, HopCopies, reset_flags
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
    """Lanes of a GPU with events that say which ops are over. Ops that no other op awaits have none."""

    needs_rehearsal = True

    def __init__(self, over: dict[int, bool]) -> None:
        self.over = over

    def completed(self, lane: str, position: int) -> bool | None:
        return self.over.get(position)


class Streaming(Memcpy):
    """A stream does nothing but what it is told to have done."""

    def wait(self, stream: int, flag: int, value: int) -> None:
        pass

    def write(self, stream: int, flag: int, value: int) -> None:
        if not self.blocked:
            super().write(stream, flag, value)

    blocked = False


def groups_of(rank: int, name: str, ranks: tuple[int, int], copies: HopCopies) -> Groups:
    """Those of one of two pipeline ranks, with one edge."""
    alone: Any = {name: Group(name, (rank,), 0, Local()) for name in PURPOSES if name not in P2P}
    p2p: Any = CopiedHops(None, ranks, CPU, copies)  # type: ignore[arg-type]
    edge: Any = {name: Group(name, ranks, ranks.index(rank), p2p)}
    return Groups(**alone, **edge, made=(name,))


def issue(recorder: Recorder, groups: Groups, position: int) -> None:
    """An op, with what it sends or receives."""
    recorder.issue(position)
    (edge,) = groups.edges()
    match recorder.ops[position].verb:
        case "send":
            edge.send(torch.ones(16), edge.other)
        case "recv":
            edge.recv(torch.empty(16), edge.other)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_rank_says_which_send_it_waits_for(replayed: bool) -> None:
    """Its host has issued a whole step, of whose two receives the second finds nothing."""
    memories = [torch.zeros(HALVES * 64 + FLAG_BYTES, dtype=torch.uint8) for _ in range(2)]
    for memory in memories:
        reset_flags(memory)
    driver, sent = Streaming(), torch.ones(16)
    sender, receiver = (HopCopies(rank, memories, driver, lambda: 0) for rank in range(2))
    groups = groups_of(1, "recv_act", (0, 1), receiver)
    recorder = Recorder(OPS, groups.begin)

    recorder.begin()
    if replayed:  # a whole step is recorded and replayed; then a replay comes no further than its first receive
        for number in range(len(OPS)):
            if OPS[number].verb == "recv":
                sender.send(sent)
            issue(recorder, groups, number)
        recorder.begin(replayed=True)
        sender._piece, receiver._piece = 0, 0
        sender.send(sent)
        receiver.receive(torch.empty(16))
        sender._piece, receiver._piece = 2, 2
    else:
        sender.send(sent)
        for number in range(len(OPS)):
            driver.blocked = number >= 2
            issue(recorder, groups, number)
    recorder.enter("the mean of all ranks' losses, behind all ops")
    lanes: Any = Streams({0: True, 2: False})
    found = HangReport(1, recorder, groups, lanes, device=True)
    (came,) = found.state.groups
    assert (came.issued, came.done, came.absent) == (2, 1, (0,))
    assert found.state.waits == ("act 0,1",)
    text = found.text().splitlines()
    assert text[0].startswith("rank 1: stuck for 0 s in the mean of all ranks' losses, behind all ops")
    waits = text[1].startswith("  waits for activation 2 of edge 0→1, recv act m1 c0")
    assert waits, text[1]
    assert text[1].endswith("by flags in memory for rank 0")
    assert text[-3] == "  exchanges known to be over: 1 of 2 of recv_act"
    missing = "rank 0 has not sent activation 2 of edge 0→1 (recv act m1 c0 on rank 1), and did not say what it does"
    assert text[-2].startswith(
        f"hocket: rank 1 makes no progress: {missing}; fix: look at that rank and at the network"
    )
    assert text[-1].startswith(STATE)
    assert any("plan.graphs = off" in line for line in text) == replayed
    line = culprit({1: found.state}, {0})
    assert line == (
        "rank 0 has not sent activation 2 of edge 0→1 (recv act m1 c0 on rank 1), and did not say what it does"
    )
    if not replayed:
        assert found.state.at == ("op 2: recv act m1 c0",)
        blind = HangReport(1, recorder, groups, lanes, device=False)
        assert (blind.state.at, blind.state.waits) == ((), ())
        assert "exchanges known to be over: 0 of 2 of recv_act" in blind.text()


SENDS = [
    op
    for m in range(4)
    for op in (
        Op("fwd", "attn", m, 0, 1),
        Op("fwd", "unpermute", m, 0, 1),
        Op("send", "act", m, 0, lane="send_act", deps=(3 * m + 1,)),
    )
]
RECEIVES = [
    op for m in range(4) for op in (Op("recv", "act", m, 1, lane="recv_act"), Op("fwd", "attn", m, 1, 2, deps=(2 * m,)))
]


@pytest.mark.parametrize("stopped", ["host", "device"])
def test_a_rank_that_has_not_sent_over_the_edge_that_closes_the_ring_is_named(
    stopped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That edge has its ranks in another order than torch. Rank 1 has stopped behind the first of four sends."""
    memories = [torch.zeros(HALVES * 256 + FLAG_BYTES, dtype=torch.uint8) for _ in range(2)]
    for memory in memories:
        reset_flags(memory)
    driver, ranks = Streaming(), (1, 0)
    monkeypatch.setattr(p2p_copies, "Cuda", lambda: driver)
    monkeypatch.setattr(p2p_copies, "stream_handle", lambda device: 0)
    monkeypatch.setattr(p2p_copies.dist, "get_process_group_ranks", lambda group: [0, 1])

    def groups_with(rank: int, name: str) -> Groups:
        monkeypatch.setattr(p2p_copies, "shared_memory", lambda *_: (rank, memories, None))
        group: Any = "of both ranks"
        return groups_of(rank, name, ranks, p2p_copies.p2p_copies(group, ranks, 512, CPU, 1.0))

    receiving, sending = groups_with(0, "recv_act"), groups_with(1, "send_act")
    receiver, sender = Recorder(RECEIVES, receiving.begin), Recorder(SENDS, sending.begin)
    receiver.begin()
    sender.begin()

    for position in range(3):
        issue(sender, sending, position)
    for position in range(2):
        issue(receiver, receiving, position)
    driver.blocked = True
    for position in range(3, 5 if stopped == "host" else len(SENDS)):
        issue(sender, sending, position)
    if stopped == "host":
        sender.issue(5)  # and nothing of it is sent
    for position in range(2, len(RECEIVES)):
        issue(receiver, receiving, position)
    receiver.enter("the sum of the experts' loads")
    if stopped == "device":
        sender.enter("the sum of the experts' loads")
    waiting: Any = Streams({0: True, 2: False, 4: False, 6: False})
    busy: Any = Streams({1: True, 4: stopped == "host", 7: False, 10: False})  # a send leaves no event
    found = [
        HangReport(0, receiver, receiving, waiting, device=True),
        HangReport(1, sender, sending, busy, device=True),
    ]
    text = found[0].text()
    assert "waits for activation 2 of edge 1→0, recv act m1 c1: by flags in memory for rank 1\n" in text
    assert "exchanges known to be over: 1 of 4 of recv_act\n" in text
    assert "  waits for " not in found[1].text()
    missing = "rank 1 has not sent activation 2 of edge 1→0 (recv act m1 c1 on rank 0), and is stuck for 0 s "
    at = {
        "host": "at op 5: send act m1 c0, with the device at op 2: send act m0 c0 .. op 5: send act m1 c0",
        "device": "in the sum of the experts' loads; the last issued is op 11: send act m3 c0, with the device at "
        "op 3: fwd attn m1 c0 l1 .. op 4: fwd unpermute m1 c0 l1",
    }
    assert culprit({each.state.rank: each.state for each in found}, set()) == missing + at[stopped]
