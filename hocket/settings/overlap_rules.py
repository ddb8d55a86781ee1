"""Rules about what hides communication: part of the table in `rules.py`."""

from __future__ import annotations

from hocket.config import ExpertOverlap
from hocket.settings.network_rules import leaves_host
from hocket.settings.plan_rules import (
    fills_bubble,
    has_pairs,
    merges,
    most_layers,
    separate_wgrads,
    shares_units,
    stages,
)
from hocket.settings.rule import Rule

OVERLAP_RULES: tuple[Rule, ...] = (
    Rule(
        ("overlap.ep.merge", "mesh.ep", "model.experts"),
        lambda c, h: c.overlap.ep.merge == "on" and (c.mesh.ep == 1 or "moe" not in c.model.kinds()),
        "no expert all-to-all is hidden, since there is none (mesh.ep = {mesh.ep}); steps are merged all the same",
        "mesh.ep = 2 or more in a model with experts, or overlap.ep.merge = auto",
        remark=True,
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: separate_wgrads(c) and c.overlap.ep.merge == "on",
        "in the order {plan.order} forwards and backwards run apart, so that weight gradients can fill the bubble",
        "overlap.ep.merge = off, or plan.order = auto",
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.overlap.ep.merge == "off",
        "in the order merged_v forwards and backwards run merged",
        "overlap.ep.merge = on, or plan.order = zb_v, where they run apart",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.order"),
        lambda c, h: c.plan.order == "merged_v" and c.overlap.ep.merge_ends == "on",
        "in the order merged_v no two microbatches follow each other on one chunk where it ends",
        "overlap.ep.merge_ends = off, or plan.order = interleaved",
    ),
    Rule(
        ("overlap.defer_wgrad", "plan.order"),
        lambda c, h: fills_bubble(c) and c.overlap.defer_wgrad == "off",
        "the order {plan.order} fills the bubble with weight gradients, so they must be able to wait",
        "overlap.defer_wgrad = on, or plan.order = auto",
    ),
    Rule(
        ("overlap.ep.merge", "plan.order"),
        lambda c, h: c.overlap.ep.merge == "on" and c.plan.order == "sequential" and stages(c) > 1,
        "in the sequential order each microbatch ends before the next one starts, so there is nothing to merge",
        "plan.order = auto, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge", "train.microbatches", "plan.chunks"),
        lambda c, h: c.overlap.ep.merge == "on" and not any(merges(c, rank) for rank in range(c.mesh.pp)),
        "all forwards of {train.microbatches} microbatches are warm-up, so nothing would be merged",
        "more train.microbatches, or overlap.ep.merge = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "overlap.ep.merge"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "off",
        "there are no ends of a merged order where nothing is merged",
        "overlap.ep.merge = on, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "train.microbatches"),
        lambda c, h: c.overlap.ep.merge_ends == "on" and c.overlap.ep.merge == "on" and c.train.microbatches == 1,
        "one microbatch has no other one to merge with at the ends",
        "train.microbatches = 2 or more, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.merge_ends", "plan.group", "train.microbatches"),
        lambda c, h: (
            c.overlap.ep.merge_ends == "on"
            and c.overlap.ep.merge == "on"
            and c.train.microbatches > 1
            and not has_pairs(c)
        ),
        "no two microbatches follow each other on one chunk, so nothing at the ends would be merged",
        "plan.group = 2 or more, or overlap.ep.merge_ends = off",
    ),
    Rule(
        ("overlap.ep.copies", "overlap.ep.splits"),
        lambda c, h: c.overlap.ep.copies == "per_rank" and c.overlap.ep.splits == "device",
        "where the device alone knows splits, every choice's row is stored at its place, so there is one for each",
        "overlap.ep.copies = per_expert, or overlap.ep.splits = host",
    ),
    Rule(
        ("overlap.ep.copies", "mesh.ep"),
        lambda c, h: c.overlap.ep.copies == "per_rank" and c.mesh.ep == 1,
        "no effect: all experts are on every rank, so nothing is sent",
        "mesh.ep = 2 or more, or leave overlap.ep.copies out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "mesh.pp"),
        lambda c, h: c.overlap.pp.defer_layers not in (0, "auto") and c.mesh.pp == 1,
        "no effect: with one pipeline rank nothing is sent",
        "mesh.pp = 2 or more, or leave overlap.pp.defer_layers out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "overlap.defer_wgrad"),
        lambda c, h: c.overlap.pp.defer_layers not in (0, "auto") and c.mesh.pp > 1 and c.overlap.defer_wgrad == "off",
        "no effect: only deferred weight gradients can run after the send",
        "overlap.defer_wgrad = on, or overlap.pp.defer_layers = 0",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "plan.order"),
        lambda c, h: c.overlap.pp.defer_layers not in (0, "auto") and c.mesh.pp > 1 and separate_wgrads(c),
        "no effect: in the order {plan.order} all weight gradients have steps of their own, behind the send",
        "leave overlap.pp.defer_layers out, or another plan.order",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_layers", "model.layers", "mesh.pp", "plan.chunks"),
        lambda c, h: c.overlap.pp.late[0] > most_layers(c) > 0,
        "no stage has as many layers",
        "overlap.pp.defer_layers = -1, which means all layers of a stage",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_head", "mesh.pp"),
        lambda c, h: c.overlap.pp.defer_head not in (0, "auto") and c.mesh.pp == 1,
        "no effect: the only pipeline rank waits for no other at the end",
        "mesh.pp = 2 or more, or leave overlap.pp.defer_head out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_head", "model.tied", "plan.order"),
        lambda c, h: c.overlap.pp.defer_head not in (0, "auto") and c.model.tied and c.plan.turning,
        "one rank has the embedding and the head, which are tied: a gradient would wait for its other half",
        "overlap.pp.defer_head = 0, or model.tied = False",
    ),
    Rule(
        ("overlap.pp.defer_head", "overlap.defer_wgrad"),
        lambda c, h: c.overlap.pp.defer_head not in (0, "auto") and c.mesh.pp > 1 and c.overlap.defer_wgrad == "off",
        "no effect: only deferred weight gradients can run at the end",
        "overlap.defer_wgrad = on, or overlap.pp.defer_head = 0",
        only_if_set=True,
    ),
    Rule(
        ("overlap.pp.defer_head", "train.microbatches"),
        lambda c, h: c.overlap.pp.defer_head != "auto" and c.overlap.pp.defer_head > c.train.microbatches,
        "a step has {train.microbatches} microbatches",
        "overlap.pp.defer_head = -1, which means all of them",
        only_if_set=True,
    ),
    Rule(
        ("overlap.dp.strategy", "mesh.dp"),
        lambda c, h: not shares_units(c) and c.overlap.dp.strategy != "optim_grads_params",
        "no effect: with one data-parallel rank nothing is sharded",
        "mesh.dp = 2 or more, or leave overlap.dp.strategy out",
        only_if_set=True,
    ),
    Rule(
        ("precision.wire", "mesh.dp"),
        lambda c, h: not shares_units(c),
        "no effect: no gradient travels, since no two ranks share weights",
        "mesh.dp = 2 or more, or leave precision.wire out",
        remark=True,
    ),
    Rule(
        ("overlap.dp.prefetch", "overlap.dp.strategy"),
        lambda c, h: shares_units(c) and c.overlap.dp.strategy == "no_shard",
        "no effect: every rank has all weights, and nothing is gathered",
        "another overlap.dp.strategy, or leave overlap.dp.prefetch out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.dp.prefetch", "mesh.dp"),
        lambda c, h: not shares_units(c),
        "no effect: with one data-parallel rank nothing is gathered",
        "mesh.dp = 2 or more, or leave overlap.dp.prefetch out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.ep.splits", "mesh.ep"),
        lambda c, h: c.overlap.ep.splits == "device" and (c.mesh.ep == 1 or not c.model.experts),
        "no effect: with mesh.ep = {mesh.ep} no rows travel to experts",
        "mesh.ep = 2 or more in a model with experts, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.ep.room", "overlap.ep.splits"),
        lambda c, h: c.overlap.ep.splits != "device" and c.overlap.ep.room != ExpertOverlap.room,
        "no effect: with overlap.ep.splits = {overlap.ep.splits} there is room for as many rows as come",
        "overlap.ep.splits = device, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("overlap.ep.splits", "precision.compute"),
        lambda c, h: c.overlap.ep.splits == "device" and c.train.device == "cuda" and c.precision.dtype != "bf16",
        "on GPUs products of experts in {precision.compute} need a host that knows where each expert's rows end",
        "precision.compute = bf16, or overlap.ep.splits = host",
    ),
    Rule(
        ("overlap.ep.splits", "mesh.ep"),
        lambda c, h: c.overlap.ep.splits == "device" and c.train.device == "cuda" and leaves_host(c, h, "a2a"),
        "rows are stored into the memory of GPUs of one host, and mesh.ep = {mesh.ep} ranks are not all on one",
        "overlap.ep.splits = host, or a smaller mesh.ep",
    ),
    Rule(
        ("overlap.ep.splits",),
        lambda c, h: c.overlap.ep.splits == "device" and c.train.device == "cuda" and bool(h.no_peer_memory),
        "{host.no_peer_memory}, and rows are stored there",
        "overlap.ep.splits = host",
    ),
)
