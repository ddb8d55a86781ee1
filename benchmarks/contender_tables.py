"""Tables of what `hocket bench` has found."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.bench import contender
from benchmarks.bench.report import FEW
from benchmarks.markdown import Result, block, table


def workloads(results: Sequence[Result]) -> list[Result]:
    """Those of some results, in their order. Raises ValueError if a measurement was interrupted."""
    for result in results:
        if not all(found.get("complete", True) for found in result["workloads"]):
            raise ValueError(
                f"the result of `{result['command']}` was interrupted; fix: the same command with --resume"
            )
    return [found for result in results for found in result["workloads"]]


def tokens_of(found: Result) -> str:
    """Tokens of a microbatch on one GPU."""
    return f"{found['config']['train']['sequences'] * found['config']['data']['sequence_length']:,}"


def contenders(*results: Result) -> str:
    """What `hocket bench` found: a row per contender, for every sequence length."""
    rows, all_found = [], workloads(results)
    counts = {found["config"]["train"].get("microbatches") for found in all_found}
    for found in all_found:
        bound, best, tokens = found["bound"], found["best_peer"], tokens_of(found)
        if len(counts) > 1:
            tokens = f"{found['config']['train']['microbatches']} x {tokens}"
        for name, row in found["contenders"].items():
            mfu = f" ({row['mfu']:.0%})" if row["mfu"] else ""
            flops = (
                f"{row['tflops_per_gpu']:.0f}{mfu}" if row["tflops_per_gpu"] and contender.entry(name).computes else "-"
            )
            cells = [f"{tokens}: {name}", f"{1e3 * row['seconds']:,.1f} ms", flops]
            for other in (bound, best):
                ratio = row["speed_over"].get(other)
                shown = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else "1"
                cells.append(shown if other else "-")
            cells.insert(4, _in_cycles(row, found))
            mhz = _mhz(row)
            clock = f"{mhz:,.0f}{'*' * any(row['off_clock'])}" if mhz else "-"
            rows.append([*cells, f"{row['noise']:.1%}", clock, _gib(row)])
    rounds = {len(row["blocks"]) for found in all_found for row in found["contenders"].values()}
    count = " or ".join(map(str, sorted(rounds)))
    meaning = "95 % interval" if min(rounds) >= FEW else f"range of {count} rounds"
    head = ["tokens per microbatch: contender", "step", "TFLOP/s per GPU (MFU)", f"share of the bound ({meaning})"]
    return table([*head, "in cycles", "speed over the best peer", "A against A", "MHz", "GiB"], rows)


def before_and_after(result: Result) -> str:
    """A row per case: steps of two commits in turns, and how far the runs of one commit are apart."""
    rows = []
    for case in result["cases"]:
        cells = []
        for turn in ("before", "after"):
            cells += [" and ".join(f"{1e3 * run['seconds']:.1f} ms" for run in case[turn])]
        rows.append([case["case"].replace("_", ", "), *cells, f"{case['after_over_before']:.3f}"])
    head = ["case, tokens", f"`{result['before']}`", f"`{result['commit']}`", "shortest over shortest"]
    return table(head, rows)


def _mhz(row: Result) -> float | None:
    """The clock of a contender's blocks, as it was sampled."""
    clocks = [block["clock_mhz"] for block in row["blocks"]]
    return None if None in clocks else statistics.median(clocks)


def _in_cycles(row: Result, found: Result) -> str:
    """The share of the bound as clock cycles: GPUs at their limit of power run some contenders faster than others."""
    bound = found["contenders"].get(found["bound"])
    if bound is None or not (mhz := _mhz(row)) or not (of_bound := _mhz(bound)):
        return "-"
    return f"{bound['seconds'] * of_bound / (row['seconds'] * mhz):.2f}" if row is not bound else "1"


def _gib(row: Result) -> str:
    """Peak memory, and what of it is held between steps."""
    held = row["resident_bytes"] / 2**30
    return f"{row['peak_bytes'] / 2**30:.0f}" + (f", {held:.0f} held" if held >= 0.5 else "")


def shared_memory(*results: Result) -> str:
    """hocket's peak memory with sequences that ranks share and with whole ones, where both were measured."""
    peaks: dict[tuple[str, int], dict[int, int]] = {}
    for found in workloads(results):
        config = found["config"]
        of = peaks.setdefault((config["run"]["name"], config["data"]["sequence_length"]), {})
        of[config["mesh"]["cp"]] = found["contenders"]["hocket"]["peak_bytes"]
    rows = []
    for (name, length), of in peaks.items():
        if 1 in of and len(of) > 1:
            shared = of[max(of)]
            cells = [f"{size / 2**30:.0f} GiB" for size in (of[1], shared)]
            rows.append([f"{name}, {length:,} tokens", str(max(of)), *cells, f"{shared / of[1]:.2f}"])
    return table(["sequences", "ranks that share them", "whole", "shared", "share"], rows)


def host_cost(result: Result) -> str:
    """What contenders add to the host's work: their step over the bound's, where the host decides over both."""
    (found,) = result["workloads"]
    config, bound = found["config"], found["contenders"][found["bound"]]
    units = (config["model"]["layers"] + 2) * config["train"]["microbatches"]
    rows = []
    for name, row in found["contenders"].items():
        added = f"{1e6 * (row['seconds'] - bound['seconds']) / units:.0f} us" if row is not bound else "-"
        rows.append([name, f"{1e3 * row['seconds']:.1f} ms", f"{1e3 * row['host_seconds']:.1f} ms", added])
    return table(["contender", "step", "issued within", "per unit and microbatch, over the bound"], rows)


def _gate(gate: Result) -> str:
    """What a workload's numerics gate saw, from its record."""
    steps = len(next(iter(gate["curves"].values())))
    return (
        f"gate: losses of {', '.join(gate['curves'])} over {steps} steps of {gate['layers']} layers are at most "
        f"{gate['worst']:.1e} of {gate.get('of', 'the first loss')} apart (allowed {gate['tolerance']:g}), "
        f"while it fell by {gate['fall']:.0%}"
    )


def settings(*results: Result) -> str:
    """How every contender was set, with the version that it was written for, and what the gates saw."""
    shown: dict[str, Result] = {}
    found = workloads(results)
    for one in found:
        for name, row in one["contenders"].items():
            assert shown.setdefault(name, row["settings"]) == row["settings"], name
    lines: list[str] = []
    whole: list[str] = []
    for name, items in shown.items():
        package = contender.CONTENDERS[name].package if name in contender.CONTENDERS else ""
        twin = next((other for other in whole if _close(shown[other], items)), name)
        whole += [name] if twin == name else []
        lines += [name if twin == name else f"{name}: as {twin}, but"]
        lines += [f"    package: {package}"] if package else []
        lines += [f"    {key}: {value}" for key, value in items.items() if twin == name or shown[twin][key] != value]
    return block([*lines, *_gates(found)])


def _close(one: Result, other: Result) -> bool:
    """Whether settings differ in so little that naming the differences says all; those of one contender are equal."""
    return one.keys() == other.keys() and sum(one[key] != other[key] for key in one) <= 2


def _gates(found: Sequence[Result]) -> list[str]:
    """Lengths of one run share a gate, which is shown once."""
    return list(dict.fromkeys(_gate(one["gate"]) for one in found))
