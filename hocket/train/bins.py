"""Whole documents in sequences: which of them share one, so that little is left over.

Best fit, the longest first: a document goes where the least room is left that still holds it (Johnson 1973,
Near-optimal bin packing algorithms). A document of n tokens takes n - 1 places: its last token, the separator, is only
a target.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def best_fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Numbers of the things in each bin. `sizes` are from 1 to `room`."""
    bins, left, open_by_room = list[list[int]](), list[int](), dict[int, list[int]]()
    rooms: list[int] = []  # keys of open_by_room, ascending
    for thing in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[thing])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            bins.append([])
            left.append(room)
            number = len(bins) - 1
        else:
            found = rooms[place]
            number = open_by_room[found].pop()
            if not open_by_room[found]:
                del open_by_room[found], rooms[place]
        bins[number].append(thing)
        left[number] -= size
        if rest := left[number]:
            if rest not in open_by_room:
                open_by_room[rest] = []
                insort(rooms, rest)
            open_by_room[rest].append(number)
    return bins
