"""Rules about clones of experts: part of the table in `rules.py`."""

from __future__ import annotations

from hocket.config import Config
from hocket.settings.architecture_rules import has_experts
from hocket.settings.rule import Rule

CLONES = "overlap.ep.clones"


def _cloned(c: Config) -> bool:
    return c.overlap.ep.cloned > 0 and c.mesh.ep > 1 and has_experts(c)


def others(c: Config) -> int:
    """Experts of a layer that a rank does not own."""
    return c.model.experts - c.model.experts // c.mesh.ep


CLONE_RULES: tuple[Rule, ...] = (
    Rule(
        (CLONES, "mesh.ep"),
        lambda c, h: c.overlap.ep.cloned > 0 and not _cloned(c),
        "no effect: with mesh.ep = {mesh.ep} and model.experts = {model.experts} no expert is on another rank",
        "mesh.ep = 2 or more in a model with experts, or leave it out",
        only_if_set=True,
    ),
    Rule(
        (CLONES, "model.routing"),
        lambda c, h: _cloned(c) and c.model.routing == "even",
        "no effect: an even spread gives all ranks as many rows",
        "model.routing = learnt, or overlap.ep.clones = 0",
    ),
    Rule(
        (CLONES, "model.experts", "mesh.ep"),
        lambda c, h: _cloned(c) and c.overlap.ep.cloned > others(c),
        "a rank clones experts of others, and of {model.experts} experts it owns {model.experts} / {mesh.ep}",
        "a smaller number, or auto",
    ),
    Rule(
        (CLONES, "overlap.ep.splits"),
        lambda c, h: _cloned(c) and c.overlap.ep.splits == "device",
        "rows go to clones only where the host knows the splits",
        "overlap.ep.splits = host, or overlap.ep.clones = 0",
    ),
    Rule(
        (CLONES, "plan.graphs"),
        lambda c, h: _cloned(c) and c.plan.graphs == "on",
        "clones change from step to step, and a recorded step repeats the exchanges of its first",
        "plan.graphs = off, or overlap.ep.clones = 0",
    ),
    Rule(
        (CLONES, "precision.compute"),
        lambda c, h: _cloned(c) and c.precision.compute == "fp8",
        "weights of experts in fp8 are cast where they are gathered, and clones come later",
        "precision.compute = bf16, or overlap.ep.clones = 0",
    ),
    Rule(
        (CLONES, "optimizer.name"),
        lambda c, h: _cloned(c) and c.optimizer.name == "muon",
        "Muon makes whole matrices orthogonal, and the room of clones lies between an expert's matrices",
        "optimizer.name = adamw, or overlap.ep.clones = 0",
    ),
)
