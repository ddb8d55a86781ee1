"""What a benchmark found, as text for a terminal and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.bench.contender import entry
from benchmarks.bench.gate import Verdict
from benchmarks.bench.measure import Block
from benchmarks.bench.stats import Ratio, noise, off_clock, ratio
from benchmarks.bench.workload import Workload
from hocket.config import Config
from hocket.gpus import peak_flops
from hocket.sizes import counted

MFU = "(6 x weights that a token meets + causal attention at half) x tokens / seconds / GPUs / peak dense bf16 FLOP/s"


BOUNDS = ("bound_graph", "bound", "hocket_signal", "hocket_null", "fully_shard_null")
"""What a contender can be compared with: the first of them that takes part."""

FEW = 6
"""With fewer rounds not even their range holds the true median with 95 % confidence."""


@dataclass(frozen=True)
class Measured:
    """One workload's figures."""

    workload: Workload
    verdict: Verdict
    settings: dict[str, dict[str, str]]
    """By contender."""
    blocks: Mapping[str, Sequence[Block]]
    """By contender, one per round."""
    resident: dict[str, int]
    """Bytes that a contender holds between steps, by contender, on rank 0."""
    phases: Mapping[str, float]
    """Seconds."""
    hardware: str
    """Name of the GPU, or `CPU`."""
    complete: bool = True
    """Whether all rounds that were asked for have been measured."""

    def seconds(self, name: str) -> list[float]:
        """Each block's median step."""
        return [block.median for block in self.blocks[name]]

    def step(self, name: str) -> float:
        """Median over blocks."""
        return statistics.median(self.seconds(name))

    def over(self, name: str, other: str) -> Ratio:
        """How many times faster `name` is than `other`."""
        return ratio(self.seconds(other), self.seconds(name))

    def noise(self, *names: str) -> float:
        """A against A: the largest of these contenders'."""
        return max(noise(self.seconds(name)) for name in names)

    def tflops(self, name: str) -> float | None:
        """Model TFLOP/s per rank; None for those that compute nothing, and where attention ends with documents."""
        if not entry(name).computes or self.workload.config.data.packing != "off":
            return None
        return self.workload.flops / self.step(name) / self.workload.mesh.world / 1e12

    def mfu(self, name: str) -> float | None:
        """Share of the peak; None where one of them is not known."""
        peak = peak_flops(self.hardware)
        flops = self.tflops(name) if self.workload.config.precision.compute == "bf16" else None
        return 1e12 * flops / peak if flops and peak else None

    def peak(self, name: str) -> int:
        """Largest memory of this contender alone: what it holds between steps, and what a step adds."""
        return self.resident[name] + max(block.peak_bytes for block in self.blocks[name])

    def host(self, name: str) -> float:
        """Seconds in which the host issues a step, at most. See Note: [What the host costs]."""
        return min(block.host_seconds for block in self.blocks[name])

    def bound(self) -> str:
        """The bound that all contenders are compared with; empty without one."""
        return next((name for name in BOUNDS if name in self.blocks), "")

    def best_peer(self) -> str:
        """The fastest contender that is neither a bound nor hocket; empty without one."""
        peers = [name for name in self.blocks if entry(name).peer]
        return min(peers, key=self.step, default="")


def workload_text(workload: Workload) -> str:
    """One workload as a line."""
    c, mesh = workload.config, workload.mesh
    step = "forward, backward and AdamW" if workload.optimizer else "forward and backward"
    slow = ", emulated network" if c.train.transport == "slow" else ""
    shared, whose = (f" x cp {mesh.cp}", f"{mesh.cp} ranks") if mesh.cp > 1 else ("", "rank")
    return (
        f"WORKLOAD {c.run.name}: {c.model.layers} layers, pp {mesh.pp} x dp {mesh.dp}{shared} (ep {mesh.ep}), "
        f"{c.train.microbatches} x {workload.tokens_per_microbatch:,} tokens per {whose} and step in sequences of "
        f"{c.data.sequence_length:,}, {c.precision.compute}, {step}, no clipping, "
        f"plain stack {'compiled' if workload.compile else 'eager'}{slow}"
    )


def settings_text(settings: Mapping[str, Mapping[str, str]]) -> str:
    """What a reader needs to repeat every contender."""
    lines = ["SETTINGS"]
    for name, items in settings.items():
        lines.append(f"  {name}")
        lines += [f"    {key}: {value}" for key, value in items.items()]
    return "\n".join(lines)


def verdict_text(verdict: Verdict) -> str:
    """The gate's result as a line."""
    if len(verdict.curves) < 2:
        return "GATE     nothing to compare: fewer than two contenders compute losses that mean something"
    steps = len(next(iter(verdict.curves.values())))
    where = f" and sequences of {verdict.sequence_length:,}" if verdict.sequence_length else ""
    return (
        f"GATE     {', '.join(verdict.curves)}: same losses over {counted(steps, 'step')} of "
        f"{counted(verdict.layers, 'layer')}{where}, "
        f"at most {verdict.worst:.1e} of {verdict.of} apart (allowed {verdict.tolerance:g}), while they changed by "
        f"{verdict.fall:.1%}"
    )


def table(measured: Measured) -> str:
    """The result for a terminal."""
    bound, best = measured.bound(), measured.best_peer()
    head = ["contender", "step ms", "TFLOP/s", "MFU"]
    head += [f"share of {bound}"] if bound else []
    head += [f"speed over {best}"] if best else []
    head += ["A/A noise", "host ms", "GiB", "MHz", "W"]
    rows = []
    for name, blocks in measured.blocks.items():
        flops, mfu = measured.tflops(name), measured.mfu(name)
        row = [name, f"{1e3 * measured.step(name):.1f}"]
        row += [f"{flops:.1f}" if flops else "-", f"{mfu:.1%}" if mfu else "-"]
        row += [str(measured.over(name, bound))] if bound else []
        row += [str(measured.over(name, best))] if best else []
        row += [f"{measured.noise(name):.2%}" if len(blocks) > 1 else "-", f"{1e3 * measured.host(name):.1f}"]
        row += [f"{peak / 2**30:.1f}" if (peak := measured.peak(name)) else "-"]  # of CPUs it is not known
        clocks = [block.clock_mhz for block in blocks]
        row += [_number(clocks) + "*" * any(off_clock(clocks)), _number([block.watts for block in blocks])]
        rows.append(row)
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(r)) for r in (head, *rows)
    ]
    count, steps = len(next(iter(measured.blocks.values()))), len(next(iter(measured.blocks.values()))[0].seconds)
    sure = 1.0 - 0.5 ** (count - 1)
    interval = f"the range of {counted(count, 'round')}, too few for more, which holds the true median with {sure:.0%}"
    interval = "95 % bootstrap" if count >= FEW else interval
    blocks = f"{counted(count, 'block')} of {counted(steps, 'step')}"
    notes = [f"medians of {blocks}, slowest rank; intervals are {interval}; MFU = {MFU}"]
    if not measured.complete:
        notes.append("interrupted: these are fewer rounds than were asked for")
    if any("*" in row[-2] for row in rows):
        notes.append("* a block ran at a clock more than 2 % from the others of this contender")
    return "\n".join(["RESULT", *(f"  {line}" for line in (*lines, *notes))])


def _number(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.0f}" if known else "-"


def as_json(measured: Measured) -> dict[str, Any]:
    """Everything, for the result file."""
    workload = measured.workload
    sections = [f.name for f in dataclasses.fields(Config)]
    rows = {}
    for name, blocks in measured.blocks.items():
        others = [other for other in measured.blocks if other != name]
        rows[name] = {
            "settings": dict(measured.settings[name]),
            "seconds": measured.step(name),
            "tokens_per_second": workload.tokens / measured.step(name),
            "tflops_per_gpu": measured.tflops(name),
            "mfu": measured.mfu(name),
            "speed_over": {other: dataclasses.asdict(measured.over(name, other)) for other in others},
            "noise": measured.noise(name),
            "host_seconds": measured.host(name),
            "resident_bytes": measured.resident[name],
            "peak_bytes": measured.peak(name),
            "blocks": [dataclasses.asdict(block) for block in blocks],
            "off_clock": off_clock([block.clock_mhz for block in blocks]),
        }
    return {
        "config": {section: dataclasses.asdict(getattr(workload.config, section)) for section in sections},
        "optimizer": workload.optimizer,
        "compile": workload.compile,
        "emulated_network": workload.config.train.transport == "slow",
        "tokens_per_step": workload.tokens,
        "flops_per_step": workload.flops if workload.config.data.packing == "off" else None,
        "mfu_formula": MFU,
        "bound": measured.bound(),
        "best_peer": measured.best_peer(),
        "gate": dataclasses.asdict(measured.verdict),
        "phases": dict(measured.phases),
        "complete": measured.complete,
        "contenders": rows,
    }
