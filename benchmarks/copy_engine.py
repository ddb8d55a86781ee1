"""What do gathers and reductions cost on NCCL's kernels, and on copy engines? Alone, and beside products.

    torchrun --nproc-per-node 4 -m benchmarks.copy_engine

One layer of the shape of Llama-3 8B (436 MB in bf16) is gathered and reduced over all ranks. Alone: times and bus
bandwidths, and those of the local sum behind a copy engine's reduction, by the number of its programs. Beside products:
the matrix products of 8 layers' forwards and backwards run on one stream, while on two others each layer is gathered
twice and reduced once, as fast as they can; the tax is by how much longer the products take. Half a minute.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.fsdp.layout import FlatLayout
from hocket.kernels.pieces import Own
from hocket.kernels.sums import PROGRAMS, launch, place
from hocket.program.mesh import Mesh
from hocket.runtime.comm import Groups, make_groups

HIDDEN, FFN, KV = 4096, 14336, 1024
SHAPES = ((HIDDEN + 2 * KV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
"""(out, in) of a layer's matrices."""
LAYERS, GATHERS, REDUCES = 8, 2, 1
WARM_UP, TIMED, ROUNDS = 3, 10, 7
SLEEP = 40_000_000
"""Cycles: about 20 ms."""
SWEEP = (16, 32, 66, 132, 264, 528, 1056)
"""Numbers of programs of the local sum that are tried."""

Call = Callable[[], object]


@dataclass
class Unit:
    """A layer's weights and gradients on this rank."""

    groups: dict[str, Groups]
    device: torch.device
    world: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        layout = FlatLayout.build([(str(n), shape) for n, shape in enumerate(SHAPES)], self.world)
        self.total = layout.total
        numbers: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        self.full = torch.empty(self.total, **numbers).normal_(std=0.02)
        self.shard = self.full.view(self.world, -1)[dist.get_rank()]
        self.grads = torch.empty(self.total, **numbers).normal_(std=0.02)
        self.parts = torch.empty(self.world, self.total // self.world, **numbers).normal_(std=0.02)
        self.into = torch.zeros(self.total // self.world, device=self.device)
        self.own = Own(dist.get_rank(), self.full, layout.pieces)

    @property
    def bus_bytes(self) -> float:
        """What each rank receives in a gather, and in a reduction."""
        return self.full.nbytes * (self.world - 1) / self.world

    def gather(self, transport: str) -> Call:
        return lambda: self.groups[transport].gather_dense.all_gather(self.full, self.shard)

    def reduce(self, transport: str) -> Call:
        return lambda: self.groups[transport].reduce_dense.reduce_sum(self.grads, self.into, 1 / self.world)

    def add(self, programs: int) -> Call:
        """The local sum."""
        return lambda: launch(self.parts, self.into, 1 / self.world, programs=programs)

    def add_chunks(self, programs: int) -> Call:
        """The same with this rank's part of each weight in the buffer."""
        return lambda: launch(self.parts[1:], self.into, 1 / self.world, own=self.own, programs=programs)

    def place(self) -> Call:
        """Cast an fp32 shard into the buffer and for its peers."""
        return lambda: place(self.into, self.own, len(self.into), self.parts[0])


class Products:
    """The matrix products of some layers' forwards and backwards: all a step computes but what is small beside them."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        def new(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02

        self.weights = [(new(*shape), new(*shape)) for shape in SHAPES]
        widths = {width for shape in SHAPES for width in shape}
        self.given, self.made = ({width: new(tokens, width) for width in widths} for _ in range(2))
        self.flops = LAYERS * 6 * tokens * sum(rows * columns for rows, columns in SHAPES)

    def run(self) -> None:
        for _ in range(LAYERS):
            for weight, grad in self.weights:
                rows, columns = weight.shape
                torch.mm(self.given[columns], weight.t(), out=self.made[rows])
                torch.mm(self.given[rows], weight, out=self.made[columns])
                torch.mm(self.given[rows].t(), self.given[columns], out=grad)


class Clock:
    """Times what runs on streams; answers are those of the slowest rank, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = torch.cuda.Stream(device)
        self.lanes = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]

    def _slowest(self, seconds: float) -> float:
        worst = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)

    def _together(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()

    def alone(self, call: Call) -> float:
        """Seconds of a call, the median of many in a row."""
        times = []
        for _ in range(3):
            self._together()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self.lanes[0]):
                for _ in range(WARM_UP):
                    call()
                start.record()
                for _ in range(TIMED):
                    call()
                end.record()
            end.synchronize()
            times.append(self._slowest(start.elapsed_time(end) / 1e3 / TIMED))
        return statistics.median(times)

    def beside(self, products: Products, gather: Call | None, reduce: Call | None) -> float:
        """Seconds of the products, while their layers are gathered and reduced beside them."""
        self._together()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.compute):
            torch.cuda._sleep(SLEEP)  # until the host has issued what moves bytes: all begin together
        for lane in self.lanes:
            lane.wait_stream(self.compute)
        for lane, call, count in zip(self.lanes, (gather, reduce), (GATHERS, REDUCES), strict=True):
            with torch.cuda.stream(lane):
                for _ in range(LAYERS * count if call else 0):
                    assert call is not None
                    call()
        with torch.cuda.stream(self.compute):
            start.record()
            products.run()
            end.record()
        torch.cuda.synchronize()
        return self._slowest(start.elapsed_time(end) / 1e3)


def measure_alone(unit: Unit, clock: Clock) -> dict[str, Any]:
    """Seconds and GB/s of everything by itself."""

    def moved(call: Call, nbytes: float) -> dict[str, float]:
        seconds = clock.alone(call)
        return {"seconds": seconds, "gb_per_s": nbytes / seconds / 1e9}

    # Each part is read once; what it is added to is read and written.
    summed = unit.parts.nbytes + 2 * unit.into.nbytes
    return {
        "gather": {name: moved(unit.gather(name), unit.bus_bytes) for name in unit.groups},
        "reduce": {name: moved(unit.reduce(name), unit.bus_bytes) for name in unit.groups},
        "sum": {programs: moved(unit.add(programs), summed) for programs in SWEEP},
        "sum of chunks": {programs: moved(unit.add_chunks(programs), summed) for programs in SWEEP},
        "place": moved(unit.place(), 2 * unit.into.nbytes),
    }


def measure_beside(unit: Unit, clock: Clock, tokens: int) -> dict[str, Any]:
    """Seconds of the products with different things beside them, in turns, and the tax of each."""
    cases: dict[str, tuple[Call | None, Call | None]] = {
        "nothing": (None, None),
        "nccl": (unit.gather("nccl"), unit.reduce("nccl")),
        "copy_engine_gathers": (unit.gather("copy_engine"), unit.reduce("nccl")),
        "copy_engine": (unit.gather("copy_engine"), unit.reduce("copy_engine")),
        "nccl gathers alone": (unit.gather("nccl"), None),
        "copy_engine gathers alone": (unit.gather("copy_engine"), None),
        "nccl reduces alone": (None, unit.reduce("nccl")),
        "copy_engine reduces alone": (None, unit.reduce("copy_engine")),
    }
    products, times = Products(tokens, unit.device), {name: [] for name in cases}
    for turn in range(ROUNDS + 1):
        for name in list(cases)[:: -1 if turn % 2 else 1]:
            seconds = clock.beside(products, *cases[name])
            if turn:
                times[name].append(seconds)
    bound = statistics.median(times["nothing"])
    figures = {}
    for name, values in times.items():
        seconds = statistics.median(values)
        figures[name] = {"seconds": seconds, "tax": seconds / bound - 1, "all": values}
    return {"tflop_per_s": products.flops / bound / 1e12, "cases": figures}


def show(result: dict[str, Any]) -> None:
    """The figures, for people."""
    for name in ("gather", "reduce"):
        for transport, found in result["alone"][name].items():
            print(f"{name:8} {transport:12} {1e3 * found['seconds']:7.3f} ms  {found['gb_per_s']:6.0f} GB/s")
    for name in ("sum", "sum of chunks"):
        for programs, found in result["alone"][name].items():
            mark = "  <- default" if programs == PROGRAMS else ""
            times = f"{1e3 * found['seconds']:7.3f} ms  {found['gb_per_s']:6.0f} GB/s{mark}"
            print(f"{name + ',':14} {programs:4} programs {times}")
    found = result["alone"]["place"]
    print(f"place                        {1e3 * found['seconds']:7.3f} ms  {found['gb_per_s']:6.0f} GB/s")
    print(f"products alone: {result['beside']['tflop_per_s']:.0f} TFLOP/s")
    for name, found in result["beside"]["cases"].items():
        print(f"beside {name:42} {1e3 * found['seconds']:7.2f} ms  tax {found['tax']:6.1%}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="rows of every product")
    options = parser.parse_args()
    rank, device = join()
    world = dist.get_world_size()
    groups = {name: make_groups(Mesh(dp=world), rank, device, name) for name in ("nccl", "copy_engine")}
    unit, clock = Unit(groups, device, world), Clock(device)
    result = {
        "tokens": options.tokens,
        "unit_bytes": unit.full.nbytes,
        "alone": measure_alone(unit, clock),
        "beside": measure_beside(unit, clock, options.tokens),
    }
    if rank == 0:
        show(result)
        print(write("copy_engine", result, options.out, options.commit))
    dist.barrier()
    for made in groups.values():
        made.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
