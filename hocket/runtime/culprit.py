"""Finds the rank that causes a hang: other ranks wait for it, and it waits for no rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hocket.runtime.exchanges import Came, RankState

Waits = dict[int, tuple[Came, int]]
"""What one rank waits for: awaited rank -> (the exchange as the waiting rank sees it, the number of the first exchange
that the awaited rank has not come to)."""


def culprit(states: Mapping[int, RankState], others: Collection[int]) -> str:
    """One line that names the rank for which the others wait. `states` are of ranks that reported; `others` did not."""
    newest = max((state.step for state in states.values()), default=0)
    waits = {rank: _waits(state, states, newest) for rank, state in states.items()}
    awaited = [rank for found in waits.values() for rank in found]
    ends = [rank for rank in awaited if not waits.get(rank)]
    if ends:
        end = max(sorted(set(ends)), key=lambda rank: (rank in others, ends.count(rank)))
        rank = next(rank for rank, found in waits.items() if end in found)
        return f"rank {end} {_missing(rank, *waits[rank][end])}, and {_does(end, states)}"
    if awaited:
        circle = _circle(waits)
        legs = [f"rank {a} waits for rank {b}, which {_missing(a, *waits[a][b])}" for a, b in circle]
        busy = [f"rank {a} is at {' or '.join(states[a].doubts)}" for a, _ in circle if states[a].doubts]
        unless = f", unless {' or '.join(busy)}" if busy else ""
        return f"ranks wait in a circle: {'; '.join(legs)}{unless}"
    if others:
        return f"rank {min(others)} did not say what it does, and no rank is known to wait for another"
    busy = [state for state in states.values() if not state.waits and state.at]
    if busy:
        return f"rank {busy[0].rank} {_does(busy[0].rank, states)}"
    return "no rank is known to be behind another one"


def _waits(state: RankState, states: Mapping[int, RankState], newest: int) -> Waits:
    found: Waits = {}
    if state.step < newest:  # other ranks have passed everything that this rank still does
        return found
    for key in state.waits:
        came = state.came(key)
        assert came is not None
        for rank in came.absent or came.ranks:
            if rank == state.rank:
                continue
            other = states.get(rank)
            if other is None:
                found.setdefault(rank, (came, came.done + 1))
                continue
            theirs = other.came(key)
            reached = theirs.reached if theirs is not None and other.step == state.step else 0
            if reached < came.until:
                found.setdefault(rank, (came, reached + 1))
            elif rank in came.absent:
                found.setdefault(rank, (came, came.done + 1))
    return found


def _missing(rank: int, came: Came, number: int) -> str:
    """What the awaited rank has not done. `rank` is the rank that waits."""
    what = {"recv": "has not sent", "send": "has not received"}.get(came.name.split("_")[0], "has not come to")
    op = f" ({came.what} on rank {rank})" if number == came.done + 1 and came.what else ""
    return f"{what} {came.thing(number)}{op}"


def _does(rank: int, states: Mapping[int, RankState]) -> str:
    """What a rank does instead of waiting for another."""
    state = states.get(rank)
    if state is None:
        return "did not say what it does"
    at = [op for op in state.at if op not in state.where]
    return f"is {state.where}{', with the device at ' if at else ''}{'; '.join(at)}"


def _circle(waits: Mapping[int, Waits]) -> Sequence[tuple[int, int]]:
    """Pairs (waiting rank, awaited rank) that form a circle. Every awaited rank waits too, so there is a circle."""
    rank = next(rank for rank, found in waits.items() if found)
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        rank = min(waits[rank])
    circle = path[path.index(rank) :]
    return list(zip(circle, [*circle[1:], rank], strict=True))
