"""A report for a terminal: a summary of the step, then where its time goes, from the whole to the detail.

All numbers come from `as_json.to_json`, so the table, the page and `--json` agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hocket_trace.as_json import to_json
from hocket_trace.columns import (
    UNKNOWN,
    bar,
    counted,
    duration,
    grid,
    milliseconds,
    number,
    percent,
    rate,
    size,
    wrapped,
)
from hocket_trace.data import Report, Tax

Figures = Mapping[str, Any]
"""What `to_json` returns, or a part of it."""

_MOST = 8
"""Most rows of layers, classes and ops in a terminal."""

PARTS = (
    ("alone", "compute alone", ""),
    ("beside", "compute + comm.", "communication hidden behind compute"),
    ("exposed", "exposed comm.", "communication, and no compute beside it"),
    ("host_bound", "host late", "nothing runs: the next kernel is not launched yet"),
    ("rest", "idle", "nothing runs: the next kernel waits for another lane or rank"),
)
"""The parts of a step: name, title, explanation. `rest` is idle without host bound."""


def render(report: Report, tax: Tax | None = None, width: int = 100) -> str:
    """The report as text, `width` characters wide; below 72 tables keep their own width."""
    return table(to_json(report, tax), width)


def table(figures: Figures, width: int = 100) -> str:
    """The same, from a report's figures."""
    notes = _indented([f"- {note}" for note in figures["notes"]], width)
    blocks = [
        wrapped(title(figures), width),
        [one for text in warnings(figures) for one in wrapped(text, width)],
        wrapped(headline(figures), width),
        _whole(figures, width),
        *(_section(one, width) for one in sections(figures, _MOST)),
        ["Notes", *notes] if notes else [],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


Row = list[str]
"""Cells of a table."""


@dataclass(frozen=True)
class Section:
    """A table of a report, with its head, a description of its numbers, and sentences before and after it."""

    head: str
    about: str
    heads: Sequence[str]
    rows: Sequence[Row]
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    more: str = ""
    """A line about omitted rows."""


def sections(figures: Figures, most: int | None = None) -> list[Section]:
    """The tables of a report, with at most `most` layers, classes and ops."""
    balance, tax = imbalance_text(figures), figures["tax"]
    found = [
        Section("Ranks", "milliseconds a step", *rank_rows(figures), after=[balance] if balance else []),
        Section("Communication", "per step of one rank; milliseconds", *kind_rows(figures)),
    ]
    if any(row["exposed_seconds"] for row in figures["layers"]):
        heads, rows = layer_rows(figures)
        head, more = "Layers with the most exposed communication", _more(rows, most, "layer")
        found.append(Section(head, "milliseconds", heads, rows[:most], more=more))
    classes = [[row["class"], milliseconds(row["seconds"]), percent(row["step_share"])] for row in figures["classes"]]
    about, more = "kernel time, summed, per step of one rank; milliseconds", _more(classes, most, "class", "classes")
    found.append(Section("Compute", about, ["class", "time", "of step"], classes[:most], more=more))
    if tax:
        more = _more([*tax["classes"][most:], *tax["ops"][most:]] if most else [], 0, "class or op", "classes and ops")
        notes = [f"- {note}" for note in tax["notes"]]
        head = "Tax of communication"
        found.append(Section(head, "milliseconds", *tax_rows(tax, most), [tax_text(tax)], notes, more))
    return [one for one in found if one.rows]


def title(figures: Figures) -> str:
    """The ranks, device, transport and steps that were measured."""
    ranks, steps = figures["ranks"], figures["steps"]
    of = f" of {figures['world']}" if figures["world"] > len(ranks) else ""
    what = [
        f"rank {ranks[0]}{of}" if len(ranks) == 1 else f"{len(ranks)}{of} ranks",
        figures["device"],
        figures["transport"],
        f"steps {span(steps)}" if len(steps) > 1 else f"step {span(steps)}",
    ]
    return "hocket trace: " + ", ".join(filter(None, what))


def span(numbers: Sequence[int]) -> str:
    """Numbers of steps: `10-12` or `3, 5, 7`."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def warnings(figures: Figures) -> list[str]:
    """Important caveats: the run was no training, or its network was emulated."""
    found = []
    if figures["null_transport"]:
        found.append("NULL TRANSPORT: no communication, not training. The bound that other runs are compared with.")
    if figures["emulated"]:
        found.append("EMULATED NETWORK: an imitated link, not a real one. No time here is a property of hardware.")
    return found


def headline(figures: Figures) -> str:
    """A summary of the report in a few sentences."""
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


def step_parts(step: Figures) -> list[tuple[str, str, float, float, str]]:
    """(name, title, seconds, share, explanation) of the parts of a step; the shares add up to 1."""
    rest = step["idle_seconds"] - step["host_bound_seconds"]
    whole = step["rank_seconds"] or 1.0
    out = []
    for name, words, about in PARTS:
        seconds = rest if name == "rest" else step[f"{name}_seconds"]
        out.append((name, words, seconds, seconds / whole, about))
    return out


def rank_rows(figures: Figures) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of ranks. Times are milliseconds."""
    heads = ["rank", "step", "compute", "comm.", "exposed", "of step", "hidden", "late peers", "host late", "idle"]
    rows: list[Row] = []
    for row in figures["by_rank"]:
        names = ("rank", "compute", "communication", "exposed")  # a rank's own seconds are those of its step
        times = [milliseconds(row[f"{name}_seconds"]) for name in names]
        shares = [percent(row["exposed_share"]), percent(row["hidden_fraction"])]
        more = [milliseconds(row[f"{name}_seconds"]) for name in ("waiting", "host_bound", "idle")]
        rows.append([str(row["rank"]), *times, *shares, *more])
    return heads, rows


def kind_rows(figures: Figures) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of kinds of communication. Times are milliseconds."""
    heads = ["kind", "count", "time", "late peers", "bytes", "bus GB/s", "exposed", "hidden", "of step"]
    rows: list[Row] = []
    for row in figures["kinds"]:
        times = [milliseconds(row["seconds"]), milliseconds(row["waiting_seconds"])]
        moved = [size(row["bytes"]), rate(row["bandwidth_bytes_per_second"])]
        shown = [milliseconds(row["exposed_seconds"]), percent(row["hidden_fraction"]), percent(row["counted_share"])]
        rows.append([row["kind"], number(row["count"]), *times, *moved, *shown])
    return heads, rows


def layer_rows(figures: Figures) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of layers, the most exposed first. Times are milliseconds."""
    heads = ["layer", "exposed", "time", "hidden", "bytes", "most exposed"]
    rows: list[Row] = []
    for row in figures["layers"]:
        most = max(row["kinds"], key=lambda kind: kind["exposed_seconds"])
        kind = f"{most['kind']} {milliseconds(most['exposed_seconds'])}" if most["exposed_seconds"] else ""
        times = [milliseconds(row["exposed_seconds"]), milliseconds(row["seconds"]), percent(row["hidden_fraction"])]
        rows.append([f"layer {row['layer']}", *times, size(row["bytes"]), kind])
    return heads, rows


def imbalance_text(figures: Figures) -> str:
    """A sentence about imbalance between ranks; empty for one rank."""
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


def tax_rows(tax: Figures, most: int | None) -> tuple[list[str], list[Row]]:
    """Heads and rows of the table of the tax, in milliseconds: all kernels, the first classes, and the first ops."""
    heads = ["kernels", "with communication", "without", "slow-down"]
    by_class = _slowdown_rows([tax["contention"]], "name") + _slowdown_rows(tax["classes"][:most], "class")
    by_op = _slowdown_rows(tax["ops"][:most], "name")
    return heads, [*by_class, *([["the same, by op", "", "", ""], *by_op] if by_op else [])]


def _slowdown_rows(rows: Sequence[Figures], key: str) -> list[Row]:
    """Name, milliseconds with and without communication, and slow-down."""
    found = list[Row]()
    for row in rows:
        longer = UNKNOWN if row["slowdown_share"] is None else f"{row['slowdown_share'] * 100:+.1f} %"
        found.append([row[key], milliseconds(row["seconds"]), milliseconds(row["null_seconds"]), longer])
    return found


def _whole(figures: Figures, width: int) -> list[str]:
    """A bar for each part of a step."""
    step = figures["step"]
    if not step["rank_seconds"]:
        return []
    about = f"mean of {counted(len(figures['ranks']), 'rank')} and {counted(len(figures['steps']), 'step')}"
    if len(figures["by_rank_and_step"]) == 1:
        about = ""
    lines, room = [_head("Where a step goes", about)], max(width - 47, 12)
    for _, words, seconds, share, text in step_parts(step):
        drawn = bar(share, room)
        fits = text and len(drawn) + len(text) + 2 <= room
        start = f"  {words:19}{milliseconds(seconds):>9} ms {percent(share):>8}  "
        lines.append(f"{start}{drawn}{f'  {text}' if fits else ''}".rstrip())
    return lines


def tax_text(tax: Figures) -> str:
    """The cost of communication, and its parts."""
    words = {"compute": "longer kernels", "exposed": "exposed communication", "host_bound": "late host", "idle": "idle"}
    parts = ", ".join(f"{words.get(p['part'], p['part'])} {p['seconds'] * 1e3:+.2f}" for p in tax["parts"])
    longer = (tax["step_seconds"] - tax["null_step_seconds"]) * 1e3
    change = "longer" if longer >= 0 else "shorter"
    return f"A step is {abs(longer):.2f} ms {change} than without communication: {parts} ms."


def _section(one: Section, width: int) -> list[str]:
    body = [*_indented(one.before, width), *grid(one.heads, one.rows, width)]
    more = [f"  {one.more}"] if one.more else []
    return [_head(one.head, one.about), *body, *more, *_indented(one.after, width)]


def _head(head: str, about: str) -> str:
    return f"{head}  {about}" if about else head


def _indented(texts: Sequence[str], width: int) -> list[str]:
    """Indented paragraphs, those with a dash with a hanging indent."""
    hang = {text: "  " if text.startswith("- ") else "" for text in texts}
    return [f"  {one}" for text in texts for one in wrapped(text, width - 2, hang[text])]


def _more(rows: Sequence[Any], most: int | None, one: str, many: str = "") -> str:
    """The number of omitted rows, in words."""
    left = 0 if most is None else len(rows) - most
    return f"and {left} more {one if left == 1 else many or one + 's'}: see --json" if left > 0 else ""
