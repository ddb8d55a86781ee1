"""What `torchtitan.toml` needs of code: rules of its own, and what is done where nothing is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hocket.foreign.entry import (
    RECIPES,
    Answer,
    Given,
    Rule,
    choice,
    entries,
    expert_ranks,
    file_of,
    model_of,
    ranks,
    started,
    tensor,
)
from hocket.foreign.translate import RANKS, System

P, T, L = "parallelism.", "training.", "lr_scheduler."
TP = f"{P}tensor_parallel_degree"
EP, SCHEDULE = f"{P}expert_parallel_degree", f"{P}pipeline_parallel_schedule"
PP, DP_SHARD, DP_REPLICATE = (
    f"{P}pipeline_parallel_degree",
    f"{P}data_parallel_shard_degree",
    f"{P}data_parallel_replicate_degree",
)
CP = f"{P}context_parallel_degree"
AXES = (PP, TP, CP)
CONFIG_FILES = ("job.config_file", "CONFIG_FILE")
"""What names a file with settings."""
CONVERTERS = "model.converters"
LOCAL, MICRO = f"{T}local_batch_size", f"{P}pipeline_parallel_microbatch_size"


def reshard(value: Any, given: Given) -> Answer:
    """By default weights stay after forward in a pipeline, and are given back without one."""
    keeps = value == "never" or (value == "default" and given.number(PP) > 1)
    return Answer("becomes", {"overlap.dp.strategy": "optim_grads" if keeps else "optim_grads_params"})


def replicate(value: Any, given: Given) -> Answer:
    """Replicas alone are plain data parallelism; with shards inside they are hybrid."""
    if value == 1:
        return Answer("not needed", words="there is none")
    shards = given.number(DP_SHARD, default=-1)
    if shards == 1:
        return Answer("becomes", {"overlap.dp.strategy": "no_shard", "mesh.dp": value})
    if shards < 0 and not given.gpus:
        return Answer("not there", words=f"it needs --gpus, or {DP_SHARD}, to become mesh.shard")
    shards = shards if shards > 0 else _data_ranks(given) // max(1, value)
    return Answer("becomes", {"mesh.dp": value * shards, "mesh.shard": shards})


def shard(value: Any, given: Given) -> Answer:
    if value == -1:
        return Answer("not needed", words="as many as --gpus leaves")
    if given.number(DP_REPLICATE) > 1:
        return Answer("not needed", words=f"it goes with {DP_REPLICATE}")
    if given.gpus and value != _data_ranks(given):
        return Answer("not there", words=f"{given.gpus} ranks leave {_data_ranks(given)} data ranks, not {value}")
    return Answer("becomes", {"mesh.dp": value})


def decay(value: Any, given: Given) -> Answer:
    """The rate stays until so large a share of the steps is left."""
    return Answer("becomes", {"train.schedule": "wsd", "train.decay": value})


def decay_type(value: Any, given: Given) -> Answer:
    """The shape of the decay, which without a ratio is all of the way behind the warm-up."""
    shapes = {"linear": "linear", "cosine": "cosine", "sqrt": "1-sqrt"}
    shape = shapes.get(value) if isinstance(value, str) else None
    if "lr_scheduler.decay_ratio" in given.values and shape:
        return Answer("becomes", {"train.decay_shape": shape})
    if shape in ("linear", "cosine"):
        return Answer("becomes", {"train.schedule": shape})
    return Answer("not there", words="without a decay_ratio the rate falls along a line or as half a cosine")


def batch(value: Any, given: Given) -> Answer:
    """Sequences and microbatches of a data rank: in a pipeline the local batch is cut, without one it is one piece."""
    size = given.number(MICRO) if given.number(PP) > 1 else value
    if size < 1 or value % size:
        return Answer("not there", words=f"{size} sequences of a microbatch do not divide it")
    settings = {"train.sequences": size, "train.microbatches": value // size * _accumulated(given, value)}
    return Answer("becomes", settings)


def _accumulated(given: Given, local: int) -> int:
    total, dp = given.number(f"{T}global_batch_size", default=-1), _data_ranks(given)
    return max(1, total // (local * dp)) if total > 0 and dp else 1


def _data_ranks(given: Given) -> int:
    return given.gpus // max(1, given.product(AXES))


def accumulation(value: Any, given: Given) -> Answer:
    if value == -1:
        return Answer("not needed", words="the local batches together")
    if not given.gpus:
        return Answer("not there", words="it needs --gpus to become train.microbatches")
    local, dp = given.number(LOCAL, default=0), _data_ranks(given)
    if local < 1 or dp < 1 or value < 1 or value % (local * dp):
        return Answer("not there", words=f"{value} sequences are no multiple of {local} ({LOCAL}) on {dp} data ranks")
    return Answer("not needed", words=f"it goes with {LOCAL}")


def async_tensor(value: Any, given: Given) -> Answer:
    """Off is a wish here: by itself a rule would put communication beside products."""
    return tensor({"overlap.tp.method": "auto" if value else "off"}, TP)(True, given)


def recomputed(value: Any, given: Given) -> Answer:
    """Whole layers; with expert ranks, those of a model whose layers all have experts."""
    if value == "full":
        experts = given.number(EP) > 1
        words = "attn, and of experts and mlp what the layers have"
        return Answer("becomes", {"plan.recompute": ("attn", "experts" if experts else "mlp")}, words)
    return _NOT_FULL(value, given)


def flavor(value: Any, given: Given) -> Answer:
    """A model by family and size."""
    family = given.values.get("model.name")
    if not isinstance(family, str):
        return Answer("not there", words="it needs model.name")
    return model_of(f"{family} {value}", file_of("torchtitan")[RECIPES], "its newest version's")


def config(value: Any, given: Given) -> Answer:
    """A function of torchtitan that returns a configuration, named by the model that it trains."""
    words = "its model; what else torchtitan's function sets must be given here, too"
    return model_of(str(value), file_of("torchtitan")[RECIPES], words)


def lowest(value: Any, given: Given) -> Answer:
    """The lowest rate, as a share of the highest."""
    return Answer("becomes", {"train.min_lr_ratio": float(value)})


def converted(value: Any, given: Given) -> Answer:
    """Products in fp8, where torchtitan converts linear layers to them."""
    asked = value if isinstance(value, list) else [part for part in str(value).split(",") if part]
    if not asked:
        return Answer("not needed", words="there are none")
    if all("float8" in str(each) for each in asked):
        words = "e4m3 with a scale for each row, in dense layers and experts; docs/fp8.md"
        return Answer("becomes", {"precision.compute": "fp8"}, words)
    return Answer("not there", words="fp8 in precision.compute alone, no other converters")


def fp8_gathers(value: Any, given: Given) -> Answer:
    """Weights that travel in fp8, where products are."""
    if value and _float8(given):
        return Answer("becomes", {"precision.gather": "fp8"})
    return Answer("not needed", words="weights travel in bf16")


def _float8(given: Given) -> bool:
    return "float8" in str(given.values.get(CONVERTERS, ""))


def param_format(value: Any, given: Given) -> Answer:
    """The format of products, but for those in fp8."""
    if _float8(given):
        return Answer("not needed", words=f"it goes with {CONVERTERS}")
    return _FORMATS(value, given)


def dataset(value: Any, given: Given) -> Answer:
    """Text that torchtitan loads by name, or from a path beside it."""
    if f"{T}dataset_path" in given.values:
        return Answer("not needed", words="data.paths says where it is")
    return Answer("not there", words="data.paths takes files of text; hocket loads no data set by its name")


def validated(value: Any, given: Given) -> Answer:
    """Batches of one validation; -1 is all there is."""
    if value == -1 and _validates(given):
        return Answer("not there", words="train.eval_batches is a number of batches")
    return evaluated("train.eval_batches")(value, given)


def evaluated(setting: str) -> Rule:
    """A setting of validations, where there are any."""

    def rule(value: Any, given: Given) -> Answer:
        if _validates(given):
            return Answer("becomes", {setting: value})
        return Answer("not needed", words="it goes with validation.enable")

    return rule


def validates(value: Any, given: Given) -> Answer:
    """Validations, which hocket has by itself."""
    if value:
        return Answer("not needed", words="validation.freq and validation.steps say how")
    return Answer("becomes", {"train.eval_batches": 0}, "hocket by itself keeps a share of the text for it")


def held_out(value: Any, given: Given) -> Answer:
    """Text of validations that torchtitan loads by name, or from a path beside it."""
    if not _validates(given) or "validation.dataset_path" in given.values:
        return Answer("not needed", words="validation.enable and validation.dataset_path say it")
    return Answer("not there", words="data.validation_paths takes files of text; hocket loads no data set by its name")


def texts(setting: str) -> Rule:
    """A path of text."""
    return lambda value, given: Answer("becomes", {setting: (str(value),)})


def _validates(given: Given) -> bool:
    return bool(given.values.get("validation.enable"))


def betas(value: Any, given: Given) -> Answer:
    """Both decay rates of AdamW, one of which may be torchtitan's own."""
    rates = (given.values.get(f"optimizer.beta{n}", rate) for n, rate in ((1, 0.9), (2, 0.95)))
    return Answer("becomes", {"train.betas": tuple(map(float, rates))})


_FORMATS = choice(
    "fp32 and bf16 alone",
    ("bfloat16", {"precision.compute": "bf16"}),
    ("float32", {"precision.compute": "fp32"}),
)
_NOT_FULL = choice(
    "none, or whole parts of all layers",
    ("none", {"plan.recompute": ()}),
    ("selective", {"missing": "plan.recompute names parts and first layers, not every n-th layer or operators"}),
)


def spelled(name: str) -> str:
    """A setting as the table has it: without dashes, and whole sections of fp8 as one."""
    name = name.lstrip("-").replace("-", "_")
    section = name.split(".")[0]
    whole = f"{section}.*" in _SECTIONS and name not in _NAMES
    return f"{section}.*" if whole else name


def sharded(given: Given) -> Answer | None:
    """What happens to weights after forward where nothing is said."""
    if f"{P}fsdp_reshard_after_forward" in given.values or given.number(DP_SHARD, default=-1) == 1:
        return None
    return reshard("default", given)


def _wire(given: Given) -> Answer | None:
    """Torchtitan reduces in fp32, as long as it shards."""
    if f"{T}mixed_precision_reduce" in given.values:
        return None
    return Answer("becomes", {"precision.wire": "fp32"}, "hocket by itself sends them in what computes")


def _unless(names: tuple[str, ...], settings: Mapping[str, Any]) -> Callable[[Given], Answer | None]:
    """What torchtitan does in a run of a whole model where none of these is given."""

    def make(given: Given) -> Answer | None:
        there = "model.flavor" not in given.values or any(name in given.values for name in names)
        return None if there else Answer("becomes", settings)

    return make


def _ranks(given: Given) -> Answer | None:
    if given.number(DP_SHARD, default=-1) > 1 or given.number(DP_REPLICATE) > 1:
        return None  # it says itself how many there are
    return ranks(given, AXES)


_RULES: Mapping[str, Rule] = {
    "expert_ranks": expert_ranks(_data_ranks, (TP, CP)),
    "paths": texts("data.paths"),
    "validation_paths": texts("data.validation_paths"),
    "eval_every": evaluated("train.eval_every"),
    **{
        rule.__name__: rule
        for rule in (
            replicate,
            shard,
            reshard,
            decay,
            decay_type,
            batch,
            accumulation,
            async_tensor,
            recomputed,
            flavor,
            config,
            lowest,
            converted,
            fp8_gathers,
            param_format,
            dataset,
            validated,
            held_out,
            validates,
            betas,
        )
    },
}
_ENTRIES = entries("torchtitan", _RULES)
_NAMES = {name for row in _ENTRIES for name in row.names}
_SECTIONS = {name for name in _NAMES if name.endswith(".*")}

TORCHTITAN = System(
    "torchtitan",
    _ENTRIES,
    (
        (RANKS, _ranks),
        ("(no parallelism.fsdp_reshard_after_forward)", sharded),
        ("(no training.mixed_precision_reduce)", _wire),
        (
            "(no training.mixed_precision_param)",
            _unless((f"{T}mixed_precision_param", CONVERTERS), {"precision.compute": "bf16"}),
        ),
        ("(no training.seq_len)", _unless((f"{T}seq_len",), {"data.sequence_length": 2048})),
        ("(no training.max_norm)", _unless((f"{T}max_norm",), {"train.clip": 1.0})),
        ("(no optimizer.lr)", _unless(("optimizer.lr",), {"train.lr": 8e-4})),
        ("(no lr_scheduler.warmup_steps)", _unless((f"{L}warmup_steps",), {"train.warmup": 200})),
        ("(no lr_scheduler.decay_type)", _unless((f"{L}decay_type", f"{L}decay_ratio"), {"train.schedule": "linear"})),
        ("(no lr_scheduler.min_lr_factor)", _unless((f"{L}min_lr_factor", f"{L}lr_min"), {"train.min_lr_ratio": 0.0})),
    ),
    spelled,
    (("mesh.tp", (TP,)), ("mesh.cp", (CP,)), ("mesh.pp", (PP,)), ("plan.chunks", (SCHEDULE,)), ("mesh.ep", (EP,))),
    started(("nproc_per_node", "NGPU"), ("nnodes",)),
)
