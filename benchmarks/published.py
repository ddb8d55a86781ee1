"""Published runs beside what hocket predicts for the same layouts: `python -m benchmarks.published`.

`published.json` has a few public runs in bf16 whose shapes hocket can express, as their authors describe them. Software
differs (kernels, recomputation, host, network), so this shows whether rates that are scaled from data sheets come out
in the right range, and how far off they are. Nothing is tuned to it. No public run of B200s or GB200s computes in
bf16. Runs of Megatron keep weights and gradients whole and share the optimizer's state, which is what its distributed
optimizer does. Half a minute on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import Result, table
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.config import Config, ModelConfig
from hocket.config.schema import changed
from hocket.machine import host_for_plan
from hocket.planning import predict, program_of
from hocket.predict.hardware import hardware_of
from hocket.predict.part_sizes import model_flops_per_token
from hocket.resolve import resolve

FACTS = Path(__file__).with_name("published.json")
GROUPS = 3
"""Groups of microbatches, one for each stage, that are simulated, and one less: longer steps go on in the same way."""


@dataclass(frozen=True)
class Row:
    """A run: model TFLOP/s of one GPU, as published and as predicted."""

    name: str
    gpu: str
    gpus: int
    published: float
    predicted: float
    settings: str

    @property
    def ratio(self) -> float:
        """Predicted over published; above 1 hocket expects a faster step."""
        return self.predicted / self.published


def config_of(facts: dict[str, Any], microbatches: int) -> Config:
    """The run with so many microbatches."""
    fixed = {
        "run.name": facts["name"],
        "hardware.gpu": facts["gpu"],
        "model": ModelConfig(**facts["model"]),
        "network.ranks_per_host": min(8, facts["gpus"]),
        "data.sequence_length": facts["sequence"],
        "train.device": "cuda",
        "precision.compute": "bf16",
        "train.microbatches": microbatches,
        **facts["settings"],
    }
    lists = {name: tuple(value) for name, value in fixed.items() if isinstance(value, list)}
    return changed(Config(), fixed | lists)


def seconds(facts: dict[str, Any], microbatches: int) -> float:
    """The predicted step."""
    config = config_of(facts, microbatches)
    settings = resolve(config, host_for_plan(config))
    return float(predict(settings, program_of(settings), hardware_of(settings)).makespan)


def row(facts: dict[str, Any]) -> Row:
    """A run with what is predicted of it: of a long step, from two shorter ones."""
    config = config_of(facts, 1)
    mesh, count = config.mesh, facts["microbatches"]
    few, more = (
        (min(count, mesh.pp * n) for n in (GROUPS - 1, GROUPS)) if mesh.pp > 1 else (min(4, count), min(8, count))
    )
    short, long = (seconds(facts, n) for n in (few, more))
    step = long if more == few else long + (count - more) / (more - few) * (long - short)
    tokens = count * mesh.dp * config.train.sequences * facts["sequence"]
    flops = model_flops_per_token(config.model, facts["sequence"]) * tokens / mesh.world
    published = facts["tokens_per_second"] * model_flops_per_token(config.model, facts["sequence"])
    words = " ".join(f"{name} {value}" for name, value in facts["settings"].items())
    return Row(facts["name"], facts["gpu"], mesh.world, published / 1e12, flops / step / 1e12, words)


def rows(facts: Sequence[dict[str, Any]]) -> list[Row]:
    """All of them."""
    return [row(each) for each in facts]


def comparison(result: Result) -> str:
    """A row for each run."""
    rows = [
        [
            each["name"],
            f"{each['gpus']:,} x {each['gpu']}",
            f"{each['published']:.0f}",
            f"{each['predicted']:.0f}",
            f"{each['predicted'] / each['published']:.2f}",
            each["source"],
        ]
        for each in result["rows"]
    ]
    head = ["run", "GPUs", "published, TFLOP/s", "predicted, TFLOP/s", "predicted / published", "source"]
    return table(head, rows)


def main() -> None:
    """Print the table, and write what it is made from."""
    options = arguments(__doc__).parse_args()
    facts = json.loads(FACTS.read_text())
    found = [asdict(each) | {"source": fact["source"]} for each, fact in zip(rows(facts), facts, strict=True)]
    print(comparison({"rows": found}))
    print(write("published", {"rows": found}, options.out, options.commit))


if __name__ == "__main__":
    main()
