"""Chooses `data.order` if it is `auto`: by steps simulated with microbatches whose attention differs.

Documents are not read for that, so that all ranks and all starts of a run come to the same. Sequences are taken to have
documents of one length each, which is spread evenly over them: from nothing to a whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from hocket.config import Config, DataOrder, Strategy
from hocket.program.attending import Lengths, merged
from hocket.program.dealing import dealt, works_of
from hocket.program.network import hardware_of
from hocket.program.part_sizes import attending
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
_ONCE: tuple[Strategy, ...] = ("no_shard", "optim")
"""Strategies with which data-parallel ranks meet once a step."""


def choose_data_order(c: Config, host: Host, trials: Trials) -> tuple[DataOrder, str]:
    m = c.mesh
    if c.data.packing == "off":
        return "as_read", ""
    if not by_documents(c):
        return "as_read", "attention with a mask takes as long whatever documents there are (needs GPUs, and bf16)"
    if m.pp * m.dp == 1 or m.dp * c.train.microbatches == 1:
        return "as_read", "no rank waits for another one's microbatch"
    if not attending(c.model, c.data.sequence_length).layers:
        return "as_read", "no layer has attention"
    steps = {order: step_seconds(c, order, trials) for order in get_args(DataOrder)}
    best = min(reversed(steps), key=lambda order: round(steps[order] / steps["as_read"], 3))
    times = ", ".join(f"{duration(seconds)} {order}" for order, seconds in steps.items())
    spread = "where lengths of documents are spread evenly up to that of a sequence"
    if steps[best] > (1 - WORTH) * steps["as_read"]:
        return "as_read", f"a step of {_microbatches(c)} microbatches takes {times}, {spread}: too little to gain"
    return best, f"a step of {_microbatches(c)} microbatches takes {times}, {spread}"


def by_documents(c: Config) -> bool:
    """Whether attention takes as long as documents are that share sequences."""
    return c.data.packing != "off" and c.train.device != "cpu" and c.precision.compute != "fp32"


def step_seconds(c: Config, order: DataOrder, trials: Trials) -> float:
    """How long a step of a few microbatches takes in that order."""
    count, length = _microbatches(c), c.data.sequence_length
    drawn = [max(1, round(length * (n * _GOLDEN % 1))) for n in range(1, c.mesh.dp * count * c.train.sequences + 1)]
    slowest = slowest_ranks(changed(c, {"data.order": order}), [((each, length),) for each in drawn])
    return seconds_with(c, slowest, trials)


def slowest_ranks(c: Config, sequences: Sequence[Lengths]) -> list[Lengths]:
    """Documents of each microbatch, on the data-parallel rank that others wait for. The order is chosen.

    `sequences` has those of each sequence of a step, as they are read.
    """
    attention = attending(c.model, c.data.sequence_length)
    works = [attention.work(each) for each in sequences]
    assert c.data.order != "auto", "the order is not chosen"
    order = dealt(works, c.mesh.dp, c.train.sequences, c.data.order)
    of_ranks = works_of(order, works)
    totals = [sum(each) for each in zip(*of_ranks, strict=True)]
    most = [
        totals.index(max(totals)) if _meet_once(c) else of_microbatch.index(max(of_microbatch))
        for of_microbatch in of_ranks
    ]
    return [merged(sequences[n] for n in each[rank]) for each, rank in zip(order, most, strict=True)]


def seconds_with(c: Config, documents: Sequence[Lengths], trials: Trials) -> float:
    """How long a step takes whose microbatches have these documents."""
    costs = varied(trials.costs(c), c, hardware_of(c), documents)
    return float(max(times(trials.program(c, len(documents)), costs)[1]))


def _microbatches(c: Config) -> int:
    """Of a simulated step: four groups, since few microbatches have another best order than many."""
    return min(c.train.microbatches, max(enough_microbatches(c), 4 * group_of(c)))


def _meet_once(c: Config) -> bool:
    """Whether data-parallel ranks wait for each other at the end of a step alone."""
    return c.overlap.dp.strategy in _ONCE and not (has_experts(c) and c.mesh.ep > 1)
