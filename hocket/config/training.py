"""The settings of sections `precision`, `data`, `train` and `run`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, cast, get_args

from hocket.config.bounds import FILLED, LONG, MANY, Between, Form, OnlyWith
from hocket.config.layout import Purpose
from hocket.sizes import parse_rate, parse_time

COPIED: dict[str, tuple[Purpose, ...]] = {
    "copy_engine": (
        *("gather_dense", "reduce_dense", "gather_experts", "reduce_experts", "a2a", "cp", "pp_fwd", "pp_bwd"),
    ),
    "copy_engine_gathers": ("gather_dense", "gather_experts"),
}
"""Transports that use copy engines -> purposes of the groups that copy engines serve. NCCL's kernels serve the
others."""

BYTES, BYTE_VOCAB = "bytes", 256
"""The tokenizer that needs no file, and its number of tokens."""
PRODUCTS = "forward", "dgrad", "wgrad"
"""Products of a linear layer."""
SCHEDULES, DECAYS = ("cosine", "linear", "wsd", "constant"), ("linear", "cosine", "1-sqrt")
"""Ways of the learning rate, and ways in which that of wsd falls."""
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
    """Raise ValueError for a text that is no item of `train.slow`."""
    purpose, *_ = slow_link(item)
    if purpose not in (None, *get_args(Purpose)):
        raise ValueError(f"{purpose!r} is none of {', '.join(get_args(Purpose))}")


def fp8_part(item: str) -> tuple[str, int]:
    """(product, 0) or (but_first or but_last, layers) of an item of `precision.fp8`. Raises ValueError."""
    name, colon, number = item.partition(":")
    layers = bool(re.fullmatch(r"[1-9]\d{0,3}", number)) if name in ("but_first", "but_last") else not colon
    if name not in (*PRODUCTS, "but_first", "but_last") or not layers:
        raise ValueError(f"{item!r} is none of {', '.join(PRODUCTS)}, but_first:1, but_last:1")
    return name, int(number or 0)


def kept(item: str) -> tuple[str, int]:
    """(best or every, number) of an item of `train.keep`. Raises ValueError for any other text."""
    kind, _, number = item.partition(":")
    if kind not in ("best", "every") or not re.fullmatch(r"[1-9]\d{0,11}", number):
        raise ValueError(f"{item!r} is neither best nor every with a number, 1 or more")
    return kind, int(number)


def share_of(text: str) -> float:
    """The share that a text such as 10% is, 0 to 1. Raises ValueError for any other text."""
    number = text.removesuffix("%")
    if number == text or not re.fullmatch(r"\d+(\.\d+)?", number) or float(number) > 100:
        raise ValueError(f"{text!r} is neither a number nor a share, 0% to 100%")
    return float(number) / 100


def schedule_of(text: str) -> tuple[str, float, str]:
    """(way, of wsd how many steps or which share of them falls, of wsd how) of a text of `train.schedule`.

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
class PrecisionConfig:
    """Number formats. Main weights, gradients at rest, the router and the loss are fp32."""

    compute: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Format in which layers compute, and in which activations and gathered weights travel. auto is bf16 on GPUs and
    fp32 on CPUs. With fp8, products of attention's and MLPs' linear layers take operands in fp8 (e4m3, a scale for each
    row), and all else is as with bf16: the head, the router, attention itself, what travels. That needs a GPU with
    products in fp8 (Ada, Hopper, or newer); on CPUs the same numbers are made in fp32, slowly."""
    fp8: Annotated[
        tuple[str, ...],
        Form(fp8_part, "forward dgrad, or but_first:1 but_last:1", auto=False),
        OnlyWith("precision.compute = fp8"),
    ] = ()
    """With compute = fp8, what runs in fp8. forward, dgrad (input gradients) and wgrad (weight gradients) name
    products, and the others run in bf16; without a name all run in fp8. With but_first:2 the first two layers compute
    in bf16, with but_last:2 the last two."""
    gather: Annotated[
        Literal["auto", "bf16", "fp8"],
        OnlyWith("precision.compute = fp8", idle=("bf16",)),
        OnlyWith("overlap.dp.strategy other than no_shard", idle=("bf16",)),
        OnlyWith("shared weights", idle=("bf16",)),
    ] = "auto"
    """With compute = fp8, format in which gathered weights of fp8 products travel. fp8 moves half the bytes and gives
    the same bits: each rank casts its shard behind an update, by scales of whole rows on which ranks agree before.
    auto takes what is predicted to be faster."""
    wire: Annotated[Literal["auto", "fp32", "bf16"], OnlyWith("shared weights", remark=True)] = "auto"
    """Format in which gradients of weights travel. auto is the format of compute: each rank rounds its gradient to it.
    fp32 with compute in bf16 rounds no gradient, and moves twice the bytes. Where no gradient travels, products add to
    the fp32 gradient. Where one rank has a tied embedding and its head, the two gradients of a microbatch are added
    up in this format."""
    averages: Literal["fp32", "bf16"] = "fp32"
    """Format in which AdamW's two averages are kept between steps. With bf16 a weight takes 8 bytes beside its copies,
    not 12. A step computes in fp32 and rounds the averages to nearest, so no decay rate of train.betas may be close
    to 1."""

    @property
    def dtype(self) -> str:
        """Format of activations and gathered weights."""
        return "bf16" if self.compute == "fp8" else self.compute

    @property
    def fp8_products(self) -> tuple[str, ...]:
        """Products that run in fp8."""
        return tuple(x for x in PRODUCTS if x in self.fp8) or PRODUCTS

    @property
    def fp8_ends(self) -> tuple[int, int]:
        """How many of the first and of the last layers compute in bf16."""
        ends = dict(fp8_part(item) for item in self.fp8)
        return ends.get("but_first", 0), ends.get("but_last", 0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on."""

    paths: Annotated[tuple[str, ...], FILLED] = ()
    """Files, folders or patterns of text or tokens, or a TOML file of several sources of text with weights:
    docs/training.md. Empty: the source of Python's standard library."""
    text_key: Annotated[tuple[str, ...], FILLED] = ("text",)
    """Name of the text, or of the messages of a chat, in a line of JSON or a row of a table. `a.b` is the `b` inside of
    `a`. Of two names the first is that of a prompt, which stands before the text and is not learnt."""
    skip_empty: bool = False
    """Leave out rows whose text is null or missing, and say how many. Without it such a row ends the run."""
    chat_template: str = ""
    """A file with a template of Jinja that makes text of messages. Empty: that of the tokenizer's folder."""
    tokenizer: Annotated[str, FILLED] = "bytes"
    """`bytes` (a token per byte), or the path of a JSON file of the `tokenizers` package, or a folder that has one."""
    eos: str = ""
    """The token after each document, as the tokenizer writes it. Empty: that of tokenizer_config.json, config.json or
    generation_config.json beside the tokenizer, or one of a list of common names."""
    bos: Literal["auto", "on", "off"] = "auto"
    """Whether documents, other than chats, have the tokenizer's beginning of text before them. auto does what the
    tokenizer does by default: its post-processor in tokenizer.json."""
    sequence_length: Annotated[int, Between(1, LONG)] = 128
    """Tokens of one sequence."""
    packing: Literal["off", "on", "best_fit"] = "off"
    """on keeps documents that share a sequence apart: attention stays inside each document, positions begin anew in
    each, and no document has to predict the first token of the next. best_fit does too, cuts no document, and fills
    sequences up with padding. off puts only a separator between documents."""
    validation: Annotated[tuple[float | str, ...], Between(0, 0.9), FILLED] = (0.05,)
    """Share of the tokens that is kept for validation; or files, folders or patterns of text for it, and then no token
    of data.paths is kept."""
    cache: Annotated[str, FILLED] = ".cache/hocket"
    """Folder for tokenised text."""

    @property
    def sources(self) -> str:
        """The file of several sources; empty if there is one."""
        return next((path for path in self.paths if path.endswith(".toml") and not {*"*?["} & {*path}), "")

    @property
    def names(self) -> tuple[str, str]:
        """Names of the text and of the prompt; that of the prompt is empty if there is none."""
        *prompt, text = self.text_key or ("",)
        return text, next(iter(prompt), "")

    @property
    def kept_back(self) -> float:
        """Share of the tokens that is kept for validation."""
        return next((item for item in self.validation if not isinstance(item, str)), 0.0)

    @property
    def held_out(self) -> tuple[str, ...]:
        """What is read for validation alone."""
        return tuple(item for item in self.validation if isinstance(item, str))


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
    """The way of the learning rate behind the warm-up. cosine and linear: it falls from the warm-up to the last step,
    as half a cosine or along a line. constant: it stays `lr`. wsd (warm-up, stable, decay): it stays `lr`, and falls in
    the last steps. wsd:500 are 500 steps, wsd:0.1 is a tenth of all steps; wsd alone is wsd:0.2. wsd:0.1:cosine and
    wsd:0.1:1-sqrt fall in other ways than along a line: 1-sqrt is one minus the root of the share of the decay that has
    passed."""
    weight_decay: Annotated[float, Between(0)] = 0.1
    """Decoupled weight decay of matrices. Vectors (norms, biases) have none, nor has what `optimizer.no_decay`
    names."""
    betas: Annotated[tuple[float, float], Between(0, 0.999999)] = (0.9, 0.95)
    """Decay rates of AdamW's two averages, per step."""
    eps: Annotated[float, Between(1e-30, 1e30)] = 1e-8
    """AdamW's epsilon, in units of the gradient."""
    clip: Annotated[float, Between(0)] = 1.0
    """Largest norm of the whole gradient; 0 means no clipping."""
    seed: Annotated[int, Between(0, 2**63 - 1)] = 0
    """Seed of the initial weights, and of the order in which sequences are read."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute. auto takes one GPU per rank if the host has enough GPUs, else the CPU."""
    transport: Literal["auto", "gloo", "nccl", "copy_engine", "copy_engine_gathers", "null", "slow"] = "auto"
    """How collectives move bytes. With copy_engine, gathers, reduces, the experts' all-to-alls and pipeline sends take
    no SM from compute. With copy_engine_gathers only gathers take none. null moves nothing: its results are wrong, and
    its times are bounds. slow imitates a network. auto is copy_engine if all ranks are GPUs of one host that can use it
    and a step fits beside its buffers, else nccl. On CPUs auto is gloo."""
    slow: Annotated[
        tuple[str, ...],
        Form(check_slow_link, "10us, or a2a:10us,50GB/s", auto=False),
        OnlyWith("train.transport = slow", idle=((),)),
    ] = ()
    """The network that the slow transport emulates: what it adds to every operation, and the rate at which a rank's
    bytes pass, or one of them. a2a:10us,50GB/s holds for the groups of one purpose (gather_dense, reduce_dense,
    gather_experts, reduce_experts, replicas, a2a, tp, cp, pp_fwd, pp_bwd or control), and then the others stay fast.
    10us holds for all purposes but control."""
    eval_every: Annotated[int, Between(0), OnlyWith("train.eval_batches above 0", idle=(0,))] = 50
    """Steps between validations; 0 means only one at the end."""
    eval_batches: Annotated[int, Between(0)] = 4
    """Most batches of one validation, each as large as a step's; 0 means no validation. It reads no sequence twice."""
    save_every: Annotated[int, Between(0)] = 0
    """Steps between checkpoints; 0 means only one at the end."""
    keep: Annotated[tuple[int | str, ...], Between(0), Form(kept, "best:1 or every:1000", auto=False)] = (2,)
    """Checkpoints that are kept; others are deleted. 2 keeps the two newest, and so does a list without a number; 0
    writes none, not even at the end. best:1 keeps the one with the lowest held-out loss, too, and the link `best` names
    it; every:1000 those of steps that are a multiple of 1000."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go beside metrics.jsonl: files of TensorBoard in the run's folder, an offline run of Weights &
    Biases there. Each needs its extra, as in pip install 'hocket[tensorboard]'."""
    hang_timeout: Annotated[float, Between(1, 1e6)] = 300.0
    """Seconds that a rank waits for other ranks. After that it reports what it waits for, and ends."""
    profile: Annotated[tuple[int, ...], Between(0)] = ()
    """First step and number of steps to profile. First step 0 is soon after the start; empty profiles none."""

    @property
    def kept(self) -> dict[str, int]:
        """How many checkpoints are kept: of the newest, of the best, and of every so many steps; 0 means none."""
        numbers = [("newest", item) for item in self.keep if isinstance(item, int)]
        return {
            "newest": 2,
            "best": 0,
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
        """Steps in which the learning rate falls, and how; 0 steps of a constant one."""
        way, decay, shape = schedule_of(self.schedule)
        if way == "constant":
            return 0, shape
        if way != "wsd":
            return max(1, self.steps - 1 - self.warmup), way
        return (max(1, round(decay * self.steps)) if decay < 1 else int(decay)), shape

    def slow_links(self) -> dict[Purpose, tuple[float, float]]:
        """Latency in seconds and bandwidth in bytes per second (inf: no limit) by purpose, for the slow transport."""
        links: dict[Purpose, tuple[float, float]] = {}
        for item in self.slow:
            purpose, *numbers = slow_link(item)
            for each in (purpose,) if purpose else (p for p in get_args(Purpose) if p != "control"):
                links[each] = (numbers[0], numbers[1])
        return links


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name and place of a run."""

    name: str = "run"
    """Name of the run. Without it the run has the name of its file or recipe."""
    folder: str = ""
    """Folder of metrics, logs and checkpoints; empty means `runs/<name>`, or `runs/<name>-null`."""
    resume: Annotated[
        str,
        FILLED,
        OnlyWith(
            "train.transport other than null",
            idle=(
                "auto",
                "off",
            ),
        ),
    ] = "auto"
    """auto continues from the newest complete checkpoint of the folder. off starts over. A path loads that
    checkpoint."""
    elastic: bool = False
    """Where torchrun has started fewer processes than the mesh has ranks, as `--nnodes 1:2` may, hocket takes a smaller
    mesh. A step has the same sequences."""
