"""A report for a terminal: what a step costs in one sentence, then where its time goes, from the whole to the detail.

Everything printed comes from `as_json.to_json`, so the table, the page and `--json` have the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hocket_trace.as_json import by_launcher, to_json
from hocket_trace.columns import (
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
    sections = [
        title(figures, width),
        [one for text in warnings(figures) for one in wrapped(text, width, "bold white on red")],
        wrapped(headline(figures), width),
        _whole(figures, width),
        _ranks(figures, width),
        _kinds(figures, width),
        _layers(figures, width),
        _ops(figures, width),
        _tax(figures, width),
        _notes(figures, width),
    ]
    return [one for section in sections if section for one in (*section, line())][:-1]


def section(head: str, about: str, body: Sequence[Line]) -> list[Line]:
    """A head with what its numbers are, and lines below it."""
    return [((head, "bold"), (f"  {about}" if about else "", "dim")), *body]


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


def rank_rows(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of ranks. Times are milliseconds."""
    heads = ["rank", "step", "compute", "comm.", "exposed", "of step", "hidden", "late peers", "host late", "idle"]
    rows = []
    for row in figures["by_rank"]:
        names = ("rank", "compute", "communication", "exposed")  # a rank's own seconds are those of its step
        times = [milliseconds(row[f"{name}_seconds"]) for name in names]
        shares = [percent(row["exposed_share"]), percent(row["hidden_fraction"])]
        more = [milliseconds(row[f"{name}_seconds"]) for name in ("waiting", "host_bound", "idle")]
        rows.append([str(row["rank"]), *times, *shares, *more])
    return heads, rows


def kind_rows(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of kinds of communication. Times are milliseconds."""
    heads = ["kind", "count", "time", "late peers", "bytes", "bus GB/s", "exposed", "hidden", "of step"]
    rows = []
    for row in figures["kinds"]:
        times = [milliseconds(row["seconds"]), milliseconds(row["waiting_seconds"])]
        moved = [size(row["bytes"]), rate(row["bandwidth_bytes_per_second"])]
        shown = [milliseconds(row["exposed_seconds"]), percent(row["hidden_fraction"]), percent(row["counted_share"])]
        rows.append([row["kind"], number(row["count"]), *times, *moved, *shown])
    return heads, rows


def layer_rows(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of layers, the most exposed first. Times are milliseconds."""
    heads = ["layer", "exposed", "time", "hidden", "bytes", "most exposed"]
    rows = []
    for row in figures["layers"]:
        most = max(row["kinds"], key=lambda kind: kind["exposed_seconds"])
        kind = f"{most['kind']} {milliseconds(most['exposed_seconds'])}" if most["exposed_seconds"] else ""
        times = [milliseconds(row["exposed_seconds"]), milliseconds(row["seconds"]), percent(row["hidden_fraction"])]
        rows.append([f"layer {row['layer']}", *times, size(row["bytes"]), kind])
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


def tax_rows(tax: Figures, classes: int | None = None, ops: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of the tax, in milliseconds: all kernels, their first classes, the first ops."""
    heads = ["kernels", "with communication", "without", "slow-down"]
    by_class = _slowdown_rows([tax["contention"]], "name") + _slowdown_rows(tax["classes"][:classes], "class")
    by_op = _slowdown_rows(tax["ops"][:ops], "name")
    return heads, [*by_class, *([["the same, by op", "", "", ""], *by_op] if by_op else [])]


def _slowdown_rows(rows: Sequence[Figures], key: str) -> list[list[str]]:
    """Name, milliseconds with and without communication, and how much longer it takes."""
    return [
        [row[key], milliseconds(row["seconds"]), milliseconds(row["null_seconds"]), _longer(row["slowdown_share"])]
        for row in rows
    ]


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
    return section("Where a step goes", about, lines)


def _ranks(figures: Figures, width: int) -> list[Line]:
    if not figures["by_rank"]:
        return []
    heads, rows = rank_rows(figures)
    body = grid(heads, rows, width)
    if text := imbalance_text(figures):
        body += [(("  ", ""), *one) for one in wrapped(text, width - 2)]
    return section("Ranks", "milliseconds a step", body)


def _kinds(figures: Figures, width: int) -> list[Line]:
    if not figures["kinds"]:
        return []
    return section("Communication", "per step of one rank; milliseconds", grid(*kind_rows(figures), width))


def _layers(figures: Figures, width: int) -> list[Line]:
    if not any(row["exposed_seconds"] for row in figures["layers"]):
        return []
    heads, rows = layer_rows(figures)
    body = grid(heads, rows[:_LAYERS], width)
    return section(
        "Layers with the most exposed communication", "milliseconds", [*body, *_more(rows, _LAYERS, "layer")]
    )


def _ops(figures: Figures, width: int) -> list[Line]:
    """Ops that launched kernels, and below each the kernels that it launched."""
    if not figures["ops"]:
        return []
    groups = by_launcher(figures["ops"])
    rows, styles = [], []
    for total, kernels in groups[:_LAUNCHERS]:
        name = total["launcher"] or "(launcher not known)"
        if len(kernels) == 1 and len(both := together(name, kernels[0]["kernel"])) <= _TOGETHER:
            name, kernels = both, []
        rows.append([name, *op_cells(total)])
        styles.append("")
        for kernel in kernels[:_KERNELS]:
            rows.append(["  " + short_kernel(kernel["kernel"]), *op_cells(kernel)])
            styles.append("dim")
    body = [*grid(OP_HEADS, rows, width, styles), *_more(groups, _LAUNCHERS, "op")]
    return section("Costliest ops", "summed, per step of one rank; milliseconds", body)


def together(launcher: str, kernel: str) -> str:
    """An op and its only kernel, once if they have one name, as on a CPU."""
    short = short_kernel(kernel)
    return launcher if launcher.endswith(short) else f"{launcher}: {short}"


def op_cells(row: Figures) -> list[str]:
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


def _tax(figures: Figures, width: int) -> list[Line]:
    tax = figures["tax"]
    if not tax:
        return []
    body = [(("  ", ""), *one) for one in wrapped(tax_text(tax), width - 2)]
    body += grid(*tax_rows(tax, _CLASSES, _OPS), width)
    body += _more([*tax["classes"][_CLASSES:], *tax["ops"][_OPS:]], 0, "class or op", "classes and ops")
    return section("Tax of communication", "milliseconds", [*body, *_listed(tax["notes"], width)])


def _notes(figures: Figures, width: int) -> list[Line]:
    return section("Notes", "", _listed(figures["notes"], width)) if figures["notes"] else []


def _listed(notes: Sequence[str], width: int) -> list[Line]:
    return [(("  ", ""), *one) for note in notes for one in wrapped(f"- {note}", width - 2, hang="  ")]


def _more(rows: Sequence[object], shown: int, one: str, many: str = "") -> list[Line]:
    """A row that says how many rows are not shown."""
    left = len(rows) - shown
    return [line(f"  and {left} more {one if left == 1 else many or one + 's'}: see --json", "dim")] if left > 0 else []


def _longer(share: float | None) -> str:
    """A difference as a signed percentage."""
    return "–" if share is None else f"{share * 100:+.1f} %"
