"""Rules of sections `precision`, `data`, `train`, `optimizer` and `run`."""

from __future__ import annotations

from hocket.config import BYTES, COPIED, Config, TrainConfig
from hocket.settings.derived import has_experts, leaves_host, slowed, slowed_alone
from hocket.settings.rule import Each, Host, Rule, Words
from hocket.settings.schema import leaf

UNIT = 16
"""Products in fp8 take widths and numbers of tokens that are multiples of this."""
FROM = (8, 9)
"""The first compute capability that has products in fp8."""
WIDE = 1024
"""Width of experts from which fp8 was seen to be faster: 1,536 was, 768 was not (docs/experts.md)."""
LARGEST_BETA = 1 - 2**-6
"""Of averages in bf16. See Note: [Averages in bf16] in `fsdp/planned/optimizer.py`."""
WARMUP = TrainConfig().warmup


def _fp8(c: Config) -> bool:
    return c.precision.compute == "fp8"


def _odd_width(c: Config, h: Host, it: str) -> bool:
    """Whether the product that a setting makes in fp8 has a width that fp8 does not take."""
    kinds = {"model.ffn": "dense", "model.shared_ffn": "moe", "model.expert_ffn": "moe"}
    there = it not in kinds or kinds[it] in c.model.kinds()
    return _fp8(c) and there and leaf(c, it) * (c.model.kv_heads if it == "model.head_dim" else 1) % UNIT != 0


def _gathers(c: Config) -> bool:
    return _fp8(c) and c.precision.gather == "fp8"


def _moved_elsewhere(c: Config, h: Host) -> bool:
    """Whether the transport moves memory in which the ranks do not compute."""
    serves = {"gloo": "cpu", "nccl": "cuda"} | dict.fromkeys(COPIED, "cuda")
    return serves.get(c.train.transport, c.train.device) != c.train.device


def _long_warmup(c: Config, h: Host, it: str) -> bool:
    """About the one of the two settings that is likely to have been set."""
    return c.train.warmup > c.train.steps and (c.train.warmup != WARMUP) == (it == "train.warmup")


PRECISION_RULES: tuple[Rule | Each, ...] = (
    Rule(
        ("precision.compute", "train.device"),
        lambda c, h: _fp8(c) and c.train.device == "cuda" and (0, 0) < h.capability < FROM,
        "{host.gpu} has no products in fp8, which begin at compute capability 8.9 (Ada, Hopper)",
        "precision.compute = bf16",
    ),
    Rule(
        ("precision.compute", "mesh.tp"),
        lambda c, h: _fp8(c) and c.mesh.tp > 1,
        "products of tensor-parallel ranks, which meet their operands piece by piece, do not run in fp8",
        "mesh.tp = 1, or precision.compute = bf16",
    ),
    Each(
        {
            "model.kv_lora_rank": "latent attention",
            "model.delta_heads": "gated delta nets",
            "model.expert_bias": "biases of experts",
            "model.swiglu_limit": "SwiGLU with a limit",
        },
        ("{it}", "precision.compute"),
        lambda c, h, it: _fp8(c) and bool(leaf(c, it)),
        "products in fp8 are not there for {what}",
        "precision.compute = bf16",
    ),
    Each(
        {
            "model.hidden": "{it}",
            "model.head_dim": "model.kv_heads x {it}",
            "model.ffn": "{it}",
            "model.shared_ffn": "{it}",
            "model.expert_ffn": "{it}",
        },
        ("{it}", "precision.compute"),
        _odd_width,
        f"products in fp8 take widths of a multiple of {UNIT}, and {{what}} is none",
        f"make {{what}} a multiple of {UNIT}, or precision.compute = bf16",
    ),
    Rule(
        ("data.sequence_length", "train.sequences", "precision.compute"),
        lambda c, h: _fp8(c) and c.tokens % UNIT != 0,
        f"weight gradients in fp8 sum over a multiple of {UNIT} tokens, and a microbatch has "
        "train.sequences x data.sequence_length = {train.sequences} x {data.sequence_length}{shares}",
        f"make train.sequences x data.sequence_length{{shares}} a multiple of {UNIT}, or precision.compute = bf16",
    ),
    Rule(
        ("precision.fp8", "model.layers", "precision.compute"),
        lambda c, h: _fp8(c) and sum(c.precision.fp8_ends) >= c.model.layers,
        "none of the model.layers = {model.layers} layers is left to compute in fp8",
        "leave precision.fp8 out, or precision.compute = bf16",
    ),
    Rule(
        ("precision.fp8",),
        lambda c, h: len({item.partition(":")[0] for item in c.precision.fp8}) < len(c.precision.fp8),
        "it names a product, or an end, twice",
        "each part once in precision.fp8",
    ),
    Rule(
        ("precision.gather", "precision.fp8"),
        lambda c, h: _gathers(c) and not {"forward", "dgrad"} <= set(c.precision.fp8_products),
        "forward and input gradient read the weights that are gathered, and not both of them run in fp8",
        "precision.fp8 with forward and dgrad, or precision.gather = bf16",
    ),
    Rule(
        ("precision.gather", "overlap.dp.update"),
        lambda c, h: _gathers(c) and c.overlap.dp.update == "next_step",
        "ranks agree on scales of rows after the whole update, which would be spread over the next step's forwards",
        "overlap.dp.update = end, or precision.gather = bf16",
    ),
    Rule(
        ("model.expert_ffn", "precision.compute"),
        lambda c, h: _fp8(c) and has_experts(c) and c.model.expert_ffn < WIDE,
        "narrow experts may be slower in fp8: on an H200 a layer with experts 768 wide took 1.12 times as long",
        "precision.compute = bf16, or measure it: hocket bench",
        remark=True,
    ),
    Rule(
        ("precision.averages", "train.betas"),
        lambda c, h: c.precision.averages == "bf16" and max(c.train.betas) > LARGEST_BETA,
        "an average in bf16 does not follow gradients at a decay rate above "
        f"{LARGEST_BETA:.3f}, and train.betas = {{train.betas}}: most steps would change less than its last digit",
        "precision.averages = fp32, or lower train.betas",
    ),
    Rule(
        ("precision.averages", "optimizer.name"),
        lambda c, h: c.optimizer.name == "muon" and c.precision.averages == "bf16",
        "Muon keeps its average in fp32",
        "precision.averages = fp32, or optimizer.name = adamw",
    ),
)

DATA_RULES: tuple[Rule, ...] = (
    Rule(
        ("data.validation",),
        lambda c, h: len(c.data.validation) > 1 and len(c.data.held_out) < len(c.data.validation),
        "one share of the tokens is kept for validation, or files and folders are read",
        "leave data.validation out",
    ),
    Rule(
        ("data.paths", "data.validation"),
        lambda c, h: bool(c.data.sources) and (len(c.data.paths) > 1 or bool(c.data.held_out)),
        "a TOML file is one of sources, and each source names its own text",
        "data.paths with files or folders, or leave data.paths and data.validation out",
    ),
    Rule(
        ("data.text_key",),
        lambda c, h: len(c.data.text_key) not in (1, 2),
        "it is the name of the text, or the names of a prompt and of the text",
        "leave data.text_key out",
    ),
    Rule(
        ("data.tokenizer", "model.weights"),
        lambda c, h: bool(c.model.weights) and c.data.tokenizer == BYTES and h.tokenizer_vocab > 0,
        "a token would be a byte, and {model.weights} has weights for tokens of a tokenizer of its own",
        "the folder or file of that tokenizer, or data.tokenizer = bytes (by name, if they are meant)",
        unless_set=True,
    ),
    Rule(
        ("data.eos", "data.bos", "data.tokenizer"),
        lambda c, h: c.data.tokenizer == BYTES and (bool(c.data.eos) or c.data.bos != "auto"),
        "byte 0 ends a document of bytes, and no token begins it",
        "leave data.eos and data.bos out, or another data.tokenizer",
    ),
    Rule(
        ("model.vocab", "data.tokenizer"),
        lambda c, h: c.model.vocab < h.tokenizer_vocab,
        "the tokenizer has {host.tokenizer_vocab} tokens, more than the model",
        "model.vocab = {host.tokenizer_vocab} or more",
    ),
    Rule(
        ("data.validation", "train.eval_batches"),
        lambda c, h: c.data.kept_back == 0 and c.train.eval_batches > 0 and not (c.data.held_out or c.data.sources),
        "nothing is kept for validation, but train.eval_batches = {train.eval_batches}",
        "data.validation above 0, or train.eval_batches = 0",
    ),
)

TRANSPORT_RULES: tuple[Rule, ...] = (
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
        lambda c, h: c.train.transport in COPIED and leaves_host(c, h, "control"),
        "copy engines reach the GPUs of one host, and of {world} ranks {on_a_host} are on each",
        "train.transport = nccl",
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
        lambda c, h: len(set(slowed(c))) < len(c.train.slow),
        "a group has one link, and one is named twice",
        "each group of train.slow once",
    ),
    Rule(
        ("train.slow", "mesh.pp", "mesh.dp", "mesh.ep"),
        lambda c, h: bool(slowed_alone(c)),
        "no effect: on this mesh every group of {slowed_alone} has one rank",
        "leave {slowed_alone} out of train.slow",
    ),
)

TRAINING_RULES: tuple[Rule | Each, ...] = (
    *PRECISION_RULES,
    *DATA_RULES,
    *TRANSPORT_RULES,
    # Learning rate and optimizer
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
        remark=True,  # for a short try of a recipe is no mistake
    ),
    Rule(
        ("optimizer.name", "mesh.tp"),
        lambda c, h: c.optimizer.name == "muon" and c.mesh.tp > 1,
        "tensor-parallel ranks have parts of matrices, and Muon puts together what data-parallel ranks share",
        "mesh.tp = 1, or optimizer.name = adamw",
    ),
    Rule(
        ("optimizer.skip_spikes",),
        lambda c, h: 0 < c.optimizer.skip_spikes <= 1,
        "about half of all norms are above their median",
        "optimizer.skip_spikes above 1, or optimizer.skip_spikes = 0",
    ),
    # Checkpoints and machinery
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
        "a checkpoint has a held-out loss only after a validation: train.save_every = {train.save_every}, "
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
    Rule(
        ("run.name",),
        lambda c, h: not c.run.name.strip() or "/" in c.run.name or c.run.name in (".", ".."),
        "a run's name is a folder's name",
        "a run.name without slashes (run.folder names another place)",
    ),
)

TRAINING_WORDS: Words = {
    "decay": lambda c, h: c.train.decay[0],
    "slowed_alone": lambda c, h: " and ".join(slowed_alone(c)),
    "moved": lambda c, h: "CPU" if c.train.transport == "gloo" else "GPU",
    "fitting": lambda c, h: "gloo" if c.train.device == "cpu" else "nccl",
    "fitting_device": lambda c, h: "cpu" if c.train.transport == "gloo" else "cuda",
}
