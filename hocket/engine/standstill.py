"""What a rank does and waits for when a step stands still, from its ops, its groups and the flags in memory.

Note: [Who waits for whom]
Ops tell where the lanes stand, as far as it is known which are complete (`runtime/hangs.py`). A lane that stands at
ops which have called groups waits in the first of these exchanges that is not over; one that stands at other ops is
busy. Where ranks wait for flags in memory, these say more: how many exchanges are over, and whose word is missing. Of a
step that is replayed nothing is known of ops, and words are all there is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from hocket.runtime.comm import Group, Groups
from hocket.runtime.hangs import ALONE, Came, Issued, RankState, Recorder, Stands, Told, culprit
from hocket.runtime.lanes import Lanes

SHOWN = 5
"""Ops of a kind that a report names."""

WHOLE = "its ops were issued as one graph, so none is known to be reached; plan.graphs = off shows which one hangs"
"""What is known of a replayed step."""


class Standstill:
    """A step of one rank that stands still. Asks each thing once, and the device only if it may."""

    def __init__(self, rank: int, recorder: Recorder, groups: Groups, lanes: Lanes, device: bool) -> None:
        self._recorder, self._groups = recorder, groups
        self._device, self._now = device, time.monotonic()
        ops = recorder.ops
        self._known = device and not recorder.replayed  # else nothing tells which ops are complete
        issued = recorder.issued if self._known else []
        streams = lanes.needs_rehearsal
        self._stands = Stands(ops, issued, lambda op, position: lanes.completed(op.lane, position), streams)
        self._at = self._stands.at()
        standing = {position for positions in self._at for position in positions}
        came = [each for group in groups if group.name in recorder.exchanges for each in self._came(group, standing)]
        self.state = RankState(
            rank,
            groups.steps,
            recorder.where(),
            at=tuple(map(self._ops, self._at)),
            doubts=tuple(map(self._ops, self._stands.doubts)),
            waits=tuple(each.key for each, waits in came if waits),
            groups=tuple(each for each, _ in came if each.issued),
        )

    def _came(self, group: Group, standing: Collection[int]) -> list[tuple[Came, bool]]:
        """How far the rank has come with a group's exchanges, and whether it waits in one."""
        issued, words, found = self._recorder.exchanges[group.name], group.words, list[tuple[Came, bool]]()
        told = words.told(issued.marks, self._recorder.replayed) if words and self._device else None
        if told is not None and told.turns is not None:
            found.append(self._tokens(group, told, standing))
            told = None
        return [*found, self._calls(group, issued, told, standing)]

    def _calls(self, group: Group, issued: Issued, told: Told | None, standing: Collection[int]) -> tuple[Came, bool]:
        calls = list(issued.calls)
        if self._recorder.replayed and group.issued is not None:
            calls += group.issued.calls  # behind the replay
        ops = [self._recorder.at(when) for _, when in calls]
        count, stands = len(calls), self._stands
        done, reached = 0, count
        if self._known:
            done = next((i for i, p in enumerate(ops) if p is None or stands.open(p)), count)
            begun = [i for i, p in enumerate(ops) if p is not None and (not stands.open(p) or stands.reached(p))]
            reached = begun[-1] + 1 if begun else 0
        counted = told is not None and told.done is not None
        if told is not None and told.done is not None:
            done, reached = told.done, max(reached, told.done)
        names = [self._name(*each) for each in zip(calls, ops, strict=True)]
        absent = tuple(group.ranks[rank] for rank in told.absent) if told else ()
        came = Came(
            group.name,
            group.key,
            group.ranks,
            count,
            reached,
            done,
            until=max((i + 1 for i, p in enumerate(ops) if done < count and p == ops[done]), default=count),
            what=names[done] if done < count else "",
            seconds=self._now - calls[done][1] if done < count and self._known else 0.0,
            last=names[-1] if names else "",
            absent=absent,
            told=told.text if told else "",
        )
        if done == count or not self._known:
            return came, done < count and bool(absent)
        return came, ops[done] in standing and (bool(absent) or not counted)

    def _tokens(self, group: Group, told: Told, standing: Collection[int]) -> tuple[Came, bool]:
        """Of pieces that tensor-parallel ranks exchange in the middle of ops, by copies."""
        assert told.turns is not None
        assert told.done is not None
        reached, count = told.turns
        absent = tuple(group.ranks[rank] for rank in told.absent)
        key, what = f"tokens {group.key}", "tokens, piece by piece"
        came = Came(
            f"{group.name} tokens",
            key,
            group.ranks,
            count,
            reached,
            told.done,
            until=told.done + 1,
            what=what,
            last=what,
            absent=absent,
            told=told.text,
        )
        ops = self._recorder.ops
        return came, bool(absent) and (self._recorder.replayed or any(ops[p].lane == "compute" for p in standing))

    def _name(self, call: tuple[str, float], position: int | None) -> str:
        """An exchange, by its op if it has one of its own."""
        if position is None:
            return call[0]
        op = self._recorder.ops[position]
        return f"{op}" if op.verb in ("send", "recv") else f"{call[0]} in {op}"

    def _ops(self, positions: Sequence[int]) -> str:
        """Some ops that follow each other."""
        ends = positions if len(positions) < 2 else (positions[0], positions[-1])
        return " .. ".join(f"op {p}: {self._recorder.ops[p]}" for p in ends)

    def text(self) -> str:
        """The report of the rank: lines for persons, then one for programs."""
        state, ops = self.state, self._recorder.ops
        lines = [f"rank {state.rank}: {state.where}"]
        for key in state.waits:
            came = state.came(key)
            assert came is not None
            since = f", issued {came.seconds:.0f} s ago" if came.seconds else ""
            whom = ", ".join(str(rank) for rank in came.absent or came.ranks if rank != state.rank)
            by = "by flags in memory" if came.absent else "as it seems"
            lines.append(f"  waits for {came.thing(came.done + 1)}, {came.what}{since}: {by} for rank {whom}")
        lines += [f"  stands at {text}" for text in state.at]
        lines += [f"  or at {text}, of which nothing tells whether they are complete" for text in state.doubts]
        if self._recorder.replayed:
            lines.append(f"  {WHOLE}")
        elif self._known:
            done, left = [], []
            for position in self._recorder.issued:
                (left if self._stands.open(position) else done).append(f"{position} {ops[position]}")
            lines.append("  last completed: " + ("; ".join(done[-SHOWN:]) or "nothing known"))
            if left:
                lines.append("  issued, not known to be complete: " + "; ".join(left[:SHOWN]))
        lines += [f"  exchanges of {came.line()}" for came in state.groups]
        return "\n".join([*lines, self._verdict(), state.as_line()])

    def _verdict(self) -> str:
        """What this rank alone can say of the cause: its whole report where no parent puts all of them together."""
        rank = self.state.rank
        others = {other for came in self.state.groups for other in came.ranks} - {rank}
        fix = "look at that rank and at the network between, or raise train.hang_timeout"
        return f"{ALONE}{rank} makes no progress: {culprit({rank: self.state}, others)}; fix: {fix}"
