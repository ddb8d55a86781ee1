"""Chooses `data.order` if it is `auto`: by steps simulated with microbatches whose attention differs.

Documents are not read for that. Shares of a whole sequence's attention are taken to be spread evenly, from none to all
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from hocket.config import Config, DataOrder, Strategy
from hocket.program.dealing import dealt, works_of
from hocket.program.simulate import times
from hocket.program.varied import varied
from hocket.settings.plan_rules import group_of
from hocket.settings.rule import Host
from hocket.settings.rules import has_experts
from hocket.settings.schema import changed
from hocket.tune.by_cost import WORTH
from hocket.tune.trials import Trials, enough_microbatches
from hocket_trace.columns import duration

_GOLDEN = 0.6180339887498949
_SCALE = 10**6
_ONCE: tuple[Strategy, ...] = ("no_shard", "optim")
"""Strategies with which data-parallel ranks meet once a step."""


def choose_data_order(c: Config, host: Host, trials: Trials) -> tuple[DataOrder, str]:
    m = c.mesh
    if c.data.packing == "off":
        return "as_read", ""
    if c.train.device == "cpu" or c.precision.compute == "fp32":
        return "as_read", "attention with a mask takes as long whatever documents there are (needs GPUs, and bf16)"
    if m.pp * m.dp == 1 or m.dp * c.train.microbatches == 1:
        return "as_read", "no rank waits for another one's microbatch"
    steps = {order: step_seconds(c, order, trials) for order in get_args(DataOrder)}
    best = min(steps, key=lambda order: steps[order])
    times = ", ".join(f"{duration(seconds)} {order}" for order, seconds in steps.items())
    spread = "where attention of sequences is spread evenly from none to that of one document"
    if steps[best] > (1 - WORTH) * steps["as_read"]:
        return "as_read", f"a step of {_microbatches(c)} microbatches takes {times}, {spread}: too little to gain"
    return best, f"a step of {_microbatches(c)} microbatches takes {times}, {spread}"


def step_seconds(c: Config, order: DataOrder, trials: Trials) -> float:
    """How long a step of a few microbatches takes in that order."""
    count = _microbatches(c)
    sequences = c.mesh.dp * count * c.train.sequences
    drawn = [round(_SCALE * (n * _GOLDEN % 1)) for n in range(1, sequences + 1)]
    works = works_of(dealt(drawn, c.mesh.dp, c.train.sequences, order), drawn)
    of_ranks = [[_share(c, microbatch[rank]) for microbatch in works] for rank in range(c.mesh.dp)]
    if _meet_once(c):
        shares = max(of_ranks, key=sum)
    else:
        shares = [max(of_microbatch) for of_microbatch in zip(*of_ranks, strict=True)]
    return seconds_with(c, count, shares, trials)


def seconds_with(c: Config, microbatches: int, shares: Sequence[float], trials: Trials) -> float:
    """How long a step takes whose microbatches have these shares of the attention of whole sequences."""
    halves = {"data.sequence_length": c.data.sequence_length // 2, "train.sequences": 2 * c.train.sequences}
    costs = varied(trials.costs(c), trials.costs(changed(c, halves)), shares)
    return float(max(times(trials.program(c, microbatches), costs)[1]))


def _share(c: Config, work: int) -> float:
    return work / (_SCALE * c.train.sequences)


def _microbatches(c: Config) -> int:
    """Of a simulated step: four groups, since few microbatches have another best order than many."""
    return min(c.train.microbatches, max(enough_microbatches(c), 4 * group_of(c)))


def _meet_once(c: Config) -> bool:
    """Whether data-parallel ranks wait for each other at the end of a step alone."""
    return c.overlap.dp.strategy in _ONCE and not (has_experts(c) and c.mesh.ep > 1)
