"""A smaller mesh for a run whose hosts have become fewer: `torchrun --nnodes 1:2` starts what is left again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping

from hocket.config import Config, MeshConfig
from hocket.settings.decision import Decision
from hocket.settings.origins import source
from hocket.settings.rule import Host
from hocket.settings.schema import changed, leaf, problem

_CHANGED = (*(f"mesh.{field.name}" for field in dataclasses.fields(MeshConfig)), "train.microbatches")


def smaller_mesh(
    config: Config, host: Host, origins: Mapping[str, str], fits: Callable[[Config], bool]
) -> tuple[Config, list[Decision]]:
    """A configuration for the processes that were started, where `run.elastic` allows fewer of them than ranks.

    It takes the first mesh of `_smaller` that `fits`. The decisions say what changes. Raises ValueError if none fits.
    """
    ranks = host.workers
    if not config.run.elastic or not 0 < ranks < config.mesh.world:
        return config, []
    found = next(filter(fits, _smaller(config, ranks)), None)
    if found is None:
        reason = f"no mesh of the {ranks} processes that were started has the batch of {config.mesh.world} ranks"
        fix = "another number of processes, or run.elastic = False and another mesh"
        raise ValueError(problem("run.elastic", True, origins, reason, fix))
    reason = (
        f"{config.mesh.world} ranks, and processes for {ranks} of them were started: run.elastic takes a smaller mesh"
    )
    decisions = []
    for name in _CHANGED:
        asked, value = leaf(config, name), leaf(found, name)
        if asked == value:
            continue
        why = "the sequences of a step stay as many" if name == "train.microbatches" else reason
        whence = source(config, origins, name)
        decisions.append(Decision(setting=name, value=value, asked=asked, source=whence, reasons=(why,), given_up=True))
    return found, decisions


def _smaller(config: Config, ranks: int) -> Iterator[Config]:
    """Configurations of so many ranks with the same batch. First those with more of tp, then pp, cp, shard, ep."""
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
    """The largest first; of 0, which leaves something out, 0 itself."""
    return [each for each in range(number, 0, -1) if number % each == 0] or [0]
