"""Rules about steps that are replayed as one CUDA graph: part of the table in `rules.py`."""

from __future__ import annotations

from hocket.config import Config
from hocket.settings.rule import Rule


def waits_for_counts(c: Config) -> bool:
    """Whether the host waits for the routers in each layer."""
    return c.model.experts > 0 and c.mesh.ep > 1 and c.overlap.ep.splits != "device"


def _graphed(c: Config) -> bool:
    return c.plan.graphs == "on"


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(
        ("plan.graphs", "train.device"),
        lambda c, h: _graphed(c) and c.train.device != "cuda",
        "a graph is of calls to a GPU, and the ranks compute on CPUs",
        "train.device = cuda, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "overlap.ep.splits"),
        lambda c, h: _graphed(c) and waits_for_counts(c),
        "a step cannot be recorded in which the host waits for the counts of experts' rows",
        "overlap.ep.splits = device, or plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "model.delta_heads"),
        lambda c, h: _graphed(c) and any(c.model.deltas()),
        "no step with gated delta nets is recorded: their kernels are chosen while they run",
        "plan.graphs = off",
    ),
    Rule(
        ("plan.graphs", "overlap.dp.update"),
        lambda c, h: _graphed(c) and c.overlap.dp.update == "next_step" and c.optimizer.name == "muon",
        "a recorded step cannot have Muon's updates in it, whose learning rate the host tells",
        "overlap.dp.update = end, or plan.graphs = off",
    ),
)
