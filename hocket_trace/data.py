r"""Traces and reports as plain values: the activities of one rank, and the report about them.

Letters of `docs/explain.md`: K is the time in which some compute kernel runs on a rank, C the time in which some
communication runs, S the length of a step; all are lengths of unions of intervals. Exposed time is |C \ K|, and
absent compute is S - |K|. Times are seconds, on the clock of the trace's first rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Kind = Literal["compute", "gather", "reduce", "a2a", "pp", "tp", "cp", "control", "other"]
"""The purpose of an activity. All but `compute` are communication: weights gathered, gradients reduced, expert
all-to-alls, pipeline sends and receives, tensor-parallel and context-parallel collectives, agreement between ranks, and
communication with an unknown purpose."""

KINDS: tuple[Kind, ...] = ("compute", "gather", "reduce", "a2a", "pp", "tp", "cp", "control", "other")
COMMUNICATION: tuple[Kind, ...] = KINDS[1:]

KernelClass = Literal[
    "gemm",
    "grouped gemm",
    "attention",
    "norm",
    "elementwise",
    "indexing",
    "reduction",
    "copy",
    "optimizer",
    "stand-in",
    "other",
]
"""The class of a compute kernel, from the op that launched it or else from its name. A `stand-in` is a kernel of the
null transport that writes in place of received data."""


class PlanOp(NamedTuple):
    """A named op's properties."""

    lane: str
    kind: Kind
    group: str
    """Description of its process group; empty for none or several."""
    layer: int


@dataclass(frozen=True)
class Plan:
    """The named ops of one rank; empty for a program that records none."""

    lanes: tuple[str, ...] = ()
    computing: frozenset[str] = frozenset()
    ops: Mapping[str, PlanOp] = field(default_factory=dict)

    def communicates(self, name: str) -> bool:
        """Whether a name is an op's whose lane does not compute."""
        op = self.ops.get(name)
        return op is not None and op.lane not in self.computing


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank: from its first activity to the next step's first, or else to its own last."""

    number: int
    start: float
    end: float


@dataclass(frozen=True)
class RankTrace:
    """The activities of one rank's device: a row per kernel, copy or transfer, ascending by start.

    Columns of words (`kind`, `lane`, `name`, `launcher`, `op`, `group`, `kernel_class`) hold indices into `words`;
    `text(column)` looks them up. On a CPU the rows are ops of torch and transfers of gloo.
    """

    source: str
    """The file."""
    rank: int
    world: int
    """0 if the trace does not say."""
    device: str
    """For example `NVIDIA H200`; `cpu` if no GPU was traced."""
    words: tuple[str, ...]
    start: Floats
    end: Floats
    lane: Ints
    """A hocket lane, or `stream 7`."""
    kind: Ints
    name: Ints
    """The kernel's own name."""
    launcher: Ints
    """The torch op that launched it, such as `aten::mm` or `nccl:_all_gather_base`; empty if not known."""
    op: Ints
    """The plan's op, such as `fwd attn m0 c1 l5`; empty outside hocket."""
    group: Ints
    """The process group of a communication, by the description it was created with; empty if not known."""
    kernel_class: Ints
    """Of a compute kernel; empty for communication."""
    layer: Ints
    """Number of the layer, -1 if not known."""
    step: Ints
    """Index into `steps`, -1 outside of steps."""
    bytes: Floats
    """Bytes that a communication moves over this rank's link (the nccl-tests bus bytes); 0 if not known."""
    calls: Ints
    """A number shared by the activities of one call of a collective on this rank, -1 if not known."""
    match: Ints
    """A number shared by all activities of one collective, or of a send and its receive, on all ranks; -1 if not known,
    for example if one of the ranks has no trace."""
    launched: Floats
    """When the host launched it; nan if not known."""
    steps: tuple[Step, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Process group -> its global ranks."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The program's own record, under the key `hocket`: `transport`, `pp_rank`, `work`, ... Mostly empty."""
    plan: Plan = field(default_factory=Plan)
    """The named ops; empty for a program that names none."""
    origin: int = 0
    """Nanoseconds since the epoch at time 0."""
    host: str = ""
    """The machine, empty if the trace does not say."""
    notes: tuple[str, ...] = ()
    """Notes for the reader of the report."""

    def __len__(self) -> int:
        return len(self.start)

    def text(self, column: Ints) -> list[str]:
        """The words of a column."""
        return [self.words[i] for i in column]

    def of_kind(self, *kinds: Kind) -> NDArray[np.bool_]:
        """A mask of the rows of these kinds."""
        wanted = [self.words.index(kind) for kind in kinds if kind in self.words]
        return np.isin(self.kind, wanted)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One kind of communication, in one step of one rank or one layer of it."""

    count: int
    seconds: float
    """Union of its intervals."""
    waiting: float
    """Of these, seconds in which every running one waited for the last rank of its group to start: a late peer, no
    transfer. nan without the traces of the group's other ranks."""
    exposed: float
    """Of `seconds`, those in which no compute kernel ran."""
    bytes: float
    """Bytes over this rank's link; 0 if not known."""

    @property
    def hidden(self) -> float:
        """The hidden fraction, 1 if nothing ran."""
        return 1.0 - self.exposed / self.seconds if self.seconds else 1.0

    @property
    def bandwidth(self) -> float:
        """Bus bytes per second while it moved data (waiting excluded where known); nan if no bytes are known."""
        late = 0.0 if np.isnan(self.waiting) else self.waiting
        return self.bytes / (self.seconds - late) if self.bytes and self.seconds > late else float("nan")


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of one rank."""

    rank: int
    step: int
    seconds: float
    """S."""
    compute: float
    """|K|."""
    communication: float
    """|C|."""
    exposed: float
    """|C \\ K|."""
    idle: float
    """Nothing ran: S - |K u C|."""
    host_bound: float
    """Of idle, seconds in which the next kernel to run had not been launched yet: the host was late."""
    kinds: Mapping[Kind, Share]
    """Kinds of communication that occur."""
    exposed_for: Mapping[Kind, float]
    """Exposed time by kind, each moment attributed to one kind, so that it adds up to `exposed`: of several that run at
    once, to the one that ends last."""
    layers: Mapping[int, Mapping[Kind, Share]]
    """Layer -> kind -> share, communication of known layers only."""
    classes: Mapping[str, float]
    """Kernel class -> summed kernel seconds (no union)."""
    waiting: float = float("nan")
    """Of communication, seconds in which every running one is known to have waited for late peers; nan without the
    traces of the other ranks."""
    exposed_waiting: float = float("nan")
    """The same of exposed: a faster transfer would not reduce these seconds."""

    @property
    def absent(self) -> float:
        """S - |K|: seconds without a compute kernel."""
        return self.seconds - self.compute

    @property
    def hidden(self) -> float:
        """|C n K| / |C|, 1 without communication."""
        return 1.0 - self.exposed / self.communication if self.communication else 1.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report on the traces of one run."""

    sources: tuple[str, ...]
    device: str
    transport: str
    """`nccl`, `gloo`, `null`, `slow`; empty outside hocket."""
    world: int
    steps: tuple[StepReport, ...]
    """By step, then rank."""
    notes: tuple[str, ...] = ()
    """Notes for the reader: missing steps, missing ranks, clocks that could not be aligned."""
    stages: Mapping[int, int] = field(default_factory=dict)
    """Rank -> its pipeline rank; empty outside hocket."""

    @property
    def emulated(self) -> bool:
        """Whether the network was emulated."""
        return self.transport == "slow"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({step.rank for step in self.steps}))

    @property
    def step_seconds(self) -> float:
        """Median over steps of the slowest rank's S."""
        numbers = sorted({step.step for step in self.steps})
        slowest = [max(s.seconds for s in self.steps if s.step == number) for number in numbers]
        return float(np.median(slowest)) if slowest else float("nan")


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """The same compute with and without communication: summed kernel seconds of a step, means over ranks and steps."""

    name: str
    """A kernel class such as `gemm`, a plan op such as `fwd experts`, or the name of a kernel."""
    seconds: float
    null: float
    """Without communication."""

    @property
    def share(self) -> float:
        """How much longer it takes: 0.1 is 10 %; nan if it does not run without communication."""
        return self.seconds / self.null - 1.0 if self.null else float("nan")


@dataclass(frozen=True, kw_only=True)
class Tax:
    """The cost of communication per step: a run against the same run with the null transport."""

    seconds: float
    """Of a step: median over steps of the slowest rank."""
    null: float
    """The same without communication."""
    parts: Mapping[str, float]
    """Seconds of the difference on the rank for which the others wait: `compute` (longer kernels), `exposed`,
    `host_bound` and `idle` (the rest without any activity). They add up to it; a negative part is shorter than without
    communication."""
    classes: tuple[Slowdown, ...]
    """Kernel classes, the costliest first."""
    ops: tuple[Slowdown, ...]
    """Plan ops by verb and part, outside hocket kernels by name; the costliest first."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, for example that routing differs."""

    @property
    def share(self) -> float:
        """The tax: 0.1 means that the step takes 10 % longer than without communication."""
        return self.seconds / self.null - 1.0

    @property
    def contention(self) -> Slowdown:
        """All compute kernels together."""
        seconds, null = (sum(getattr(row, name) for row in self.classes) for name in ("seconds", "null"))
        return Slowdown(name="all compute", seconds=seconds, null=null)
