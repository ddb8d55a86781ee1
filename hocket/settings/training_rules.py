"""Rules of the optimizer and of the learning rate."""

from __future__ import annotations

from hocket.config import TrainConfig
from hocket.settings.rule import Rule

DEFAULT = TrainConfig()

TRAINING_RULES: tuple[Rule, ...] = (
    Rule(
        ("train.min_lr", "train.lr"),
        lambda c, h: c.train.schedule != "constant" and c.train.lowest_lr > c.train.lr,
        "the last learning rate is above the highest, train.lr = {train.lr}",
        "train.min_lr at most train.lr",
    ),
    Rule(
        ("train.min_lr", "train.schedule"),
        lambda c, h: c.train.schedule == "constant",
        "no effect: train.schedule = constant, and the learning rate never falls",
        "another train.schedule, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("train.keep",),
        lambda c, h: (
            len({str(item).partition(":")[0] if isinstance(item, str) else "" for item in c.train.keep})
            < len(c.train.keep)
        ),
        "it has one number, one best and one every at most",
        "each part once in train.keep",
    ),
    Rule(
        ("train.keep",),
        lambda c, h: c.train.kept["newest"] == 0 and len(c.train.keep) > 1,
        "0 writes no checkpoint, and none is kept for another reason",
        "train.keep = 0, or leave train.keep out",
    ),
    Rule(
        ("optimizer.rewinds", "train.keep", "train.save_every"),
        lambda c, h: c.optimizer.rewinds > 0 and not (c.train.kept["newest"] and c.train.save_every),
        "there would be no checkpoint to go back to: train.keep = {train.keep}, train.save_every = {train.save_every}",
        "train.keep = 1 or more and train.save_every = 1 or more, or leave optimizer.rewinds out",
    ),
    Rule(
        ("train.keep", "train.save_every"),
        lambda c, h: (
            c.train.kept["every"] > 0 and (not c.train.save_every or c.train.kept["every"] % c.train.save_every > 0)
        ),
        "checkpoints come every train.save_every = {train.save_every} steps",
        "another train.save_every, or leave train.keep out",
    ),
    Rule(
        ("train.keep", "train.eval_every"),
        lambda c, h: (
            c.train.kept["best"] > 0
            and c.train.save_every > 0
            and (not c.train.eval_every or c.train.save_every % c.train.eval_every > 0)
        ),
        "a checkpoint has a held-out loss only behind a validation: train.save_every = {train.save_every}, "
        "train.eval_every = {train.eval_every}",
        "a train.eval_every that divides train.save_every",
    ),
    Rule(
        ("train.keep", "train.eval_batches"),
        lambda c, h: c.train.kept["best"] > 0 and c.train.eval_batches == 0,
        "train.eval_batches = 0, and there is no held-out loss",
        "train.eval_batches above 0",
    ),
    Rule(
        ("model.aux_loss_over", "model.aux_loss"),
        lambda c, h: c.model.experts > 0 and c.model.aux_loss_over != "microbatch" and c.model.aux_loss == 0,
        "no effect: model.aux_loss = 0, and there is no load-balancing loss",
        "model.aux_loss above 0, or leave it out",
        only_if_set=True,
    ),
    Rule(
        ("model.aux_loss_over", "mesh.tp"),
        lambda c, h: c.model.aux_loss_over == "sequence" and c.model.aux_loss > 0 and c.mesh.tp > 1,
        "tensor-parallel ranks share the tokens of a sequence, and none knows where all of them went",
        "mesh.tp = 1, or model.aux_loss_over = batch or microbatch",
    ),
    *(
        Rule(
            (f"optimizer.{name}", "optimizer.name"),
            lambda c, h: c.optimizer.name != "muon",
            "no effect: only optimizer.name = muon has it",
            "optimizer.name = muon, or leave it out",
            only_if_set=True,
        )
        for name in ("adamw", "scale")
    ),
    Rule(
        ("optimizer.name", "mesh.tp"),
        lambda c, h: c.optimizer.name == "muon" and c.mesh.tp > 1,
        "tensor-parallel ranks have parts of matrices, and Muon puts together what data-parallel ranks share",
        "mesh.tp = 1, or optimizer.name = adamw",
    ),
    Rule(
        ("precision.averages", "optimizer.name"),
        lambda c, h: c.optimizer.name == "muon" and c.precision.averages == "bf16",
        "Muon keeps its average in fp32",
        "precision.averages = fp32, or optimizer.name = adamw",
    ),
    Rule(
        ("optimizer.skip_spikes",),
        lambda c, h: 0 < c.optimizer.skip_spikes <= 1,
        "about half of all norms are above their median",
        "optimizer.skip_spikes above 1, or optimizer.skip_spikes = 0",
    ),
    Rule(
        ("train.schedule", "train.warmup", "train.steps"),
        lambda c, h: c.train.schedule.startswith("wsd") and c.train.warmup + c.train.decay[0] > c.train.steps,
        "{train.warmup} steps of train.warmup and {decay} of the decay are more than train.steps = {train.steps}",
        "another train.schedule, or more train.steps",
    ),
    *(
        Rule(  # a remark, for a short try of a recipe is no mistake; it names what is likely to have been set
            (f"train.{first}", f"train.{other}"),
            lambda c, h, own=own: c.train.warmup > c.train.steps and (c.train.warmup != DEFAULT.warmup) == own,
            "{train.warmup} steps of train.warmup are more than train.steps = {train.steps}, so the learning rate "
            "never reaches train.lr = {train.lr}",
            "a smaller train.warmup, or more train.steps, unless this is a short try or a run that goes on later",
            remark=True,
        )
        for first, other, own in (("warmup", "steps", True), ("steps", "warmup", False))
    ),
)
