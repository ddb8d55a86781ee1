"""Reports what each lane of a hung rank is doing or waiting for, from its ops, its groups and the flags in memory.

Note: [Who waits for whom]
Completion events tell how far each lane has come (`LaneProgress`). A lane whose current ops have called groups waits in
the first of these exchanges that is not complete. A lane whose current ops have called none is busy. Flags in memory
tell more: how many exchanges are complete, and which ranks have not set theirs. In a replayed step nothing is known of
ops, and flags are the only source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hocket.program.ops import Lane, Op
from hocket.runtime.comm import Group, Groups
from hocket.runtime.hangs import ALONE, FlagProgress, GroupProgress, Issued, RankState, Recorder, culprit
from hocket.runtime.lanes import Lanes

WHOLE = "its ops were issued as one graph, so none is known to be reached; plan.graphs = off shows which one hangs"
"""Printed for a replayed step."""


class LaneProgress:
    """How far each lane of a rank has come. Positions are indices into the rank's list of ops.

    An op that no other lane waits for records no event, so its completion cannot be observed. But a lane runs in order:
    all ops before a complete one are complete too. Ops after the last op known to be complete are *open*. A lane may be
    at any of its open ops, up to the first whose event has not fired. If one of these waits for an open op of another
    lane, this lane waits there. Otherwise the lane *is at* these ops; which one is unknown.
    """

    def __init__(
        self, ops: Sequence[Op], issued: Sequence[int], completed: Callable[[Op, int], bool | None],
        streams: bool = True,
    ) -> None:  # fmt: skip
        """`issued`: positions in issue order. The last op may have been issued only in part.

        `completed` says whether any other op is complete; None if unknown. `streams`: a lane's ops run one after
        another, rather than when the host issues them.
        """
        self._ops, self._streams, self._issued = ops, streams, issued
        self._lanes: dict[Lane, list[int]] = {}
        self._index: dict[int, int] = {}
        for position in issued:
            lane = self._lanes.setdefault(ops[position].lane, [])
            self._index[position] = len(lane)
            lane.append(position)
        self._complete: dict[Lane, int] = dict.fromkeys(self._lanes, 0)
        """How many ops of each lane are known to be complete."""
        self._begun = {lane: len(positions) for lane, positions in self._lanes.items()}
        """How many may have begun, judged by the lane's own events."""
        for lane, positions in self._lanes.items():
            for count in range(len(positions), 0, -1):
                position = positions[count - 1]
                known = completed(ops[position], position) if position != issued[-1] else None
                if known:
                    self._complete[lane] = count
                    break
                if known is False:
                    self._begun[lane] = count

    def open(self, position: int) -> bool:
        """Whether an issued op is not known to be complete."""
        return self._index[position] >= self._complete[self._ops[position].lane]

    def reached(self, position: int) -> bool:
        """Whether an op may have begun."""
        lane = self._ops[position].lane
        blocked = next((p for p in self._open_ops(lane) if self._waits_for(p)), None)
        end = self._begun[lane] if blocked is None else self._index[blocked]
        return not self._streams or self._index[position] < end

    def _waits_for(self, position: int) -> list[int]:
        """Open ops of other lanes that this op waits for."""
        return [p for p in self._ops[position].deps if p in self._index and self.open(p)]

    def _open_ops(self, lane: Lane, up_to: int = -1) -> list[int]:
        """Open ops that a lane may be at, judged by its own events; none after `up_to` if that is given."""
        end = self._begun[lane] if up_to < 0 else min(self._begun[lane], self._index[up_to] + 1)
        return self._lanes[lane][self._complete[lane] : end]

    def at(self) -> list[tuple[int, ...]]:
        """The ops that each lane which blocks this rank is at.

        Follows waits from the last issued op and from the compute lane. A lane that neither waits for is left out: a
        send to a late receiver, say, does not block this rank.
        """
        last = list(self._issued[-1:])
        seen, found = set[int](), dict[Lane, tuple[int, ...]]()
        left = [*last, *self._lanes.get("compute", [])[-1:]]
        while left:
            position = left.pop()
            if position in seen or not self.open(position):
                continue
            seen.add(position)
            lane = self._ops[position].lane
            before = [position] if position in last and not self._streams else self._open_ops(lane, position)
            waits = next((p for p in before if self._waits_for(p)), None)
            if waits is not None:
                left += self._waits_for(waits)
            elif lane not in found or len(before) < len(found[lane]):  # keep the shortest range that something awaits
                found[lane] = tuple(before)
        return list(found.values())


class HangReport:
    """The state of one rank in a hung step. Queries each thing once, and the device only if `device` is set."""

    def __init__(self, rank: int, recorder: Recorder, groups: Groups, lanes: Lanes, device: bool) -> None:
        self._recorder, self._device = recorder, device
        self._known = device and not recorder.replayed  # otherwise it is unknown which ops are complete
        issued = recorder.issued if self._known else []
        self._lane_progress = LaneProgress(
            recorder.ops, issued, lambda op, position: lanes.completed(op.lane, position), lanes.needs_rehearsal
        )
        at = self._lane_progress.at()
        current = {position for positions in at for position in positions}
        progress = [
            each for group in groups if group.name in recorder.exchanges for each in self._progress(group, current)
        ]
        self.state = RankState(
            rank,
            groups.steps,
            recorder.where(),
            at=tuple(map(self._ops, at)),
            waits=tuple(each.key for each, waits in progress if waits),
            groups=tuple(each for each, _ in progress if each.issued),
        )

    def _progress(self, group: Group, current: Collection[int]) -> list[tuple[GroupProgress, bool]]:
        """Progress of this rank in a group's exchanges, and whether it waits in one."""
        issued, flags, ops = self._recorder.exchanges[group.name], group.flags, self._recorder.ops
        seen = flags.progress(issued.marks, self._recorder.replayed) if flags and self._device else None
        if seen is None or seen.turns is None:
            return [self._calls(group, issued, seen or FlagProgress(), current)]
        # Pieces that tensor-parallel ranks copy to each other inside an op are not calls of the group.
        assert seen.done is not None
        (reached, count), absent = seen.turns, tuple(group.ranks[rank] for rank in seen.absent)
        name, key, what = f"{group.name} tokens", f"tokens {group.key}", "tokens, piece by piece"
        tokens = GroupProgress(name, key, group.ranks, count, reached, seen.done, seen.done + 1, what, absent)
        computes = self._recorder.replayed or any(ops[p].lane == "compute" for p in current)
        return [(tokens, bool(absent) and computes), self._calls(group, issued, FlagProgress(), current)]

    def _calls(
        self, group: Group, issued: Issued, seen: FlagProgress, current: Collection[int]
    ) -> tuple[GroupProgress, bool]:
        calls, lanes = list(issued.calls), self._lane_progress
        if self._recorder.replayed and group.issued is not None:
            calls += group.issued.calls  # issued after the replay
        ops = [self._recorder.at(when) for _, when in calls]
        count = len(calls)
        done, reached = 0, count
        if self._known:
            done = next((i for i, p in enumerate(ops) if p is None or lanes.open(p)), count)
            begun = [i for i, p in enumerate(ops) if p is not None and (not lanes.open(p) or lanes.reached(p))]
            reached = begun[-1] + 1 if begun else 0
        if seen.done is not None:
            done, reached = seen.done, max(reached, seen.done)
        absent = tuple(group.ranks[rank] for rank in seen.absent)
        until = max((i + 1 for i, p in enumerate(ops) if done < count and p == ops[done]), default=count)
        what = self._name(calls[done][0], ops[done]) if done < count else ""
        progress = GroupProgress(group.name, group.key, group.ranks, count, reached, done, until, what, absent)
        if done == count or not self._known:
            return progress, done < count and bool(absent)
        return progress, ops[done] in current and (bool(absent) or seen.done is None)

    def _name(self, call: str, position: int | None) -> str:
        """Names an exchange, by its op if the op makes no other."""
        op = None if position is None else self._recorder.ops[position]
        return call if op is None else f"{op}" if op.verb in ("send", "recv") else f"{call} in {op}"

    def _ops(self, positions: Sequence[int]) -> str:
        """A range of consecutive ops as text."""
        ends = positions if len(positions) < 2 else (positions[0], positions[-1])
        return " .. ".join(f"op {p}: {self._recorder.ops[p]}" for p in ends)

    def text(self) -> str:
        """The report of the rank: lines for people, then one for programs.

        The line before the last names the cause as far as this rank alone can tell, for runs whose parent process does
        not merge the reports.
        """
        state, rank = self.state, self.state.rank
        lines = [f"rank {rank}: {state.where}"]
        for progress in state.waiting():
            whom = ", ".join(str(other) for other in progress.absent or progress.ranks if other != rank)
            by = "by flags in memory" if progress.absent else "as it seems"
            lines.append(f"  waits for {progress.as_text(progress.done + 1)}, {progress.what}: {by} for rank {whom}")
        lines += [f"  is at {text}" for text in state.at]
        lines += [f"  {WHOLE}"] if self._recorder.replayed else []
        over = ", ".join(f"{progress.done} of {progress.issued} of {progress.name}" for progress in state.groups)
        lines += [f"  exchanges known to be over: {over}"] if over else []
        others = {other for progress in state.groups for other in progress.ranks} - {rank}
        fix = "look at that rank and at the network between, or raise train.hang_timeout"
        lines.append(f"{ALONE}{rank} makes no progress: {culprit({rank: state}, others)}; fix: {fix}")
        return "\n".join([*lines, state.as_line()])
