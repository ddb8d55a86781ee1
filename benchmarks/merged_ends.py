"""What pairs at the ends of a merged order gain: predicted steps with and without them. Needs no GPU.

Layers of published MoE models on H200s, a quarter of them where there is no pipeline, for they would not fit; and the
recipes as they are, in groups of the smallest size and of twice as many microbatches as pipeline ranks.
`python -m benchmarks.tables merged_ends` prints these rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hocket.config import Config, MeshConfig, Switch
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import predict, program_of
from hocket.predict.hardware import H200
from hocket.recipes import recipe
from hocket.resolve import resolve

MODELS = ("qwen3_30b_a3b", "moonlight_16b", "mixtral_8x7b")
ENDS: tuple[Switch, ...] = ("off", "on")


def cases() -> Iterator[tuple[str, Config]]:
    """What is compared, by name."""
    for name in MODELS:
        whole = recipe(name)
        layers = whole.model.layers // 4
        dense = tuple(n for n in whole.model.dense_layers if n < layers)
        model = replace(whole.model, layers=layers, dense_layers=dense)
        for microbatches in (2, 4, 8):
            yield (
                f"{name}, {layers} layers, 4 ranks without a pipeline",
                replace(
                    whole,
                    model=model,
                    mesh=MeshConfig(dp=4, ep=4),
                    plan=replace(whole.plan, chunks=1),
                    train=replace(whole.train, microbatches=microbatches),
                ),
            )
    for name in MODELS:
        whole = recipe(name)
        for group in (whole.mesh.pp, 2 * whole.mesh.pp):
            plan = replace(whole.plan, group=group)
            yield f"{name}, {whole.mesh.pp} pipeline ranks, groups of {group}", replace(whole, plan=plan)


def row(name: str, config: Config) -> dict[str, Any]:
    """Seconds, exposed all-to-all and memory, without and with pairs; and what `auto` chooses."""
    found: dict[str, Any] = {"name": name, "microbatches": config.train.microbatches}
    host = Host(gpus=config.mesh.pp * config.mesh.dp)
    for ends in ENDS:
        settings = resolve(changed(config, {"overlap.ep.merge": "on", "overlap.ep.merge_ends": ends}), host)
        timeline = predict(settings, program_of(settings), H200)
        found[ends] = {
            "seconds": float(timeline.makespan),
            "exposed_a2a": max(float(use.exposed["a2a"]) for use in timeline.ranks),
            "peak_bytes": max(use.peak_bytes for use in timeline.ranks),
        }
    return {**found, "auto": resolve(config, host).overlap.ep.merge_ends}
