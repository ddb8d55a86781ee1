"""Who runs beside whom."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

from tests.helpers.turns import turn

LIMIT = 20.0


class Guest(threading.Thread):
    """Comes to the door, and leaves the room when told."""

    def __init__(self, folder: Path, alone: bool = False) -> None:
        super().__init__(daemon=True)
        self.folder, self.alone = folder, alone
        self.inside, self.leave = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with turn(self.folder, self.alone):
            self.inside.set()
            self.leave.wait(LIMIT)

    def enters(self) -> bool:
        return self.inside.wait(LIMIT)

    def goes(self) -> None:
        self.leave.set()
        self.join(LIMIT)


def somebody_is_at_the_door(folder: Path) -> bool:
    with (folder / "door").open("w") as door:
        try:
            fcntl.flock(door, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_ordinary_tests_are_inside_together(tmp_path: Path) -> None:
    guests = [Guest(tmp_path) for _ in range(3)]
    assert all(guest.enters() for guest in guests)
    for guest in guests:
        guest.goes()


def test_who_wants_to_be_alone_waits_for_the_others_and_is_passed_by_none(tmp_path: Path) -> None:
    before = Guest(tmp_path)
    assert before.enters()
    alone = Guest(tmp_path, alone=True)
    while not somebody_is_at_the_door(tmp_path):
        time.sleep(0.01)
    behind = Guest(tmp_path)
    time.sleep(0.1)
    assert not alone.inside.is_set()
    assert not behind.inside.is_set()
    before.goes()
    assert alone.enters()
    time.sleep(0.1)
    assert not behind.inside.is_set()
    alone.goes()
    assert behind.enters()
    behind.goes()
