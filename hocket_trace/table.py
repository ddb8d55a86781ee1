"""A report for a terminal: what a step costs in one sentence, then where its time goes, from the whole to the detail.

Everything printed comes from `as_json.to_json`, so the table, the page and `--json` have the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hocket_trace.as_json import by_launcher, to_json
from hocket_trace.columns import (
    UNKNOWN,
    Line,
    bar,
    counted,
    duration,
    grid,
    line,
    milliseconds,
    number,
    percent,
    plain,
    rate,
    short_kernel,
    size,
    wrapped,
)
from hocket_trace.data import Report, Tax

Figures = Mapping[str, Any]
"""What `to_json` returns, or a part of it."""

_LAYERS, _LAUNCHERS, _KERNELS, _CLASSES, _OPS = 8, 10, 3, 8, 8
"""Rows that a table has at most; what is left out is summed up in one row."""

_TOGETHER = 44
"""An op with a single kernel shares its line with it up to this length."""

PARTS = (
    ("alone", "compute alone", "compute", ""),
    ("beside", "compute + comm.", "both", "communication hidden behind compute"),
    ("exposed", "exposed comm.", "exposed", "communication, and no compute beside it"),
    ("host_bound", "host late", "late", "nothing runs: the next kernel is not launched yet"),
    ("rest", "idle", "idle", "nothing runs: the next kernel waits for another lane or rank"),
)
"""What a step consists of: name, title, colour, explanation. `rest` is idle without host bound."""

OP_HEADS = ("op, and kernels it launched", "class", "count", "time", "of step", "exposed")

STYLES = {"compute": "bright_blue", "both": "blue", "exposed": "bold red", "late": "yellow", "idle": "dim"}


def render(report: Report, tax: Tax | None = None, width: int = 100) -> str:
    """The report as plain text, `width` characters wide; below 72 tables keep their own width."""
    return plain(table(to_json(report, tax), width))


def table(figures: Figures, width: int = 100) -> list[Line]:
    """The lines of the report, with styles."""
    notes = _indented([f"- {note}" for note in figures["notes"]], width)
    blocks = [
        title(figures, width),
        [one for text in warnings(figures) for one in wrapped(text, width, "bold white on red")],
        wrapped(headline(figures), width),
        _whole(figures, width),
        *(_section(one, width) for one in sections(figures, short=True)),
        [_head("Notes", ""), *notes] if notes else [],
    ]
    return [one for block in blocks if block for one in (*block, line())][:-1]


class Row(NamedTuple):
    """Cells of a table; a kernel stands below the op that launched it, and has a whole name."""

    cells: Sequence[str]
    kernel: str = ""


@dataclass(frozen=True)
class Section:
    """A table of a report, with its head and what its numbers are, and sentences before and behind it."""

    head: str
    about: str
    heads: Sequence[str]
    rows: Sequence[Row]
    before: Sequence[str] = ()
    behind: Sequence[str] = ()
    more: str = ""
    """What is left out where there is not room for all."""


def sections(figures: Figures, short: bool) -> list[Section]:
    """The tables of a report; `short` for a terminal, which has room for a few rows of each."""
    balance, tax = imbalance_text(figures), figures["tax"]
    found = [
        Section("Ranks", "milliseconds a step", *rank_rows(figures), behind=[balance] if balance else []),
        Section("Communication", "per step of one rank; milliseconds", *kind_rows(figures)),
    ]
    if any(row["exposed_seconds"] for row in figures["layers"]):
        heads, rows = layer_rows(figures)
        head, shown = "Layers with the most exposed communication", _LAYERS if short else len(rows)
        found.append(Section(head, "milliseconds", heads, rows[:shown], more=_more(len(rows) - shown, "layer")))
    groups = by_launcher(figures["ops"])
    shown, kernels = (_LAUNCHERS, _KERNELS) if short else (2 * _LAUNCHERS, _KERNELS + 1)
    rows = [row for group in groups[:shown] for row in _op_rows(*group, kernels)]
    more = _more(len(groups) - shown, "op")
    found.append(Section("Costliest ops", "summed, per step of one rank; milliseconds", OP_HEADS, rows, more=more))
    if tax:
        classes, ops = (_CLASSES, _OPS) if short else (None, None)
        left = sum(len(tax[name][most:]) for name, most in (("classes", classes), ("ops", ops)) if most)
        more = _more(left, "class or op", "classes and ops")
        notes = [f"- {note}" for note in tax["notes"]]
        head = "Tax of communication"
        found.append(
            Section(head, "milliseconds", *tax_rows(tax, classes, ops), [tax_text(tax)], notes, more),
        )
    return [one for one in found if one.rows]


def title(figures: Figures, width: int) -> list[Line]:
    """What was measured."""
    ranks, steps = figures["ranks"], figures["steps"]
    of = f" of {figures['world']}" if figures["world"] > len(ranks) else ""
    what = [
        f"rank {ranks[0]}{of}" if len(ranks) == 1 else f"{len(ranks)}{of} ranks",
        figures["device"],
        figures["transport"],
        f"steps {span(steps)}" if len(steps) > 1 else f"step {span(steps)}",
    ]
    return wrapped("hocket trace: " + ", ".join(filter(None, what)), width, "bold")


def span(numbers: Sequence[int]) -> str:
    """Numbers of steps: `10-12` or `3, 5, 7`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def warnings(figures: Figures) -> list[str]:
    """What must not be overlooked: that a run is no training, or its network an imitation."""
    found = []
    if figures["null_transport"]:
        found.append("NULL TRANSPORT: no communication, not training. The bound that other runs are compared with.")
    if figures["emulated"]:
        found.append("EMULATED NETWORK: an imitated link, not a real one. No time here is a property of hardware.")
    return found


def headline(figures: Figures) -> str:
    """The report in a few sentences."""
    step, tax = figures["step"], figures["tax"]
    if step["rank_seconds"] == 0:
        return "The traces contain no step."
    if not step["communication_seconds"]:
        text = f"A step takes {duration(step['step_seconds'])}, without any communication."
    else:
        text = (
            f"A step takes {duration(step['step_seconds'])}. Communication is exposed for "
            f"{duration(step['exposed_seconds'])} ({percent(step['exposed_share'])})"
        )
        if step["exposed_waiting_seconds"]:
            text += f", in {duration(step['exposed_waiting_seconds'])} of which it only waits for late peers"
        text += f": {percent(step['hidden_fraction'])} of it is hidden."
    text += f" No compute runs for {duration(step['absent_seconds'])} ({percent(step['absent_share'])})"
    if step["host_bound_seconds"]:
        late = percent(step["host_bound_share"])
        text += f", in {duration(step['host_bound_seconds'])} of which the host is late ({late})"
    text += "."
    if tax:
        text += f" Without communication a step takes {duration(tax['null_step_seconds'])}:"
        text += f" the tax is {percent(tax['tax_share'])}."
    return text


def step_parts(step: Figures) -> list[tuple[str, str, str, float, float, str]]:
    """(name, title, colour, seconds, share, explanation) of what a step consists of; the shares add up to 1."""
    rest = step["idle_seconds"] - step["host_bound_seconds"]
    whole = step["rank_seconds"] or 1.0
    out = []
    for name, words, color, about in PARTS:
        seconds = rest if name == "rest" else step[f"{name}_seconds"]
        out.append((name, words, color, seconds, seconds / whole, about))
    return out


def rank_rows(figures: Figures) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of ranks. Times are milliseconds."""
    heads = ["rank", "step", "compute", "comm.", "exposed", "of step", "hidden", "late peers", "host late", "idle"]
    rows = []
    for row in figures["by_rank"]:
        names = ("rank", "compute", "communication", "exposed")  # a rank's own seconds are those of its step
        times = [milliseconds(row[f"{name}_seconds"]) for name in names]
        shares = [percent(row["exposed_share"]), percent(row["hidden_fraction"])]
        more = [milliseconds(row[f"{name}_seconds"]) for name in ("waiting", "host_bound", "idle")]
        rows.append(Row([str(row["rank"]), *times, *shares, *more]))
    return heads, rows


def kind_rows(figures: Figures) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of kinds of communication. Times are milliseconds."""
    heads = ["kind", "count", "time", "late peers", "bytes", "bus GB/s", "exposed", "hidden", "of step"]
    rows = []
    for row in figures["kinds"]:
        times = [milliseconds(row["seconds"]), milliseconds(row["waiting_seconds"])]
        moved = [size(row["bytes"]), rate(row["bandwidth_bytes_per_second"])]
        shown = [milliseconds(row["exposed_seconds"]), percent(row["hidden_fraction"]), percent(row["counted_share"])]
        rows.append(Row([row["kind"], number(row["count"]), *times, *moved, *shown]))
    return heads, rows


def layer_rows(figures: Figures) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of layers, the most exposed first. Times are milliseconds."""
    heads = ["layer", "exposed", "time", "hidden", "bytes", "most exposed"]
    rows = []
    for row in figures["layers"]:
        most = max(row["kinds"], key=lambda kind: kind["exposed_seconds"])
        kind = f"{most['kind']} {milliseconds(most['exposed_seconds'])}" if most["exposed_seconds"] else ""
        times = [milliseconds(row["exposed_seconds"]), milliseconds(row["seconds"]), percent(row["hidden_fraction"])]
        rows.append(Row([f"layer {row['layer']}", *times, size(row["bytes"]), kind]))
    return heads, rows


def imbalance_text(figures: Figures) -> str:
    """A sentence about differences between ranks; empty for one rank."""
    found = figures["imbalance"]
    if found["slowest_rank"] is None:
        return ""
    if found["compute_spread"] < 0.001:
        text = "Balance: all ranks compute for the same time, within 0.1 %."
    else:
        text = (
            f"Imbalance: ranks compute for times that differ by up to {percent(found['compute_spread'])}, rank "
            f"{found['slowest_rank']} longest and rank {found['fastest_rank']} shortest."
        )
    if found["awaited_rank"] is not None:
        text += f" Rank {found['awaited_rank']} waits least for late peers: the others wait for it."
    return text


def tax_rows(tax: Figures, classes: int | None = None, ops: int | None = None) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of the tax, in milliseconds: all kernels, their first classes, the first ops."""
    heads = ["kernels", "with communication", "without", "slow-down"]
    by_class = _slowdown_rows([tax["contention"]], "name") + _slowdown_rows(tax["classes"][:classes], "class")
    by_op = _slowdown_rows(tax["ops"][:ops], "name")
    return heads, [*by_class, *([Row(["the same, by op", "", "", ""]), *by_op] if by_op else [])]


def _slowdown_rows(rows: Sequence[Figures], key: str) -> list[Row]:
    """Name, milliseconds with and without communication, and how much longer it takes."""
    found = []
    for row in rows:
        longer = UNKNOWN if row["slowdown_share"] is None else f"{row['slowdown_share'] * 100:+.1f} %"
        found.append(Row([row[key], milliseconds(row["seconds"]), milliseconds(row["null_seconds"]), longer]))
    return found


def _whole(figures: Figures, width: int) -> list[Line]:
    """A bar for each part of a step."""
    step = figures["step"]
    if not step["rank_seconds"]:
        return []
    about = f"mean of {counted(len(figures['ranks']), 'rank')} and {counted(len(figures['steps']), 'step')}"
    if len(figures["by_rank_and_step"]) == 1:
        about = ""
    lines: list[Line] = []
    room = max(width - 47, 12)
    for _, words, color, seconds, share, text in step_parts(step):
        start = (f"  {words:19}{milliseconds(seconds):>9} ms {percent(share):>8}  ", "")
        drawn = bar(share, room)
        fits = len(drawn) + len(text) + 2 <= room
        lines.append((start, (drawn, STYLES[color]), (f"  {text}" if text and fits else "", "dim")))
    return [_head("Where a step goes", about), *lines]


def _op_rows(total: Figures, kernels: Sequence[Figures], most: int) -> Iterator[Row]:
    """An op that launched kernels, and those that take longest."""
    name = total["launcher"] or "(launcher not known)"
    if len(kernels) == 1:  # once if they have one name, as on a CPU
        short = short_kernel(kernels[0]["kernel"])
        both = name if name.endswith(short) else f"{name}: {short}"
        name, kernels = (both, []) if len(both) <= _TOGETHER else (name, kernels)
    yield Row([name, *_op_cells(total)])
    yield from (Row([short_kernel(one["kernel"]), *_op_cells(one)], one["kernel"]) for one in kernels[:most])


def _op_cells(row: Figures) -> list[str]:
    """Class or kind, count, milliseconds, share of a step, and of communication milliseconds exposed."""
    exposed = milliseconds(row["exposed_seconds"]) if row["kind"] != "compute" else ""
    cells = [number(row["count"]), milliseconds(row["seconds"]), percent(row["step_share"]), exposed]
    return [row["class"] or row["kind"], *cells]


def tax_text(tax: Figures) -> str:
    """What communication costs, and where it shows."""
    words = {"compute": "longer kernels", "exposed": "exposed communication", "host_bound": "late host", "idle": "idle"}
    parts = ", ".join(f"{words.get(p['part'], p['part'])} {p['seconds'] * 1e3:+.2f}" for p in tax["parts"])
    longer = (tax["step_seconds"] - tax["null_step_seconds"]) * 1e3
    change = "longer" if longer >= 0 else "shorter"
    return f"A step is {abs(longer):.2f} ms {change} than without communication: {parts} ms."


def _section(one: Section, width: int) -> list[Line]:
    rows = [["  " * bool(row.kernel) + row.cells[0], *row.cells[1:]] for row in one.rows]
    body = [
        *_indented(one.before, width),
        *grid(one.heads, rows, width, ["dim" * bool(row.kernel) for row in one.rows]),
    ]
    more = [line(f"  {one.more}", "dim")] if one.more else []
    return [_head(one.head, one.about), *body, *more, *_indented(one.behind, width)]


def _head(head: str, about: str) -> Line:
    return ((head, "bold"), (f"  {about}" if about else "", "dim"))


def _indented(texts: Sequence[str], width: int) -> list[Line]:
    """Paragraphs; what begins with a dash hangs from it."""
    hang = {text: "  " if text.startswith("- ") else "" for text in texts}
    return [(("  ", ""), *one) for text in texts for one in wrapped(text, width - 2, hang=hang[text])]


def _more(left: int, one: str, many: str = "") -> str:
    """How many rows are not shown."""
    return f"and {left} more {one if left == 1 else many or one + 's'}: see --json" if left > 0 else ""
