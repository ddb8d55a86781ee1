"""What is hidden under what, row by row: pure functions of settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hocket.config.overlap import DIRECTIONS, ROLES
from hocket.explain.explanation import Axis, Overlap, State
from hocket.program.transformer import GATHERED
from hocket.resolve import Settings
from hocket.settings.context_rules import METHOD
from hocket.settings.decision import AUTOMATIC
from hocket.settings.origins import source
from hocket.settings.plan_rules import recomputes, separate_wgrads, shares_units
from hocket.settings.rules import has_experts
from hocket.settings.tensor_rules import METHOD as METHODS

ALWAYS = "always"
"""The source of what no setting decides."""


_ROWS_AROUND, _WEIGHTS, _GRADIENTS = (
    "rows gathered and reduced around products",
    "weights gathered",
    "gradients reduced",
)
_FORWARD, _BACKWARD, _TO_EXPERTS = "activations sent", "gradients sent", "rows to experts and back"
_KEYS = "keys and values gathered, and their gradients reduced"
_AGAIN = "keys and values gathered again, for backward"
_OWN_KEYS = "keys and values of heads exchanged, and their gradients"
_FOUND = "queries and results of heads exchanged, and their gradients"
_TIED = "gradients of the tied embedding"
_MATRICES = "averages and matrices of Muon"
_ENDS = "the same, at both ends of a step"

_KINDS = {_WEIGHTS: "gather", _GRADIENTS: "reduce", _FORWARD: "pp", _TO_EXPERTS: "a2a"}
_KINDS |= dict.fromkeys((_KEYS, _AGAIN, _OWN_KEYS, _FOUND), "cp")
"""Whose predicted times a row shows."""


def overlaps(settings: Settings) -> tuple[Overlap, ...]:
    """Every communication of a step, whether or not this run has it."""
    return tuple(row for make in (_tensor, _context, _data, _pipeline, _experts) for row in make(settings))


def _row(s: Settings, axis: Axis, what: str, under: str, state: State, setting: str = "", why: str = "") -> Overlap:
    """A row, with the source and the reason of what decides it."""
    decision = next((d for d in s.decisions if d.setting == setting), None)
    where = decision.source if decision else source(s, s.origins, setting) if setting else ALWAYS
    reason = decision.reason if decision else "as asked" if state == "off" else ""
    return Overlap(
        axis=axis,
        what=what,
        under=under if state == "on" else "",
        state=state,
        setting=setting,
        source=where,
        why=why or reason,
        kind=_KINDS.get(what, "") if state != "n/a" else "",
    )


_BY_METHOD = {
    "ring": "its own product, on the rows that have come",
    "pipeline": "its own product, of the next rows",
    "bulk": "the product of the input gradient",
}
_PRODUCTS = {"qkv": "queries, keys, values", "proj": "attention's output", "fc1": "MLP's input", "fc2": "MLP's output"}


def _tensor(s: Settings) -> Iterator[Overlap]:
    if s.mesh.tp == 1:
        yield _row(s, "tp", _ROWS_AROUND, "", "n/a", "mesh.tp", "mesh.tp is 1")
        return
    for role in ROLES:
        for direction in DIRECTIONS:
            under = _BY_METHOD.get(s.overlap.tp.way(role, direction), "")
            reasons = [reason for d in s.decisions if d.setting == METHODS for reason in d.reasons]
            start = f"{role}_{direction}: "
            why = next((reason.removeprefix(start) for reason in reasons if reason.startswith(start)), "")
            where = AUTOMATIC if why else source(s, s.origins, METHODS)
            row = _row(s, "tp", f"{_PRODUCTS[role]}, {direction}", under, "on" if under else "off", METHODS)
            yield replace(row, why=why or ("" if under else "as asked"), source=where)


def _context(s: Settings) -> Iterator[Overlap]:
    """Keys and values of other ranks' tokens, or heads, and their gradients."""
    if s.mesh.cp == 1:
        yield _row(s, "cp", _KEYS, "", "n/a", "mesh.cp", "mesh.cp is 1")
        return
    if s.overlap.cp.method == "gather":
        yield _row(s, "cp", _KEYS, "queries; weight gradients of attention", "on", METHOD)
        if recomputes(s, GATHERED):
            yield _row(s, "cp", _AGAIN, "backward of the layer's parts behind attention", "on", "plan.recompute")
        return
    yield _row(s, "cp", _OWN_KEYS, "queries; their weight gradients", "on", METHOD)
    if s.overlap.ep.merge == "on":
        yield _row(s, "cp", _FOUND, "the other half of a merged step", "on", METHOD)
    else:
        why = "but for gradients of results, beside weight gradients of attention's output, nothing is beside them"
        yield _row(s, "cp", _FOUND, "", "off", METHOD, why)


def _data(s: Settings) -> Iterator[Overlap]:
    strategy = s.overlap.dp.strategy
    if not shares_units(s):
        for what in (_WEIGHTS, _GRADIENTS):
            yield _row(s, "dp", what, "", "n/a", "mesh.dp", "mesh.dp is 1")
        return
    if strategy == "no_shard":
        why = "every rank has all weights"
        yield _row(s, "dp", _WEIGHTS, "", "n/a", "overlap.dp.strategy", why)
    else:
        ahead = s.overlap.dp.prefetch
        how = "within a step a unit is gathered again when its slot was needed"
        why = how if strategy == "optim_grads_params" else "each unit once a step"
        under = f"the layers before, {ahead} pass{'' if ahead == 1 else 'es'} ahead"
        if s.overlap.dp.update == "next_step":
            why += "; the first ones beside the updates of other units"
        exposed = "a gather starts when its reader is next: overlap.dp.prefetch is 0"
        state: State = "on" if ahead else "off"
        yield _row(s, "dp", _WEIGHTS, under, state, "overlap.dp.prefetch", why if ahead else exposed)
        if s.optimizer.name == "muon":
            later, why = s.overlap.dp.update == "next_step", "4 bytes per parameter"
            under = "other units' iterations, and the first forwards" if later else ""
            yield _row(s, "dp", _MATRICES, under, "on" if later else "off", "overlap.dp.update", why)
    once = strategy in ("no_shard", "optim")
    why = "once a step, behind the last microbatch" if once else "behind the weight gradients of every microbatch"
    why += "; over replicas of the weights once a step" if s.mesh.replicas > 1 else ""
    yield _row(s, "dp", _GRADIENTS, "backward of what follows", "on", "overlap.dp.strategy", why)


def _pipeline(s: Settings) -> Iterator[Overlap]:
    if s.mesh.pp == 1:
        for what in (_FORWARD, _BACKWARD):
            yield _row(s, "pp", what, "", "n/a", "mesh.pp", "mesh.pp is 1")
        return
    why = "lanes and groups of their own; needs no virtual stages"
    yield _row(s, "pp", _FORWARD, "other microbatches", "on", why=why)
    if s.model.tied and not s.plan.turning:
        under = "the first rank's last backward"
        yield _row(s, "pp", _TIED, under, "on", why="one way; the first rank's own leaves behind its last reduce")
    if s.overlap.defer_wgrad == "off":
        yield _row(s, "pp", _BACKWARD, "", "off", "overlap.defer_wgrad")
        return
    separate = separate_wgrads(s)
    setting = "overlap.defer_wgrad" if separate else "overlap.pp.defer_layers"
    behind = separate or s.overlap.pp.defer_layers != 0
    yield _row(s, "pp", _BACKWARD, "weight gradients behind them", "on" if behind else "off", setting)


def _experts(s: Settings) -> Iterator[Overlap]:
    if not has_experts(s) or s.mesh.ep == 1:
        setting, why = ("mesh.ep", "mesh.ep is 1") if has_experts(s) else ("model.experts", "the model has no experts")
        for what in (_TO_EXPERTS, _ENDS):
            yield _row(s, "ep", what, "", "n/a", setting, why)
        return
    under = "the other half of a merged step"
    merge, merge_ends = s.overlap.ep.merge, s.overlap.ep.merge_ends
    assert merge != "auto"
    assert merge_ends != "auto"
    if merge == "off" and s.overlap.defer_wgrad == "on" and not separate_wgrads(s):
        alone, why = (
            "experts' weight gradients, backwards alone",
            "overlap.ep.merge is off: nothing else is beside them",
        )
        yield _row(s, "ep", _TO_EXPERTS, alone, "on", "overlap.defer_wgrad", why)
    else:
        yield _row(s, "ep", _TO_EXPERTS, under, merge, "overlap.ep.merge")
    yield _row(s, "ep", _ENDS, under, merge_ends, "overlap.ep.merge_ends")
