"""Section `train`: length, batch, learning rate, transport, checkpoints."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args

from hocket.config.mesh import Purpose
from hocket.config.rule import MANY, Between, Each, Form, Host, OnlyWith, Rule, Words
from hocket.sizes import parse_rate, parse_time

COPIED: dict[str, tuple[Purpose, ...]] = {
    "copy_engine": (
        *("gather_dense", "reduce_dense", "gather_experts", "reduce_experts", "a2a", "cp", "pp_fwd", "pp_bwd"),
    ),
    "copy_engine_gathers": ("gather_dense", "gather_experts"),
}
"""Transports that use copy engines -> purposes of the groups that copy engines serve. NCCL's kernels serve the
others."""

SCHEDULES, DECAYS = ("cosine", "linear", "wsd", "constant"), ("linear", "cosine", "1-sqrt")
"""Learning-rate schedules, and shapes of wsd's decay."""
LABELS = {"null": "no communication", "slow": "emulated network"}
"""Transports that only serve measurements -> the words that mark all results made with them."""


def slow_link(item: str) -> tuple[Purpose | None, float, float]:
    """(purpose, or None for all, latency in seconds, bytes per second) of an item of `train.slow`."""
    purpose, _, link = item.rpartition(":")
    latency, bandwidth = 0.0, math.inf
    for part in link.split(","):
        if part.endswith("/s"):
            bandwidth = parse_rate(part)
        else:
            latency = parse_time(part)
    return cast("Purpose | None", purpose or None), latency, bandwidth


def check_slow_link(item: str) -> None:
    """Raise ValueError for an invalid item of `train.slow`."""
    purpose, *_ = slow_link(item)
    if purpose not in (None, *get_args(Purpose)):
        raise ValueError(f"{purpose!r} is none of {', '.join(get_args(Purpose))}")


def kept(item: str) -> tuple[str, int]:
    """(every, number) of an item of `train.keep`. Raises ValueError for any other text."""
    kind, _, number = item.partition(":")
    if kind != "every" or not re.fullmatch(r"[1-9]\d{0,11}", number):
        raise ValueError(f"{item!r} is not every with a number, 1 or more")
    return kind, int(number)


def share_of(text: str) -> float:
    """The share, 0 to 1, of a text such as 10%. Raises ValueError for any other text."""
    number = text.removesuffix("%")
    if number == text or not re.fullmatch(r"\d+(\.\d+)?", number) or float(number) > 100:
        raise ValueError(f"{text!r} is neither a number nor a share, 0% to 100%")
    return float(number) / 100


def schedule_of(text: str) -> tuple[str, float, str]:
    """(schedule; for wsd the decay's steps or share of steps, and its shape) of a text of `train.schedule`.

    Raises ValueError for any other text.
    """
    way, *more = text.split(":")
    if way not in SCHEDULES or (more and way != "wsd") or len(more) > 2:
        raise ValueError(f"{text!r} is none of {', '.join(SCHEDULES)}; wsd alone has more, as wsd:500:cosine has")
    share, shape = more[0] if more else "0.2", more[1] if len(more) > 1 else "linear"
    if not re.fullmatch(r"0\.\d*[1-9]\d*|[1-9]\d{0,11}", share):
        raise ValueError(f"{share!r} is neither a whole number of steps nor, below 1, a fraction of them")
    if shape not in DECAYS:
        raise ValueError(f"{shape!r} is none of {', '.join(DECAYS)}")
    return way, float(share), shape


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch, optimizer and machinery of a run."""

    steps: Annotated[int, Between(1)] = 100
    """Optimizer steps of the whole run, counted from its first start."""
    microbatches: Annotated[int, Between(1, MANY)] = 8
    """Microbatches per step on every data-parallel rank."""
    sequences: Annotated[int, Between(1, MANY)] = 1
    """Sequences per microbatch. A step consumes dp * microbatches * sequences of them."""
    lr: Annotated[float, Between(1e-30, 1e30)] = 3e-3
    """Learning rate after the warm-up, the highest of the run."""
    min_lr: Annotated[
        float | str, Between(0), Form(share_of, "10%", auto=False), OnlyWith("train.schedule other than constant")
    ] = "10%"
    """Learning rate of the last step, the lowest after the warm-up: a number, or a share of `lr`."""
    warmup: Annotated[int, Between(0)] = 10
    """Steps in which the learning rate rises linearly to `lr`."""
    schedule: Annotated[str, Form(schedule_of, "cosine, linear, constant, or wsd:0.2:linear", auto=False)] = "cosine"
    """How the learning rate changes after the warm-up. cosine and linear: it falls until the last step, as half a
    cosine or along a line. constant: it stays `lr`. wsd (warm-up, stable, decay): it stays `lr`, and falls in the last
    steps. wsd:500 are 500 steps, wsd:0.1 is a tenth of all steps; wsd alone is wsd:0.2. wsd:0.1:cosine and
    wsd:0.1:1-sqrt fall in other shapes than a line: 1-sqrt is one minus the root of the share of the decay that has
    passed."""
    weight_decay: Annotated[float, Between(0)] = 0.1
    """Decoupled weight decay of matrices. Vectors (norms, biases) and the weights that `optimizer.no_decay` names have
    none."""
    betas: Annotated[tuple[float, float], Between(0, 0.999999)] = (0.9, 0.95)
    """Decay rates of AdamW's two averages, per step."""
    eps: Annotated[float, Between(1e-30, 1e30)] = 1e-8
    """AdamW's epsilon, in units of the gradient."""
    clip: Annotated[float, Between(0)] = 1.0
    """Largest norm of the whole gradient; 0 means no clipping."""
    seed: Annotated[int, Between(0, 2**63 - 1)] = 0
    """Seed of the initial weights, and of the order of sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute. auto takes one GPU per rank if the host has enough GPUs, else the CPU."""
    transport: Literal["auto", "gloo", "nccl", "copy_engine", "copy_engine_gathers", "null", "slow"] = "auto"
    """How collectives move bytes. With copy_engine, gathers, reduces, the experts' all-to-alls and pipeline sends take
    no SM from compute. With copy_engine_gathers only gathers take none. null moves nothing: its results are wrong, and
    its times are bounds. slow emulates a network. auto is copy_engine if all ranks are GPUs of one host that can use it
    and a step fits with its buffers, else nccl. On CPUs auto is gloo."""
    slow: Annotated[
        tuple[str, ...],
        Form(check_slow_link, "10us, or a2a:10us,50GB/s", auto=False),
        OnlyWith("train.transport = slow", idle=((),)),
    ] = ()
    """The network that the slow transport emulates: additional latency of every operation, or bandwidth of a rank, or
    both. a2a:10us,50GB/s holds for the groups of one purpose (gather_dense, reduce_dense, gather_experts,
    reduce_experts, replicas, a2a, tp, cp, pp_fwd, pp_bwd or control), and then the others stay fast. 10us holds for all
    purposes but control."""
    eval_every: Annotated[int, Between(0), OnlyWith("train.eval_batches above 0", idle=(0,))] = 50
    """Steps between validations; 0 means only one at the end."""
    eval_batches: Annotated[int, Between(0)] = 4
    """Most batches of one validation, each as large as a step's; 0 means no validation. No sequence is read twice."""
    save_every: Annotated[int, Between(0), OnlyWith("train.keep other than 0", idle=(0,), remark=True)] = 0
    """Steps between checkpoints; 0 means only one at the end."""
    keep: Annotated[tuple[int | str, ...], Between(0), Form(kept, "every:1000", auto=False)] = (2,)
    """Checkpoints to keep; others are deleted. 2 keeps the two newest, and so does a list without a number; 0 writes
    none, not even at the end. every:1000 also keeps those of steps that are a multiple of 1000."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl: TensorBoard files in the run's folder, an offline run of Weights & Biases
    there. Each needs its extra, as in pip install 'hocket[tensorboard]'."""
    hang_timeout: Annotated[float, Between(1, 1e6)] = 300.0
    """Seconds that a rank waits for other ranks before it reports what it waits for, and exits."""
    profile: Annotated[tuple[int, ...], Between(0)] = ()
    """First step and number of steps to profile. First step 0 is soon after the start; empty profiles none."""

    @property
    def kept(self) -> dict[str, int]:
        """How many checkpoints are kept: of the newest, and of every so many steps; 0 means none."""
        numbers = [("newest", item) for item in self.keep if isinstance(item, int)]
        return {
            "newest": 2,
            "every": 0,
            **dict(numbers),
            **dict(kept(x) for x in self.keep if isinstance(x, str)),
        }

    @property
    def lowest_lr(self) -> float:
        """Learning rate at the end of the decay."""
        return self.lr * share_of(self.min_lr) if isinstance(self.min_lr, str) else self.min_lr

    @property
    def decay(self) -> tuple[int, str]:
        """Steps in which the learning rate falls, and the shape; 0 steps for a constant one."""
        way, decay, shape = schedule_of(self.schedule)
        if way == "constant":
            return 0, shape
        if way != "wsd":
            return max(1, self.steps - 1 - self.warmup), way
        return (max(1, round(decay * self.steps)) if decay < 1 else int(decay)), shape

    @property
    def slowed(self) -> list[str]:
        """The purposes that items of `slow` name; empty texts for all."""
        return [item.rpartition(":")[0] for item in self.slow]

    def slow_links(self) -> dict[Purpose, tuple[float, float]]:
        """Latency in seconds and bandwidth in bytes per second (inf: no limit) by purpose, for the slow transport."""
        links: dict[Purpose, tuple[float, float]] = {}
        for item in self.slow:
            purpose, *numbers = slow_link(item)
            for each in (purpose,) if purpose else (p for p in get_args(Purpose) if p != "control"):
                links[each] = (numbers[0], numbers[1])
        return links


WARMUP = TrainConfig().warmup


def _moved_elsewhere(c: Any, h: Host) -> bool:
    """Whether the transport only moves memory of another kind of device."""
    serves = {"gloo": "cpu", "nccl": "cuda"} | dict.fromkeys(COPIED, "cuda")
    return serves.get(c.train.transport, c.train.device) != c.train.device


def _slowed_alone(c: Any) -> list[str]:
    """Purposes that `train.slow` names but whose groups have one rank each."""
    return [purpose for purpose in get_args(Purpose) if purpose in c.train.slowed and c.mesh.members(purpose) == 1]


def _long_warmup(c: Any, h: Host, it: str) -> bool:
    """Whether the warm-up is too long; the rule is about the setting that the user likely set."""
    return c.train.warmup > c.train.steps and (c.train.warmup != WARMUP) == (it == "train.warmup")


TRAIN_RULES: tuple[Rule | Each, ...] = (
    # Transport
    Rule(
        ("train.device",),
        lambda c, h: c.train.device == "cuda" and h.gpus == 0,
        "torch finds no usable GPU on this host",
        "train.device = cpu, or install a torch with CUDA",
    ),
    Rule(
        ("train.transport", "train.device"),
        _moved_elsewhere,
        "{train.transport} moves {moved} memory only, and the ranks compute on train.device = {train.device}",
        "train.transport = {fitting}, or train.device = {fitting_device}",
    ),
    Rule(
        ("train.transport",),
        lambda c, h: c.train.transport in COPIED and c.train.device == "cuda" and bool(h.no_copy_engine),
        "{host.no_copy_engine}",
        "train.transport = nccl",
    ),
    Rule(
        ("train.transport", "train.slow"),
        lambda c, h: c.train.transport == "slow" and not c.train.slow,
        "the slow transport emulates a network, and nothing says which",
        "train.slow = 10us (or such as a2a:10us,50GB/s)",
    ),
    Rule(
        ("train.slow",),
        lambda c, h: len(set(c.train.slowed)) < len(c.train.slow),
        "a group has one link, and one is named twice",
        "each group of train.slow once",
    ),
    Rule(
        ("train.slow", "mesh.pp", "mesh.dp", "mesh.ep"),
        lambda c, h: bool(_slowed_alone(c)),
        "no effect: on this mesh every group of {slowed_alone} has one rank",
        "leave {slowed_alone} out of train.slow",
    ),
    # Learning rate
    Rule(
        ("train.min_lr", "train.lr"),
        lambda c, h: c.train.schedule != "constant" and c.train.lowest_lr > c.train.lr,
        "the last learning rate is above the highest, train.lr = {train.lr}",
        "train.min_lr at most train.lr",
    ),
    Rule(
        ("train.schedule", "train.warmup", "train.steps"),
        lambda c, h: c.train.schedule.startswith("wsd") and c.train.warmup + c.train.decay[0] > c.train.steps,
        "{train.warmup} steps of train.warmup and {decay} of the decay are more than train.steps = {train.steps}",
        "another train.schedule, or more train.steps",
    ),
    Each(
        {"train.warmup": "train.steps", "train.steps": "train.warmup"},
        ("{it}", "{what}"),
        _long_warmup,
        "{train.warmup} steps of train.warmup are more than train.steps = {train.steps}, so the learning rate "
        "never reaches train.lr = {train.lr}",
        "a smaller train.warmup, or more train.steps, unless this is a short try or a run that goes on later",
        remark=True,  # short tries of a recipe are fine
    ),
    # Checkpoints and machinery
    Rule(
        ("train.keep",),
        lambda c, h: (
            len({str(item).partition(":")[0] if isinstance(item, str) else "" for item in c.train.keep})
            < len(c.train.keep)
        ),
        "it has one number and one every at most",
        "each part once in train.keep",
    ),
    Rule(
        ("train.keep",),
        lambda c, h: c.train.kept["newest"] == 0 and len(c.train.keep) > 1,
        "0 writes no checkpoint, and none is kept for another reason",
        "train.keep = 0, or leave train.keep out",
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
        ("train.profile", "train.steps"),
        lambda c, h: bool(c.train.profile) and (len(c.train.profile) != 2 or c.train.profile[1] < 1),
        "the profiled window is given by its first step (0: soon after the start) and its number of steps",
        "two numbers in train.profile, such as 10 2",
    ),
    Rule(
        ("train.profile", "train.steps"),
        lambda c, h: len(c.train.profile) == 2 and sum(c.train.profile) > c.train.steps + (c.train.profile[0] > 0),
        "the run ends before the profiled window does",
        "a train.profile that ends by train.steps = {train.steps}",
    ),
)

TRAIN_WORDS: Words = {
    "decay": lambda c, h: c.train.decay[0],
    "slowed_alone": lambda c, h: " and ".join(_slowed_alone(c)),
    "moved": lambda c, h: "CPU" if c.train.transport == "gloo" else "GPU",
    "fitting": lambda c, h: "gloo" if c.train.device == "cpu" else "nccl",
    "fitting_device": lambda c, h: "cpu" if c.train.transport == "gloo" else "cuda",
}
