"""What the order of microbatches within a step gains where it goes by the attention of their documents.

    python -m benchmarks.microbatch_order

A microbatch has as many tokens as any other, and as little attention as its documents are short. Lengths are those of
`benchmarks.context_balance`. Each step is simulated with the costs of its own microbatches: as they are read, and as
`hocket/program/documents.py` deals them out. Data-parallel ranks wait for each other in every microbatch, as they do
where weights are gathered for each use, so the one with the most attention counts. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from benchmarks.context_balance import lengths_of as bounds_of
from benchmarks.markdown import table
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import program_of, slowest_ranks
from hocket.predict.cost import costs_of, overheads_of, packed_costs
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import simulate
from hocket.program.documents import Lengths, lengths_of
from hocket.recipes import LLAMA3_8B
from hocket.resolve import Settings, resolve

STEPS = 20
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "no pipeline": (8, {"mesh.pp": 1, "plan.order": "1f1b"}),
    "1F1B": (8, {"mesh.pp": 4, "plan.order": "1f1b"}),
    "interleaved": (8, {"mesh.pp": 4, "plan.order": "interleaved", "plan.chunks": 2}),
    "interleaved, more microbatches": (16, {"mesh.pp": 4, "plan.order": "interleaved", "plan.chunks": 2}),
}
"""Microbatches, and settings."""


def documents(seed: int, length: int) -> Lengths:
    """Those of a sequence."""
    return lengths_of(b - a for a, b in pairwise(bounds_of(seed, length)))


def settings_of(case: dict[str, Any], length: int, microbatches: int) -> Settings:
    given = {
        "precision.compute": "bf16", "data.packing": "on", "train.device": "cuda", "train.transport": "nccl",
        "data.sequence_length": length, "train.sequences": 1, "train.microbatches": microbatches, **case,
    }  # fmt: skip
    config = changed(replace(Config(), model=LLAMA3_8B), given)
    return resolve(config, Host(gpus=config.mesh.world))


def gain(settings: Settings) -> float:
    """By how much steps are shorter than as they are read, on average over steps."""
    program, hardware, length = program_of(settings), hardware_of(settings), settings.data.sequence_length
    whole = costs_of(settings, hardware)
    overheads = overheads_of(settings, hardware, whole.table)

    def seconds(sequences: Sequence[Lengths], packing: str) -> float:
        slowest = slowest_ranks(changed(settings, {"data.packing": packing}), sequences)  # without it as they are read
        return float(simulate(program, packed_costs(whole, settings, hardware, slowest), overheads).makespan)

    found = 0.0
    for step in range(STEPS):
        sequences = [documents(settings.batch * step + n, length) for n in range(settings.batch)]
        found += (1 - seconds(sequences, "on") / seconds(sequences, "off")) / STEPS
    return found


def main() -> None:
    rows = []
    for length in (32 * 1024, 128 * 1024):
        for (name, (count, case)), dp in product(CASES.items(), (1, 2, 8)):
            if dp == case["mesh.pp"] == 1:
                continue
            gained = gain(settings_of({**case, "mesh.dp": dp}, length, count))
            rows.append([f"{length:,}", name, str(dp), str(count), f"{100 * gained:+.1f} %"])
    print(table(["tokens", "order of the pipeline", "dp", "microbatches", "shorter by"], rows))


if __name__ == "__main__":
    main()
