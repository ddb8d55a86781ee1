"""How fast a GPU's clock runs while it computes a step: as fast as its power allows.

Note: [Power sets the clock]
Matmuls and attention keep to the clock, kernels between them to the memory. A rank that draws as much power as it may
runs at a lower clock than the full one. Drawn power grows with the voltage's square, the voltage with the clock, and
what is drawn beside that is mostly what is computed: so at the limit

    (FLOP/s of matmuls + 0.8 FLOP/s of attention) * clock^2 = a constant of the kind of GPU

On an H200 at 700 W that was 1.15 to 1.52e33 for the bounds of `hocket bench` that kept to that limit, of dense models
at 1.50 GHz as of MoEs at 1.78 GHz (clock and power stand in benchmarks/results). A step with less to multiply runs its
matmuls at a higher clock. Attention draws less for a FLOP: sequences of 131,072 tokens, most of whose FLOPs are
attention's, ran at 1.73 GHz. What communication draws is in its contention (`overheads.py`).

A GPU takes far longer than an op to change its clock. So one clock holds for a whole step, that of all ops of a
microbatch one after the other; bubbles, in which a GPU cools, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hocket.program.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Work:
    """What compute does: seconds at the full clock that keep to the clock, and others; FLOPs."""

    clocked: float
    others: float
    flops: float
    """Of matmuls in bf16 that draw as much power."""


def clock_of(hardware: Hardware, works: Iterable[Work]) -> float:
    """The clock in Hz at which a rank does such works in turns, to within 1e-6."""
    parts = list(works)
    clocked, others, flops = (sum(part) for part in zip(*((w.clocked, w.others, w.flops) for w in parts), strict=True))
    low, high = 0.0, hardware.clock
    if flops * high**2 <= hardware.power * (clocked + others):
        return high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        too_fast = flops * middle**2 > hardware.power * (clocked * hardware.clock / middle + others)
        low, high = (low, middle) if too_fast else (middle, high)
    return low


def at_clock(hardware: Hardware, clock: float) -> Hardware:
    """The hardware with the rates of that clock. Its prices then are those of a GPU that knows no limit."""
    share = clock / hardware.clock
    return replace(
        hardware,
        gemm_flops=share * hardware.gemm_flops,
        attention_fwd_flops=share * hardware.attention_fwd_flops,
        attention_bwd_flops=share * hardware.attention_bwd_flops,
        clock=0.0,
    )
