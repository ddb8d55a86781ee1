"""Memory of replayed steps is predicted within a tenth of what runs took; `auto` takes no graph that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.baselines import words
from benchmarks.bench.command import Bench, for_bench
from benchmarks.model_steps import Modelled
from hocket.commands.options import parse
from hocket.commands.train import Train
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.decision import Decision
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve, without_copies
from hocket.rules import broken
from hocket.tune.trials import Trials, fits

GPU = Host(gpus=4)
MEASURED = [
    ("expert_parallel", 4, 4096, {"plan.graphs": "on"}, 32.78),
    ("expert_parallel", 4, 4096, {"plan.graphs": "off", "overlap.ep.copies": "per_expert"}, 26.32),
    ("expert_parallel", 2, 4096, {"plan.graphs": "off", "overlap.ep.copies": "per_expert"}, 34.13),
    ("shared_expert", 2, 8192, {"plan.graphs": "on"}, 43.25),
    ("pipeline_peers", 4, 2048, {"plan.graphs": "off", "overlap.ep.copies": "per_expert"}, 18.43),
]
"""Presets on H200s, and GB that a step took beside what was held between steps, by the count of torch's allocator."""


def preset(name: str, gpus: int, length: int, changes: dict[str, Any]) -> Settings:
    options, origins = parse(Bench, "bench", words(name, gpus, []))
    config = changed(for_bench(options, origins), {"data.sequence_length": length, **changes})
    return resolve(config, Host(gpus=gpus))


@pytest.mark.parametrize(("name", "gpus", "length", "changes", "gb"), MEASURED)
def test_predicted_memory_is_what_runs_took(
    name: str, gpus: int, length: int, changes: dict[str, Any], gb: float
) -> None:
    assert Modelled.of(preset(name, gpus, length, changes)).needs == pytest.approx(gb * 1e9, rel=0.1)


def decision(settings: Settings, name: str) -> Decision:
    (found,) = [d for d in settings.decisions if d.setting == name]
    return found


def test_a_graph_is_taken_only_where_it_fits() -> None:
    """One GPU has just enough memory for it, the other a little less: enough to issue the step op by op."""
    graphed = preset("expert_parallel", 4, 4096, {})
    assert (graphed.plan.graphs, graphed.overlap.ep.splits) == ("on", "device")
    asked = changed(Config(**{s: getattr(graphed, s) for s in SECTIONS}), {"plan.graphs": "auto", SPLITS: "auto"})
    graph, issued = (
        Trials().step(changed(asked, {"plan.graphs": on, SPLITS: by})).nbytes
        for on, by in (("on", "device"), ("off", "host"))
    )
    assert graph > issued
    enough = next(memory for memory in range(graph, 2 * graph, graph // 100) if fits(graph, memory))
    least = enough - graph // 50
    assert fits(issued, least)
    roomy, tight = (resolve(asked, Host(gpus=4, memory=memory)) for memory in (enough, least))
    assert (roomy.plan.graphs, roomy.overlap.ep.splits) == ("on", "device")
    assert (tight.plan.graphs, tight.overlap.ep.splits) == ("off", "host")
    assert "which does not fit" in decision(tight, "plan.graphs").reason
    assert "pay in replayed steps" in decision(tight, SPLITS).reason
    assert resolve(tight).decisions == tight.decisions


def test_pairs_at_the_ends_do_not_take_the_memory_of_a_graph() -> None:
    graphed, ends = preset("expert_parallel", 4, 4096, {}), "overlap.ep.merge_ends"
    less, more = (Trials().step(changed(graphed, {ends: value})).nbytes for value in ("off", "on"))
    memory = next(memory for memory in range(less, 2 * less, less // 100) if fits(less, memory))
    assert not fits(more, memory)
    asked = Config(**{s: getattr(graphed, s) for s in SECTIONS})
    found = resolve(changed(asked, {"plan.graphs": "auto", SPLITS: "auto", ends: "auto"}), Host(gpus=4, memory=memory))
    assert (found.plan.graphs, found.overlap.ep.merge_ends) == ("on", "off")


def test_a_step_that_keeps_its_gpus_busy_is_issued_op_by_op() -> None:
    """Twice the tokens are as many ops."""
    short, long = (preset("expert_parallel", 4, length, {}) for length in (4096, 8192))
    assert (short.plan.graphs, long.plan.graphs, long.overlap.ep.splits) == ("on", "off", "host")
    assert decision(long, "plan.graphs").reason.endswith("they never wait for it")
    asked = preset("expert_parallel", 4, 8192, {SPLITS: "device"})
    assert asked.plan.graphs == "on", "without a graph, splits of the device's would gain nothing"


def test_casts_are_issued_too() -> None:
    """Kernels of fp8 are more and last shorter."""
    mesh = "--mesh.pp 1 --mesh.ep 1 --mesh.dp 1 --plan.chunks 1"
    words = f"qwen3_30b_a3b {mesh} --model.layers 6 --train.microbatches 4 --precision.compute"
    chosen = {
        compute: resolve(parse(Train, "train", [*words.split(), compute])[0].config, Host(gpus=1))
        for compute in ("bf16", "fp8")
    }
    assert {compute: settings.plan.graphs for compute, settings in chosen.items()} == {"bf16": "off", "fp8": "on"}


def test_gpus_that_a_trial_keeps_apart_store_no_rows_either() -> None:
    """The kernels write into the memory in which copies were to arrive."""
    chosen = preset("expert_parallel", 4, 4096, {"train.transport": "auto"})
    assert (chosen.train.transport, chosen.plan.graphs, chosen.overlap.ep.splits) == ("copy_engine", "on", "device")
    settled = without_copies(chosen, "a trial failed")
    assert (settled.train.transport, settled.plan.graphs, settled.overlap.ep.splits) == ("nccl", "off", "host")
    assert "a trial failed" in decision(settled, "plan.graphs").reason
    asked = preset("expert_parallel", 4, 4096, {"train.transport": "auto", SPLITS: "device"})
    assert without_copies(asked, "a trial failed").overlap.ep.splits == "device"


def test_a_graph_that_a_user_asks_for_is_taken_whether_it_fits_or_not() -> None:
    settings = preset("expert_parallel", 4, 4096, {"plan.graphs": "on"})
    asked = changed(settings, {SPLITS: "auto"})
    assert resolve(asked, Host(gpus=4, memory=1 << 30)).plan.graphs == "on"


def test_splits_that_a_user_asks_for_stay_without_a_graph() -> None:
    """What is chosen after the splits is chosen for them: one copy for each rank needs those that the host knows."""
    asked = {SPLITS: "device", "overlap.ep.merge": "off", "plan.recompute": (), "plan.loss_pieces": 1}
    host = Host(gpus=8, gpu="NVIDIA H200", memory=20 << 30)
    settings = resolve(changed(recipe("moe_8gpu"), {**asked, "plan.layers_per_stage": ()}), host)
    assert settings.overlap.ep.splits == "device"
    assert broken(settings, host, {}) == []


def test_validations_lie_beside_a_graph() -> None:
    settings = preset("expert_parallel", 4, 4096, {"plan.graphs": "on"})
    sizes = [Trials().step(changed(settings, {"train.eval_batches": n})).nbytes for n in (0, 1)]
    assert sizes[0] < sizes[1]


SECTIONS = ("model", "mesh", "plan", "overlap", "data", "precision", "train", "run")
SPLITS = "overlap.ep.splits"
