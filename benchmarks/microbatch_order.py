"""What the order of microbatches within a step would gain, if it went by the attention of their documents.

    python -m benchmarks.microbatch_order

A microbatch has as many tokens as any other, and as little attention as its documents are short. Lengths are those of
`benchmarks.context_balance`. Each step is simulated with the costs of its own microbatches: as they come, the dearest
first, last, and in the middle. Costs of attention are linear in the keys that a token meets, so those of a microbatch
lie on the line through two sequence lengths. Data-parallel ranks wait for each other in every microbatch, as they do
where weights are gathered for each use, so the one with the most attention counts. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from benchmarks.context_balance import lengths_of
from benchmarks.markdown import table
from hocket.config import Config
from hocket.model.chunks import work_of
from hocket.planning import program_of
from hocket.program.cost import CostTable
from hocket.program.network import hardware_of
from hocket.program.ops import Op, Program
from hocket.program.overheads import overheads_of
from hocket.program.schedule import Time
from hocket.program.simulate import simulate
from hocket.program.stages import costs_of
from hocket.resolve import Settings, resolve
from hocket.settings.families import llama3_8b
from hocket.settings.rule import Host
from hocket.settings.schema import changed

STEPS = 20
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "no pipeline": (8, {"mesh.pp": 1, "plan.order": "1f1b"}),
    "1F1B": (8, {"mesh.pp": 4, "plan.order": "1f1b"}),
    "interleaved": (8, {"mesh.pp": 4, "plan.order": "interleaved", "plan.chunks": 2}),
    "interleaved, more microbatches": (16, {"mesh.pp": 4, "plan.order": "interleaved", "plan.chunks": 2}),
}
"""Microbatches, and settings."""
ORDERS: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "dearest first": lambda works: sorted(works, reverse=True),
    "dearest last": sorted,
    "dearest in the middle": lambda works: sorted(works)[::2] + sorted(works)[1::2][::-1],
}


@dataclass(frozen=True)
class Varied(CostTable):
    """Costs of microbatches that have different shares of the attention of whole sequences."""

    half: CostTable | None = None
    """The costs with sequences half as long, and twice as many."""
    works: Sequence[float] = ()

    def seconds(self, rank: int, op: Op) -> Time:
        whole = super().seconds(rank, op)
        if op.verb not in ("fwd", "bwd", "recompute") or self.half is None:
            return whole
        per_share = 2 * (float(whole) - float(self.half.seconds(rank, op)))
        return float(whole) - (1 - self.works[op.microbatch]) * per_share


def works(seed: int, length: int, count: int) -> list[float]:
    """Each microbatch's attention as a share of that of a whole sequence."""
    every = [lengths_of(100 * seed + n, length) for n in range(count)]
    return [sum(work_of(bounds, ((range(length),),))) / (length * (length + 1) / 2) for bounds in every]


def slowest(works: Sequence[Sequence[float]]) -> list[float]:
    """Of data-parallel ranks that wait for each other's weights in every microbatch."""
    return [max(each) for each in zip(*works, strict=True)]


def settings_of(case: dict[str, Any], length: int, microbatches: int) -> Settings:
    given = {
        "precision.compute": "bf16", "train.device": "cuda", "train.transport": "nccl",
        "data.sequence_length": length, "train.sequences": 1, "train.microbatches": microbatches, **case,
    }  # fmt: skip
    config = changed(replace(Config(), model=llama3_8b()), given)
    return resolve(config, Host(gpus=config.mesh.world))


def gains(settings: Settings) -> dict[str, float]:
    """By how much steps are shorter in each order than as they come, on average over steps."""
    program, hardware = program_of(settings), hardware_of(settings)
    whole = costs_of(settings, hardware)
    length = settings.data.sequence_length
    half = costs_of(changed(settings, {"data.sequence_length": length // 2, "train.sequences": 2}), hardware)
    overheads = overheads_of(settings, hardware, whole.table)

    def seconds(program: Program, shares: Sequence[float]) -> float:
        varied = Varied(**{name: getattr(whole, name) for name in whole.__dataclass_fields__}, half=half, works=shares)
        return float(simulate(program, varied, overheads).makespan)

    found = dict.fromkeys((*ORDERS, "best of these"), 0.0)
    for step in range(STEPS):
        drawn = [works(100 * step + rank, length, settings.train.microbatches) for rank in range(settings.mesh.dp)]
        plain = seconds(program, slowest(drawn))
        ordered = {name: slowest([order(each) for each in drawn]) for name, order in ORDERS.items()}
        gained = {name: 1 - seconds(program, each) / plain for name, each in ordered.items()}
        gained["best of these"] = max(0.0, *gained.values())
        for name, gain in gained.items():
            found[name] += gain / STEPS
    return found


def main() -> None:
    rows = []
    for length in (32 * 1024, 128 * 1024):
        for (name, (count, case)), dp in product(CASES.items(), (2, 8)):
            found = gains(settings_of({**case, "mesh.dp": dp}, length, count))
            rows.append(
                [f"{length:,}", name, str(dp), str(count), *(f"{100 * gain:+.1f} %" for gain in found.values())]
            )
    print(table(["tokens", "order of the pipeline", "dp", "microbatches", *found], rows))


if __name__ == "__main__":
    main()
