"""A smaller mesh for a run that lost hosts: `torchrun --nnodes 1:2` restarts what is left.

Note: [What a smaller mesh must hold]
Fewer ranks share weights and the optimizer's state, so each holds more of them. The first mesh whose step is predicted
to fit is taken. Settings that the run left open count at their least memory, because later choices know the memory
too. If no mesh fits, the one that needs least is taken, and the run says so: predictions may be wrong, and a run that
runs out of memory reports that itself.

Note: [Settings that a smaller mesh gives up]
A setting of how a step runs may be without effect or impossible on a smaller mesh: `overlap.dp.prefetch` with one
data-parallel rank. It is reset to its default, and the run says so. Otherwise a rule would refuse that mesh, and with
it the run. Settings of what a step computes are never given up, nor those that the whole mesh does not allow either.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

from hocket.config import Config, MeshConfig
from hocket.config.rule import Host, Rule, leaf, problem
from hocket.config.schema import changed, source
from hocket.decision import Decision
from hocket.program.mesh import described
from hocket.program.ops import recomputable
from hocket.tune.trials import Trials, fits, gib, memory_of, room

_CHANGED = (*(f"mesh.{field.name}" for field in dataclasses.fields(MeshConfig)), "train.microbatches")

RECOMPUTE = "plan.recompute"

Settle = Callable[[Config], tuple[Config, Config] | None]
"""Returns (the configuration without what it gives up, the same after all choices that need no costs), or None if a
rule refuses it."""

_HOW = ("overlap.", "plan.", "network.")
"""Sections of settings that define how a step runs."""


def gives_up(rule: Rule) -> bool:
    """Whether a setting that breaks this rule is given up: Note: [Settings that a smaller mesh gives up]."""
    return rule.settings[0].startswith(_HOW) or rule.without_effect


def smaller_mesh(
    config: Config, host: Host, origins: Mapping[str, str], settle: Settle, trials: Trials
) -> tuple[Config, list[Decision]]:
    """A configuration for fewer processes than ranks, if `run.elastic` allows it.

    It has the first mesh of `_smaller` that no rule refuses and whose memory suffices: see Note: [What a smaller mesh
    must hold]. The decisions say what changes. If rules refuse all meshes, it is the first one, and the rules say why.
    Raises ValueError if there is no such mesh.
    """
    ranks = host.workers
    if not config.run.elastic or not 0 < ranks < config.mesh.world:
        return config, []
    meshes = list(_smaller(config, ranks))
    if not meshes:
        reason = f"no mesh of the {ranks} processes that were started has the batch of {config.mesh.world} ranks"
        fix = "another number of processes, or run.elastic = False and another mesh"
        raise ValueError(problem("run.elastic", True, origins, reason, fix))
    found, why = _chosen(meshes, settle, host, trials)
    reason = (
        f"{config.mesh.world} ranks, and processes for {ranks} of them were started: run.elastic takes a smaller mesh"
    )
    decisions = []
    for name in _CHANGED:
        asked, value = leaf(config, name), leaf(found, name)
        if asked == value:
            continue
        origin = source(config, origins, name)
        reasons = ("the sequences of a step stay as many",) if name == "train.microbatches" else (reason, *why)
        decisions.append(
            Decision(setting=name, value=value, asked=asked, source=origin, reasons=reasons, given_up=True)
        )
    return found, decisions


def _chosen(meshes: list[Config], settle: Settle, host: Host, trials: Trials) -> tuple[Config, tuple[str, ...]]:
    """The configuration to take, and what its memory has to do with that."""
    passed, least = "", list[tuple[int, Config]]()
    for each in meshes:
        runs = settle(each)
        if runs is None:
            continue
        memory = memory_of(runs[1], host)
        needed = trials.step(_least_memory(*runs)).nbytes if memory else 0
        if not memory or fits(needed, memory):
            return each, (passed,) if passed else ()
        passed = passed or f"a step of {described(each.mesh)} would need {gib(needed)} of {gib(room(memory))}"
        least.append((needed, each))
    if not least:
        return meshes[0], ()
    needed, found = min(least, key=lambda pair: pair[0])
    return found, (f"none is predicted to fit: {passed}, and one of this mesh {gib(needed)}",)


def _least_memory(asked: Config, settled: Config) -> Config:
    """The settled configuration with open settings at their least memory: Note: [What a smaller mesh must hold]."""
    parts = recomputable(settled.model.kinds(), settled.mesh.cp)
    least = {
        RECOMPUTE: parts, "overlap.dp.strategy": "optim_grads_params", "plan.graphs": "off", "train.transport": "nccl",
        "plan.layers_per_stage": (),
    }  # fmt: skip
    return changed(settled, {name: value for name, value in least.items() if leaf(asked, name) in ("auto", ("auto",))})


def _smaller(config: Config, ranks: int) -> Iterator[Config]:
    """Configurations of `ranks` ranks with the same batch, ordered by decreasing tp, pp, cp, shard, ep."""
    mesh, train = config.mesh, config.train
    for tp, pp, cp in itertools.product(*map(_divisors, (mesh.tp, mesh.pp, mesh.cp))):
        dp, rest = divmod(ranks, tp * pp * cp)
        microbatches, uneven = divmod(mesh.dp * train.microbatches, dp) if dp else (0, 1)
        if rest or uneven:
            continue
        for shard, ep in itertools.product(_divisors(mesh.shard), _divisors(mesh.ep)):
            if (shard and dp * cp % shard) or (shard or dp * cp) * tp % ep:
                continue
            sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "shard": shard, "ep": ep}
            values = {f"mesh.{name}": size for name, size in sizes.items()}
            yield changed(config, {**values, "train.microbatches": microbatches})


def _divisors(number: int) -> list[int]:
    """The divisors of a number, the largest first; [0] for 0, an unused axis."""
    return [each for each in range(number, 0, -1) if number % each == 0] or [0]
