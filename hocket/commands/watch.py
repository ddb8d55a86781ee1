"""`hocket watch`: the curves of a run in the terminal, as they grow."""

from __future__ import annotations

import shutil
import sys
import time
from itertools import zip_longest
from pathlib import Path

from rich.live import Live
from rich.text import Text

from hocket.settings.schema import show
from hocket.train.curves import History, Panel
from hocket.train.runs import run_of
from hocket_trace.chart import shown, text_chart

USAGE = """usage: hocket watch RUN [--once]

Draws the curves of a run as it goes on: loss, held-out loss, norm of the gradient, balance of experts, tokens per
second. RUN is the folder of a run, such as runs/tiny. It ends with the run, or with Ctrl-C; the run goes on.

  --once   draw once and end, as it does where the output is no terminal"""

EVERY = 2.0
"""Seconds between two drawings."""
_NARROW, _LOW, _HIGH = 64, 3, 12
"""Characters that a picture needs in its width; least and most lines of one."""


def run(words: list[str]) -> int:
    """Draw until the run ends."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    names = [word for word in words if word != "--once"]
    if len(names) != 1 or names[0].startswith("-"):
        raise ValueError(f"watch {' '.join(words)} (command line): takes one run; fix: hocket watch runs/NAME [--once]")
    history = History(Path(names[0]))
    try:
        history.update()
    except OSError as error:
        reason, fix = f"has no metrics ({error.strerror})", "the folder of a run that has done a step: hocket runs"
        raise ValueError(f"{names[0]} (command line): {reason}; fix: {fix}") from None
    if "--once" not in words and sys.stdout.isatty():
        follow(history)
    print(drawn(history, *shutil.get_terminal_size((120, 40))))
    return 0


def follow(history: History) -> None:
    """Draw on a screen of its own until the run ends, or Ctrl-C."""
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while run_of(history.folder).state == "running":
                width, height = live.console.size
                live.update(Text(drawn(history, width, height), no_wrap=True), refresh=True)
                time.sleep(EVERY)
                history.update()
    except (KeyboardInterrupt, FileNotFoundError):  # a run that starts over puts its file aside for a moment
        pass


def drawn(history: History, width: int, height: int) -> str:
    """All curves as text that fits `width` x `height` characters, where they can be that small."""
    about, panels = run_of(history.folder), history.panels()
    beside = 2 if width >= 2 * _NARROW and len(panels) > 1 else 1
    rows = -(-len(panels) // beside)
    high = min(max((height - 2) // max(rows, 1) - 2, _LOW), _HIGH)
    wide = (width - 2 * (beside - 1)) // beside
    of = f" of {about.steps}" if about.steps else ""
    state = "".join(f", {text}" for text in (about.state, history.rewound) if text)
    lines = [f"{show(about.name)}: step {about.step}{of}{state}"[:width]]
    blocks = [_block(history, panel, wide, high) for panel in panels]
    for first in range(0, len(blocks), beside):
        pairs = zip_longest(*blocks[first : first + beside], fillvalue="")
        lines += ["  ".join(f"{piece:{wide}}" for piece in pieces).rstrip() for pieces in pairs]
    return "\n".join(lines)


def _block(history: History, panel: Panel, width: int, height: int) -> list[str]:
    """A title with the last values, the curve, and a blank line."""
    last = [shown(value) for name in (panel.name, panel.also) if name and (value := history.last(name)) is not None]
    marks = history.curve(panel.also) if panel.also else None
    title = f"{panel.title}  {', '.join(last)}"
    return [title[:width], *text_chart(history.curve(panel.name), marks, width, height), ""]
