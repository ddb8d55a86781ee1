"""Tables of traced steps: what was hidden of communication, what was not, and what compute beside it paid."""

from __future__ import annotations

from benchmarks.markdown import Result, ms, table


def overlap_trace(result: Result) -> str:
    """Kinds of communication by pipeline rank: how long they ran, waited and were hidden."""
    stages = result["stages"]
    found = [{row["kind"]: row for row in stage["kinds"]} for stage in stages]
    rows = []
    for kind in (row["kind"] for row in result["report"]["kinds"] if row["kind"] != "control"):
        cells = [kind]
        for rows_here in found:
            row = rows_here.get(kind, {"seconds": 0.0, "waiting_seconds": 0.0, "hidden_fraction": 1.0})
            waits = "not known" if row["waiting_seconds"] is None else ms(row["waiting_seconds"])
            cells += [ms(row["seconds"]), waits, f"{row['hidden_fraction']:.0%}"]
        rows.append(cells)
    for words, key in (("compute", "compute"), ("exposed, all kinds", "exposed"), ("whole step", "rank")):
        rows.append([words, *(c for stage in stages for c in (ms(stage["step"][f"{key}_seconds"]), "", ""))])
    names = ("busy, pipeline rank {}", "waiting for a peer", "hidden")
    return table(["kind", *(name.format(p) for p in range(len(stages)) for name in names)], rows)


def hidden(*results: Result) -> str:
    """Replayed steps: per kind of communication how long it ran and what of that nothing covered; and whole steps."""
    rows = []
    for result in results:
        config, step, tax = result["config"], result["report"]["step"], result["report"]["tax"]
        tokens = f"{config['train']['sequences'] * config['data']['sequence_length']:,}"
        # In a replay nothing tells for what a copy is, but that rows are stored by kernels.
        names = {"other": "gather, reduce"} if config["train"]["transport"] == "copy_engine" else {}
        for row in (row for row in result["report"]["kinds"] if row["kind"] != "control"):
            times = [row["seconds"], row["exposed_seconds"]]
            share = f"{row['hidden_fraction']:.1%}"
            rows.append([f"{tokens}: {names.get(row['kind'], row['kind'])}", *map(_tenths, times), share])
        times = [step["rank_seconds"], step["exposed_seconds"]]
        rows.append([f"{tokens}: whole step", *map(_tenths, times), f"{step['hidden_fraction']:.1%}"])
        rows.append([f"{tokens}: without communication", _tenths(tax["null_step_seconds"]), "", ""])
    return table(["tokens per microbatch: kind", "busy", "exposed", "hidden"], rows)


def _tenths(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def overlap_tax(result: Result) -> str:
    """A step with and without communication, where the difference shows, and which compute became slower."""
    tax, plain = result["report"]["tax"], result["seconds_without_profiler"]
    lines = [("step, without the profiler", plain["null"], plain["real"])]
    lines += [("step, profiled", tax["null_step_seconds"], tax["step_seconds"])]
    lines += [("all compute kernels", tax["contention"]["null_seconds"], tax["contention"]["seconds"])]
    lines += [(row["class"], row["null_seconds"], row["seconds"]) for row in tax["classes"]]
    rows = [
        [name, ms(null), ms(real), f"{round(real / null - 1, 2) + 0.0:+.0%}" if null else ""]
        for name, null, real in lines
    ]
    parts = {row["part"]: row["seconds"] for row in tax["parts"]}
    words = {"compute": "longer compute", "exposed": "exposed communication", "host_bound": "late host", "idle": "idle"}
    shown = [[f"profiled step, {words[part]}", "", "", f"{1e3 * seconds:+,.0f} ms"] for part, seconds in parts.items()]
    return table(["", "without communication", "with it", "change"], [*rows[:2], *shown, *rows[2:]])


def sends_tax(*results: Result) -> str:
    """By what moves them: how long sends and receives hold SMs, and how much longer products take beside them."""
    rows = []
    for result in results:
        tax, plain = result["report"]["tax"], result["seconds_without_profiler"]
        copied = result["config"]["train"]["transport"] == "copy_engine"
        held = _tenths(sum(row["seconds"] for row in result["report"]["kinds"] if row["kind"] == "pp"))
        slower = {
            row["class"]: row["seconds"] / row["null_seconds"] - 1 for row in tax["classes"] if row["null_seconds"]
        }
        shares = f"{slower['gemm']:.1%}", f"{tax['contention']['slowdown_share']:.1%}"
        name = "copy engines" if copied else "NCCL's kernels"
        rows.append([name, _tenths(plain["real"]), _tenths(plain["null"]), "none" if copied else held, *shares])
    head = ["sends by", "step", "without communication", "kernels that send or receive"]
    return table([*head, "products take longer", "all compute takes longer"], rows)
